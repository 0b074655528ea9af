"""Detects writes to tensors during a copy, by sampling a few elements of every tensor (a few thousand reads).

Version counters detect writes that torch counts, and only after each write has ended. They miss writes through `.data`,
numpy views, fused kernels and replayed graphs. So `step()` samples some elements of each tensor, while the training
waits. When the copies have ended, the samples are compared with the copy and, on the host, with the tensors too:

- If the copy differs, the element was written before it was copied. The first and last element of each tensor are
  always compared. With few tensors, many elements between them are compared too, different ones each time.
- If the tensor differs, a write is in progress or has just ended, even if the copy is equal. Writes start at the first
  element. If that element is unchanged now, no write had started before the copy ended.

Sampling cannot detect a write that torch does not count and that leaves all sampled elements unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.layout import Layout
from ckpt.events import log

Array = npt.NDArray[np.int64]

ELEMENTS = 4096  # elements to sample in total, distributed evenly; at least two of each tensor
TURNS_LOG2 = 4  # after 2 to this power fingerprints, the same positions are sampled again
_WHERE = {2, 4, 5, 7}  # columns of a row that contain positions, see `_row`
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Group:
    """Sampled positions in the memory of one device, in words of one width."""

    def __init__(
        self, device: torch.device, width: int, rows: Array, between: int, storages: dict[int, torch.UntypedStorage]
    ) -> None:
        """Sample the first and last element of each row (see `_row`), and `between` elements between them.

        storages: storages of the tensors, by tensor index
        """
        number, count, address, apart, last, offset, apart_there, last_there = rows.T
        parts = np.minimum(between, count)
        row = np.repeat(np.arange(len(rows)), parts)
        part = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = count[row] * part // parts[row]
        span = count[row] * (part + 1) // parts[row] - begin
        more = np.flatnonzero(last > address)
        still = np.zeros(len(rows) + len(more), np.int64)
        base, end = int(address.min()), int(last.max()) + width
        spans = np.concatenate([still, span]) if len(span) else span

        def places(*where: Array, apart: Array, to: torch.device) -> tuple[Tensor, Tensor, Tensor]:
            found = np.concatenate(where) // width, spans, np.concatenate([still, apart[row]]) // width
            first, moves, distance = (torch.from_numpy(one).to(to) for one in found)
            return first, moves, distance

        # Memory from the start of the first tensor to the end of the last, including everything between them.
        memory = torch._C._construct_storage_from_data_pointer(base, device, end - base)
        self.memory = torch.empty(0, dtype=_WORDS[width], device=device).set_(memory)
        # For each position: the index of its tensor in the layout, and its positions on the device and in a slot.
        self.numbers = torch.from_numpy(np.concatenate([number, number[more], number[row]]))
        here = (address - base, last[more] - base, address[row] - base + begin * apart[row])
        there = (offset, last_there[more], offset[row] + begin * apart_there[row])
        self._live = places(*here, apart=apart, to=device)
        self._slot = places(*there, apart=apart_there, to=torch.device("cpu"))
        self._storages, self._memories = storages, _memories(storages.values())

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def freed(self) -> set[int]:
        """Return the indices of tensors whose memory was freed. If there are any, nothing in this group can be read."""
        now = _memories(self._storages.values())
        if now == self._memories:
            return set()
        return {n for n, was, is_now in zip(self._storages, self._memories, now, strict=True) if was != is_now}

    def look(self, turn: int) -> Tensor:
        return self.memory.index_select(0, _places(self._live, turn))

    def look_in(self, slot: Tensor, turn: int) -> Tensor:
        width = self.memory.itemsize
        words = slot[: len(slot) // width * width].view(self.memory.dtype)
        return words.index_select(0, _places(self._slot, turn))


class SampledPlaces:
    """The positions to sample in the tensors `numbers` of a layout. Valid until a tensor moves."""

    def __init__(self, layout: Layout, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._turn = 0
        self._groups: list[_Group] = []
        rows: dict[tuple[torch.device, int], list[list[int]]] = {}
        storages: dict[tuple[torch.device, int], dict[int, torch.UntypedStorage]] = {}
        for number, tensor in zip(numbers, tensors, strict=True):
            # Exclude negated and conjugated views, because their copies are stored differently.
            if tensor.numel() and not (tensor.is_conj() or tensor.is_neg()):
                width, row = _row(number, tensor, layout.arrangement.offsets[number])
                rows.setdefault((tensor.device, width), []).append(row)
                storages.setdefault((tensor.device, width), {})[number] = tensor.untyped_storage()
                if tensor.itemsize == 16:  # sample the imaginary half of complex numbers too
                    rows[tensor.device, width].append([n + 8 * (i in _WHERE) for i, n in enumerate(row)])
        between = max(0, ELEMENTS // max(1, len(tensors)) - 2)
        for (device, width), found in rows.items():
            if device.type in ("cpu", "cuda"):  # on other devices, an address may have another meaning
                self._groups.append(_Group(device, width, np.array(found, np.int64), between, storages[device, width]))
            else:
                log.warning("on %s, a copy detects only those concurrent writes that torch counts", device)

    def look(self, turn: int | None = None) -> Fingerprint:
        """Sample the elements now. On a device, this runs after the work queued on its current stream.

        turn: selects the elements to sample, modulo 16, default: not the elements of the last call
        """
        self._turn = (self._turn + 1 if turn is None else turn) % (1 << TURNS_LOG2)
        return Fingerprint(self._groups, self._turn)


class Fingerprint:
    """Sampled elements of some tensors at one moment."""

    def __init__(self, groups: list[_Group], turn: int) -> None:
        self._groups, self._turn = groups, turn
        self._found = [group.look(turn) for group in groups]
        self._held: list[Tensor] = []

    def fetch(self, streams: dict[torch.device, Any]) -> None:
        """Queue the copy of the samples to the host, after the work queued on these streams."""
        for i, group in enumerate(self._groups):
            if group.device in streams:
                found = self._found[i]
                with torch.get_device_module(group.device).stream(streams[group.device]):
                    here = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
                    here.copy_(found, non_blocking=True)
                self._found[i] = here
                self._held.append(found)  # keeps the samples alive until the copy has ended

    def digests(self) -> dict[int, bytes]:
        """Return a digest of the sampled elements of each tensor, by index. Waits for devices."""
        words: dict[int, list[bytes]] = {}
        for group, found in zip(self._groups, self._found, strict=True):
            numbers, here = group.numbers.numpy(), found.cpu().numpy()
            order = np.argsort(numbers, kind="stable")
            for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
                words.setdefault(int(numbers[rows[0]]), []).append(here[rows].tobytes())
        return {number: chunk_digest(b"".join(found)) for number, found in words.items()}

    def changed(self) -> set[int]:
        """Return the indices of host tensors that have changed since the samples were taken."""
        both = [pair for pair in zip(self._groups, self._found, strict=True) if pair[0].device.type == "cpu"]
        freed = {id(group): group.freed() for group, _ in both}
        found = _differing((group, was, group.look(self._turn)) for group, was in both if not freed[id(group)])
        return found.union(*freed.values())

    def differing(self, slot: Tensor) -> set[int]:
        """Return the indices of tensors whose copy in `slot` differs from the samples. Call `fetch` first."""
        both = zip(self._groups, self._found, strict=True)
        return _differing((group, was, group.look_in(slot, self._turn)) for group, was in both)


def _differing(found: Iterable[tuple[_Group, Tensor, Tensor]]) -> set[int]:
    return {n for group, was, now in found if not torch.equal(was, now) for n in group.numbers[was != now].tolist()}


def _places(of: tuple[Tensor, Tensor, Tensor], turn: int) -> Tensor:
    """Return positions at a turn. `of`: first positions, number of elements over which each moves (empty if none
    moves), and the distance of these elements."""
    where, span, apart = of
    return where if not len(span) else where + ((span * turn) >> TURNS_LOG2) * apart


def _row(number: int, tensor: Tensor, offset: int) -> tuple[int, list[int]]:
    """Return the word width of a tensor and its copy, and its row of positions in bytes: index, number of elements,
    address, element distance, address of the last; offset in the slot, distance there, offset of the last. Only
    elements along the longest dimension of a non-contiguous tensor count."""
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
