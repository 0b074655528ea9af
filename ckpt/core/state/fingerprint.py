"""Has somebody written to what is being copied? A few elements of every tensor tell, for some thousand reads.

Version counters tell of writes that torch counts, each after it has ended, and of nothing that goes through `.data`, a
numpy view, a fused kernel or a replayed graph. So the elements at some places are noted while the training stands still
in `step()`, and looked at again when the copies have ended, in the copy and, on the host, in the tensors themselves:

- The copy differs: a write came before the copy of that element. Of each tensor the first element is looked at, the
  last, and, where there are few tensors, so many between them, at others each time, that few changed ones are met.
- The tensor differs, though its copy may not: a write is under way, or has just ended. Writes begin with the first
  element, so one that has reached nothing by now has not begun before the copy ended.

What it cannot see: a write that torch does not count and that leaves all of these elements as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ckpt.core.format.digest import blob_digest
from ckpt.core.format.layout import Layout
from ckpt.events import log

Array = npt.NDArray[np.int64]

ELEMENTS = 4096  # in all, shared out evenly; but two of each tensor in any case
TURNS_LOG2 = 4  # 2 to this fingerprints later the same places come again
_WHERE = {2, 4, 5, 7}  # what is a place in a row, see `_row`
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Group:
    """Places in the memory of one device, in words of one width."""

    memory: Tensor  # from the first of the tensors to the end of the last, whatever lies between them
    numbers: Tensor  # of each place: which tensor of the layout it is in
    live: tuple[Tensor, Tensor, Tensor]  # on the device: see `_places`
    slot: tuple[Tensor, Tensor, Tensor]  # the same within a slot, on the host
    storages: dict[int, torch.UntypedStorage]  # by number of the tensor
    memories: list[tuple[int, int]]  # where these storages were, and how large

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def freed(self) -> set[int]:
        """Return the numbers of tensors whose memory is not there any more, so that nothing here can be read."""
        now = _memories(self.storages.values())
        if now == self.memories:
            return set()
        return {n for n, was, is_now in zip(self.storages, self.memories, now, strict=True) if was != is_now}

    def look(self, turn: int) -> Tensor:
        return self.memory.index_select(0, _places(self.live, turn))

    def look_in(self, slot: Tensor, turn: int) -> Tensor:
        width = self.memory.itemsize
        words = slot[: len(slot) // width * width].view(self.memory.dtype)
        return words.index_select(0, _places(self.slot, turn))


class SampledPlaces:
    """Where to look in tensors of a layout (`numbers`), for as long as each of them stays where it is."""

    def __init__(self, layout: Layout, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._turn = 0
        self._groups: list[_Group] = []
        rows: dict[tuple[torch.device, int], list[list[int]]] = {}
        storages: dict[tuple[torch.device, int], dict[int, torch.UntypedStorage]] = {}
        for number, tensor in zip(numbers, tensors, strict=True):
            # What is negated or conjugated when it is read is stored otherwise than it is copied.
            if tensor.numel() and not (tensor.is_conj() or tensor.is_neg()):
                width, row = _row(number, tensor, layout.arrangement.offsets[number])
                rows.setdefault((tensor.device, width), []).append(row)
                storages.setdefault((tensor.device, width), {})[number] = tensor.untyped_storage()
                if tensor.itemsize == 16:  # the other half of complex numbers
                    rows[tensor.device, width].append([n + 8 * (i in _WHERE) for i, n in enumerate(row)])
        between = max(0, ELEMENTS // max(1, len(tensors)) - 2)
        for (device, width), found in rows.items():
            if device.type in ("cpu", "cuda"):  # of others an address may mean something else
                self._groups.append(_group(device, width, np.array(found, np.int64), between, storages[device, width]))
            else:
                log.warning("on %s only writes that torch counts are noticed during a copy", device)

    def look(self, turn: int | None = None) -> Fingerprint:
        """The elements as they are now; on a device, when it has done what is queued on its current stream.

        turn: which elements, modulo 16, default: others than the last time.
        """
        self._turn = (self._turn + 1 if turn is None else turn) % (1 << TURNS_LOG2)
        return Fingerprint(self._groups, self._turn)


class Fingerprint:
    """Some elements of some tensors at one moment."""

    def __init__(self, groups: list[_Group], turn: int) -> None:
        self._groups, self._turn = groups, turn
        self._found = [group.look(turn) for group in groups]
        self._held: list[Tensor] = []

    def fetch(self, streams: dict[torch.device, Any]) -> None:
        """Have the host hold all of it when these streams have come so far."""
        for i, group in enumerate(self._groups):
            if group.device in streams:
                found = self._found[i]
                with torch.get_device_module(group.device).stream(streams[group.device]):
                    here = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
                    here.copy_(found, non_blocking=True)
                self._found[i] = here
                self._held.append(found)  # until then

    def digests(self) -> dict[int, bytes]:
        """Return a digest of the elements of each tensor, by number. Waits for a device."""
        words: dict[int, list[bytes]] = {}
        for group, found in zip(self._groups, self._found, strict=True):
            numbers, here = group.numbers.numpy(), found.cpu().numpy()
            order = np.argsort(numbers, kind="stable")
            for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
                words.setdefault(int(numbers[rows[0]]), []).append(here[rows].tobytes())
        return {number: blob_digest(b"".join(found)) for number, found in words.items()}

    def changed(self) -> set[int]:
        """The numbers of tensors on the host that are not now what they were."""
        both = [pair for pair in zip(self._groups, self._found, strict=True) if pair[0].device.type == "cpu"]
        freed = {id(group): group.freed() for group, _ in both}
        found = _differing((group, was, group.look(self._turn)) for group, was in both if not freed[id(group)])
        return found.union(*freed.values())

    def differing(self, slot: Tensor) -> set[int]:
        """The numbers of tensors whose copy is not what they were. `slot`: its bytes. After `fetch`."""
        both = zip(self._groups, self._found, strict=True)
        return _differing((group, was, group.look_in(slot, self._turn)) for group, was in both)


def _differing(found: Iterable[tuple[_Group, Tensor, Tensor]]) -> set[int]:
    return {n for group, was, now in found if not torch.equal(was, now) for n in group.numbers[was != now].tolist()}


def _places(of: tuple[Tensor, Tensor, Tensor], turn: int) -> Tensor:
    """`of`: where each is at first, through how many elements it moves (empty if none does), and how far apart."""
    where, span, apart = of
    return where if not len(span) else where + ((span * turn) >> TURNS_LOG2) * apart


def _row(number: int, tensor: Tensor, offset: int) -> tuple[int, list[int]]:
    """How wide the words are that a tensor and its copy consist of, and where it lies, in bytes: its number, elements,
    address, distance of elements, address of the last; place in the slot, distance there, place of the last. Of one
    that is not contiguous only the elements along its longest dimension count."""
    size, address, count = tensor.itemsize, tensor.data_ptr(), tensor.numel()
    apart = apart_there = size
    last = last_there = (count - 1) * size
    if not tensor.is_contiguous():
        shape, strides = tensor.shape, tensor.stride()
        along = max(range(len(shape)), key=shape.__getitem__)
        count, apart, apart_there = shape[along], strides[along] * size, prod(shape[along + 1 :]) * size
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) * size
    aligned = 8 | size | address | offset
    return aligned & -aligned, [
        number, count, address, apart, address + last, offset, apart_there, offset + last_there
    ]  # fmt: skip


def _memories(storages: Iterable[torch.UntypedStorage]) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one.nbytes()) for one in storages]


def _group(
    device: torch.device,
    width: int,
    rows: Array,
    between: int,
    storages: dict[int, torch.UntypedStorage],
) -> _Group:
    """The first element of each row, the last, and others from all parts of it."""
    number, count, address, apart, last, offset, apart_there, last_there = rows.T
    parts = np.minimum(between, count)
    row = np.repeat(np.arange(len(rows)), parts)
    part = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = count[row] * part // parts[row]
    span = count[row] * (part + 1) // parts[row] - begin
    more = np.flatnonzero(last > address)
    still = np.zeros(len(rows) + len(more), np.int64)
    base, end = int(address.min()), int(last.max()) + width
    memory = torch._C._construct_storage_from_data_pointer(base, device, end - base)
    spans = np.concatenate([still, span]) if len(span) else span

    def places(*where: Array, apart: Array, to: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        found = np.concatenate(where) // width, spans, np.concatenate([still, apart[row]]) // width
        first, moves, distance = (torch.from_numpy(one).to(to) for one in found)
        return first, moves, distance

    here = (address - base, last[more] - base, address[row] - base + begin * apart[row])
    there = (offset, last_there[more], offset[row] + begin * apart_there[row])
    return _Group(
        torch.empty(0, dtype=_WORDS[width], device=device).set_(memory),
        torch.from_numpy(np.concatenate([number, number[more], number[row]])),
        places(*here, apart=apart, to=device),
        places(*there, apart=apart_there, to=torch.device("cpu")),
        storages,
        _memories(storages.values()),
    )
