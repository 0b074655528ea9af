"""Where the tensors of a checkpoint go: matched against the live state first, filled afterwards.

`Placement` is built without changing anything and lists every mismatch, so that one error tells all. `Filler` then
takes verified bytes, from whichever tier, straight into the tensors: no second copy of the state is ever made. What was
saved in pieces, and is wanted in other pieces, meets here: each overlap of a saved box and a wanted box is copied.
"""

from __future__ import annotations

import bisect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ckpt.errors import CheckpointError, CorruptError, MismatchError
from ckpt.format.boxes import Box, boxes_of_run, intersect, run_of, within
from ckpt.format.layout import BITS, TensorSpec
from ckpt.format.merged import Ambiguous, Key, SavedState
from ckpt.format.partition import GLOBAL, Seat
from ckpt.format.values import Json, Path, decode, show
from ckpt.state.sharding import LocalPiece, Replicas, StateEntry, is_dtensor, local, pieces, slices
from ckpt.state.tensors import DTYPE_NAME, TORCH_DTYPE, as_bytes, check_array, empty, memory_of, saved_device, to_array

# Bytes that came over a network may be read-only memory; nothing here writes to what it reads.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning, __name__)

I64 = npt.NDArray[np.int64]


class Names(dict[int, StateEntry]):
    """Parameters and plain tensors that optimizers may step, by id; and the memory of all that the state holds beside
    optimizers: `fixed` what stays from step to step, `loose` what is read anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fixed, self._loose = list[list[StateEntry]](), list[StateEntry]()
        self._spans: tuple[list[Span] | None, list[Span] | None] = None, None

    def note(self, fixed: list[list[StateEntry]], loose: list[StateEntry]) -> None:
        """What the state holds now. Looked at when somebody asks."""
        same = len(fixed) == len(self._fixed) and all(a is b for a, b in zip(fixed, self._fixed, strict=True))
        self._fixed, self._loose, self._spans = fixed, loose, (self._spans[0] if same else None, None)

    def hold(self, span: Span | None) -> bool:
        """Whether the state holds all of a tensor's memory, be it as parts of it, or as a part of something."""
        if span is None:
            return False
        fixed, loose = self._spans
        if fixed is None or loose is None:
            fixed = fixed or _joined([entry for each in self._fixed for entry in each])
            loose = _joined(self._loose)
            self._spans = fixed, loose
        return _inside(span, fixed) or _inside(span, loose)


Span = tuple[str, int, float]


def span_of(tensor: Tensor) -> Span | None:
    """A device, and the addresses on it that a tensor fills; None if it leaves gaps there."""
    mine = local(tensor)
    reach = sum((size - 1) * stride for size, stride in zip(mine.shape, mine.stride(), strict=True))
    if not mine.numel() or reach + 1 != mine.numel():
        return None
    return str(mine.device), mine.data_ptr(), mine.data_ptr() + mine.nbytes


def _inside(span: Span, spans: list[Span]) -> bool:
    device, start, stop = span
    i = bisect.bisect_right(spans, (device, start, math.inf)) - 1
    return i >= 0 and spans[i][0] == device and spans[i][2] >= stop


def _joined(entries: list[StateEntry]) -> list[Span]:
    """All that these tensors fill, as spans that do not touch, ascending."""
    found: list[Span] = []
    for device, start, stop in sorted(span for e in entries if (span := span_of(e.tensor)) is not None):
        if found and found[-1][0] == device and start <= found[-1][2]:
            found[-1] = device, found[-1][1], max(stop, found[-1][2])
        else:
            found.append((device, start, stop))
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """Memory to fill with a box of a saved tensor."""

    tensor: Tensor
    box: Box


@dataclass
class Placement:
    """`fills`: for every saved tensor that this rank wants, the live or new tensors that it goes to."""

    saved: SavedState
    strict: bool
    names: Names = field(default_factory=Names)
    seat: Seat = field(default_factory=Seat)
    fills: dict[Key, list[Target]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    apart: set[str] = field(default_factory=set)  # replicas here, of which each rank had saved its own
    finishers: list[Callable[[], object]] = field(default_factory=list)
    last: list[Callable[[], object]] = field(default_factory=list)  # after all finishers: they may draw random numbers
    _keys: dict[tuple[str, int | None], Key | None] = field(default_factory=dict)
    _reader: int | None = None
    _asked: dict[tuple[str, int, bool, int | None], tuple[StateEntry, Key | None]] = field(default_factory=dict)
    _cut: dict[tuple[str, int], tuple[StateEntry, list[LocalPiece]]] = field(default_factory=dict)
    _created: dict[Key, Tensor] = field(default_factory=dict)
    _handed: set[Key] = field(default_factory=set)  # created only to be handed to a load_state_dict, which copies
    _live: dict[Key, list[Tensor]] = field(default_factory=dict)  # what is filled, and what such a call will fill
    _called: dict[Key, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accelerated = any(t.spec.accelerator for t in self.saved.tensors.values())

    @property
    def alone(self) -> bool:
        """One rank saved this and one restores it: then everything must be there on both sides."""
        return self.saved.world == self.seat.size == 1

    @property
    def resized(self) -> bool:
        """Whether the number of ranks has changed."""
        return self.saved.world != self.seat.size

    def key(self, name: str, instance: int | None = None, *, lenient: bool = True) -> Key | None:
        """The saved tensor that a name means here; None, and a problem, if that is not clear."""
        if self._reader is not None:  # as that rank saw it
            found = self.saved.resolve(name, self._reader, self.saved.world, instance, lenient=True)
            return found if isinstance(found, tuple) else None
        if (name, instance) not in self._keys:
            found = self.saved.resolve(name, self.seat.rank, self.seat.size, instance, lenient=lenient)
            if found is None:
                raise CorruptError(f"the checkpoint refers to {name}, which it does not hold")
            if isinstance(found, Ambiguous):
                ranks = ", ".join(map(str, found.ranks[:8]))
                self.problem(
                    f"{name} was saved by ranks {ranks} with values of their own, which differ: it is not clear what "
                    f"this rank should take. {self.saved.world} ranks saved it, and {self.seat.size} restore it"
                )
                found = None
            self._keys[name, instance] = found
        return self._keys[name, instance]

    def spec(self, name: str) -> TensorSpec:
        """Of the saved tensor, whole."""
        key = self.key(name)
        found = key if key is not None else (name, self.saved.instances(self.saved.canonical(name, self.seat.rank))[0])
        return self.saved.tensors[found].spec

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def finish(self, path: Path, work: Callable[[], object], *, last: bool = False) -> None:
        """Do this when the tensors are filled. What the code of others makes of it may be an error of any kind."""

        def named() -> None:
            try:
                work()
            except CheckpointError:
                raise
            except Exception as error:
                raise CorruptError(f"{show(path)} does not take what was saved of it: {error!r}") from error

        (self.last if last else self.finishers).append(named)

    def fits(self, name: str, entry: StateEntry) -> bool:
        key = self._key_for(name, entry)
        return key is not None and self._form(entry) == (self.saved.tensors[key].spec.shape, self.spec(name).dtype)

    def _form(self, entry: StateEntry) -> tuple[tuple[int, ...], str | None]:
        """The shape of the whole tensor, and the dtype."""
        here = self._pieces(entry)
        shape = here[0].holding.full if here else tuple(entry.tensor.shape)
        return shape, DTYPE_NAME.get(entry.tensor.dtype)

    def _pieces(self, entry: StateEntry) -> list[LocalPiece]:
        """Of a live tensor, worked out once. None of one whose dtype cannot be saved."""
        key = entry.name, id(entry.tensor)  # kept alive by the entry
        if key not in self._cut:
            self._cut[key] = entry, pieces(entry, self.seat) if DTYPE_NAME.get(entry.tensor.dtype) else []
        return self._cut[key][1]

    def match(self, path: Path, saved: Iterable[str], live: Mapping[str, StateEntry]) -> None:
        """Fill live tensors by name; what is missing, unexpected or different is a problem."""
        for name in self.compare(path, saved, live):
            self.fill(name, live[name])

    def compare(self, path: Path, saved: Iterable[str], live: Mapping[str, StateEntry]) -> list[str]:
        """Note every difference; the names that can be filled."""
        names = set(saved)
        for name in sorted(live.keys() - names):
            self.problem(f"{name} is not in the checkpoint")
        for name in sorted(names - live.keys()) if self.alone else ():
            self.problem(f"{name} is in the checkpoint, and not in {show(path)}")
        return [name for name in live if name in names and self._comparable(name, live[name])]

    def _comparable(self, name: str, entry: StateEntry) -> bool:
        key = self._key_for(name, entry)
        if key is None:
            return False
        spec, (shape, dtype) = self.saved.tensors[key].spec, self._form(entry)
        if spec.shape != shape:
            self.problem(f"{name} has shape {list(spec.shape)} in the checkpoint and {list(shape)} here")
            return False
        if spec.dtype != dtype:
            self.problem(f"{name} has dtype {spec.dtype} in the checkpoint and {dtype} here")  # cast, if lenient
        return True

    def _key_for(self, name: str, entry: StateEntry) -> Key | None:
        asked = name, id(entry.tensor), entry.guarded, self._reader
        if asked not in self._asked:  # several times of each tensor
            self._asked[asked] = entry, self._look_up(name, entry)
        return self._asked[asked][1]

    def _look_up(self, name: str, entry: StateEntry) -> Key | None:
        here = self._pieces(entry)
        instance = here[0].holding.instance if here else None
        whole = all(p.holding.sizes == p.holding.full for p in here)
        if instance != GLOBAL or not whole or self.resized:
            return self.key(name, instance, lenient=not entry.guarded)
        key = self.key(name, None, lenient=not entry.guarded)
        if key is not None and key[1] != GLOBAL and not self.saved.identical(key[0]):
            self.apart.add(entry.name)  # replicas that had drifted: each rank goes on with its own
        return key

    def fill(self, name: str, entry: StateEntry) -> None:
        """Fill what this rank has of a tensor."""
        key = self._key_for(name, entry)
        if key is None:
            return
        self.watch(name, entry)
        for piece in self._pieces(entry):
            self.fills.setdefault(key, []).append(Target(piece.tensor, _box(piece)))

    def watch(self, name: str, entry: StateEntry) -> None:
        """The user's own code will fill this tensor: only what it shares memory with matters here."""
        key = self._key_for(name, entry)
        if key is not None:
            self._live.setdefault(key, []).append(local(entry.tensor))
            self._called.setdefault(key, set()).add(name)

    def create(self, name: str, device: torch.device, beside: Replicas | Tensor | None = None) -> Tensor:
        """A new tensor for `name`; the same one for its aliases. Optimizer state of a DTensor is one like it."""
        key = self.key(name)
        spec = self.spec(name)
        if key is None:
            return empty(spec, device)  # a problem has been noted
        if key not in self._created:
            like: Any = beside
            if like is not None and is_dtensor(like) and tuple(like.shape) == spec.shape and not name.endswith(".step"):
                made = torch.empty_like(like, dtype=TORCH_DTYPE[spec.dtype], requires_grad=False)
            else:
                made = empty(spec, device)
            self._created[key] = made
            entry = StateEntry(name, made, True, beside)
            if isinstance(beside, Replicas) or not is_dtensor(made):
                self.fills.setdefault(key, []).append(Target(made, ((0,) * made.dim(), tuple(made.shape))))
                self._live.setdefault(key, []).append(made)
            else:
                self.fill(name, entry)
        return self._created[key]

    def build(
        self,
        values: Json,
        live: Mapping[str, StateEntry] | None = None,
        like: Mapping[str, StateEntry] | None = None,
        *,
        rank: int | None = None,
    ) -> Callable[[], Any]:
        """Plain values again, to be called when the tensors in them are filled: into `live` ones, or new ones.

        `like`: live tensors that the new ones will be copied into; a DTensor gets a DTensor. `rank`: that saved these
        values, if they are not those that this rank takes.
        """
        self._reader = rank
        try:
            tensors = self._tensors_of(values, live, like)
        finally:
            self._reader = None

        def extern(reference: Json) -> object:
            if reference["$"] == "tensor":
                return tensors[reference["name"]]
            if reference["$"] == "ndarray":
                return to_array(tensors[reference["name"]].cpu(), reference)
            raise CorruptError(f"unknown tag {reference['$']!r}: written by a newer version?")

        decode(values, self._check)  # whatever is wrong with them is said before anything is changed
        return lambda: decode(values, extern)

    def _check(self, reference: Json) -> None:
        """CorruptError or ValueError unless it is one of a tensor, or of an array of as many bytes as are stored."""
        if reference["$"] not in ("tensor", "ndarray"):
            raise CorruptError(f"unknown tag {reference['$']!r}: written by a newer version?")
        if type(name := reference["name"]) is not str:
            raise CorruptError(f"not the name of a tensor: {name!r:.80}")
        if reference["$"] == "ndarray":
            check_array(self.spec(name), reference)

    def _tensors_of(
        self, values: Json, live: Mapping[str, StateEntry] | None, like: Mapping[str, StateEntry] | None
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name in references(values):
            have = (live or {}).get(name)
            if have is not None and self._comparable(name, have):
                self.fill(name, have)
                tensors[name] = have.tensor
            else:
                model = (like or {}).get(name)
                tensors[name] = self.create(name, saved_device(self.spec(name)), model.tensor if model else None)
                key = self.key(name)
                if live is None and key is not None:
                    self._handed.add(key)
        return tensors

    def check(self) -> None:
        """MismatchError that lists every problem, unless told to be lenient."""
        if self.problems and self.strict:
            raise mismatch(self.problems)

    def check_sharing(self) -> None:
        """Tied weights must be tied on both sides: silently untying them would change the training."""
        owners: dict[Any, Key] = {}
        for key, tensors in self._live.items():
            handed = self._created.get(key) if key in self._handed else None
            apart = None if handed is None else memory_of(local(handed))
            memories = {m for t in tensors if (m := memory_of(t)) is not None and m != apart}
            if len(memories) > 1:
                aliases = (a for view in self.saved.views for a, n in view.aliases.items() if n == key[0])
                names = dict.fromkeys([key[0], *aliases])
                self.problem(f"{' and '.join(names)} were one tensor when they were saved, and are not here")
            for memory in memories:
                other = owners.setdefault(memory, key)
                if not self.saved.same(other, key):
                    self.problem(f"{other[0]} and {key[0]} are one tensor here, and were not when they were saved")


def mismatch(problems: list[str]) -> MismatchError:
    shown = "\n  ".join(problems[:20])
    more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
    return MismatchError(
        f"the checkpoint does not fit this state, so nothing was changed:\n  {shown}{more}\n"
        "Make the state as it was, or pass strict=False to take what fits"
    )


def _box(piece: LocalPiece) -> Box:
    return piece.holding.offsets, piece.holding.sizes


def references(values: Json) -> list[str]:
    """The names of all tensors that plain values refer to."""
    found: list[str] = []
    pending = [values]
    while pending:
        value = pending.pop()
        if type(value) is dict:
            if value.get("$") in ("tensor", "ndarray"):
                found.append(str(value.get("name")))
            else:
                pending.extend(value.values())
        elif type(value) is list:
            pending.extend(value)
    return found


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Where a shard and a target meet. `region`: in the shard; `view`: of the target, of the same shape.

    `run`: the bytes of the shard that are the region, if they are one run and the target takes them as one.
    """

    region: Box
    view: Tensor
    run: tuple[int, int] | None


class Filler:
    """Puts verified blobs into tensors. `add` may be called from several threads for different blobs.

    `blobs`: the numbers of all that are wanted, ascending.
    """

    def __init__(self, saved: SavedState, fills: Mapping[Key, list[Target]], *, in_place: bool = True) -> None:
        self._saved, self._in_place = saved, in_place
        self._later: list[tuple[Tensor, Tensor]] = []
        self._met: list[tuple[I64, Target]] = []  # shards, and a target that they meet
        self._overlaps: dict[int, list[_Overlap]] = {}
        wanted: list[I64] = [np.zeros(0, np.int64)]
        every: list[Target] = []
        for key, targets in fills.items():
            tensor = saved.tensors[key]
            ready = [self._ready(target, tensor.spec) for target in targets]
            every += ready
            numbers = np.asarray(tensor.shards, np.int64)
            if len(numbers):
                wanted += [self._blobs_for(target, numbers, len(tensor.spec.shape)) for target in ready]
        found = np.unique(np.concatenate(wanted))
        self.blobs: list[int] = found[saved.table.length[found] > 0].tolist()
        self._crowded = _crowded([target.tensor for target in every])
        self._filled = [target.tensor for targets in fills.values() for target in targets]

    def _blobs_for(self, target: Target, numbers: I64, k: int) -> I64:
        """The blobs of these shards, of `k` dimensions, that have something of a target."""
        shards, starts = self._saved.table.columns, self._saved.table.starts
        dims = shards.dims[shards.dim_starts[numbers][:, None] + np.arange(k, 3 * k)] if k else numbers[:, None][:, :0]
        low, high = dims[:, :k], dims[:, :k] + dims[:, k:]
        first = np.array(target.box[0], np.int64)
        last = first + np.array(target.box[1], np.int64)
        hit = (np.maximum(low, first) < np.minimum(high, last)).all(1)
        self._met.append((numbers[hit], target))
        whole = (low[hit] >= first).all(1) & (high[hit] <= last).all(1)
        inside, across = numbers[hit][whole], numbers[hit][~whole]
        counts = starts[inside + 1] - starts[inside]
        blobs = np.repeat(starts[inside] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        parts = [b for n in across.tolist() if (o := self._overlap(n, target)) is not None for b in self._needed(n, o)]
        return np.concatenate([blobs, np.array(parts, np.int64)])

    @cached_property
    def _hits(self) -> dict[int, list[Target]]:
        """The targets of each shard. Made when the first blob comes: a plan does without."""
        found: dict[int, list[Target]] = {}
        for numbers, target in self._met:
            for number in numbers.tolist():
                found.setdefault(number, []).append(target)
        return found

    def _overlap(self, number: int, target: Target) -> _Overlap | None:
        return _overlap(self._saved.table.shards[number].box, target)

    def _overlaps_of(self, number: int) -> list[_Overlap]:
        """Where a shard goes. Worked out when it comes: there may be hundreds of thousands."""
        if number not in self._overlaps:
            found = (self._overlap(number, target) for target in self._hits.get(number, ()))
            self._overlaps[number] = [overlap for overlap in found if overlap is not None]
        return self._overlaps[number]

    def _ready(self, target: Target, spec: TensorSpec) -> Target:
        """A target that takes bytes as they are; one of another dtype (under strict=False) is filled at the end."""
        tensor = target.tensor.detach()
        if DTYPE_NAME[tensor.dtype] == spec.dtype and not tensor.is_conj() and not tensor.is_neg():
            return Target(tensor, target.box)
        whole = torch.empty(tensor.shape, dtype=TORCH_DTYPE[spec.dtype])
        self._later.append((tensor, whole))
        return Target(whole, target.box)

    def _needed(self, number: int, overlap: _Overlap) -> Iterable[int]:
        """The blobs of a shard that hold something of an overlap."""
        shard, saved = self._saved.table.shards[number], self._saved
        item = BITS[shard.dtype] // 8
        blobs = saved.table.blobs(number)
        if overlap.run == (0, item * math.prod(shard.sizes)):
            return [blob for blob in blobs if saved.table.length[blob]]
        low, high = overlap.run or tuple(item * n for n in run_of(overlap.region, shard.sizes))
        found = []
        for blob in blobs:
            start, length = int(saved.position[blob]), int(saved.table.length[blob])
            if start < high and start + length > low:
                boxes = boxes_of_run(shard.sizes, start // item, (start + length) // item)
                if overlap.run or any(intersect(box, overlap.region) for box in boxes):
                    found.append(blob)
        return found

    def room(self, blob: int) -> memoryview | None:
        """Where the bytes of a blob may be put instead of adding them: if all of it belongs in one place, in host
        memory, and nowhere else.
        """
        number = int(self._saved.shard_of_blob[blob])
        overlaps = self._overlaps_of(number)
        if not self._in_place or len(overlaps) != 1 or id(self._hits[number][0].tensor) in self._crowded:
            return None
        if overlaps[0].run is None or overlaps[0].view.device.type != "cpu":
            return None
        low, high = overlaps[0].run
        start = int(self._saved.position[blob])
        stop = start + int(self._saved.table.length[blob])
        if start < low or stop > high:
            return None
        return overlaps[0].view.numpy()[start - low : stop - low].data

    def add(self, blob: int, data: memoryview) -> None:
        number = int(self._saved.shard_of_blob[blob])
        shard, start = self._saved.table.shards[number], int(self._saved.position[blob])
        if not len(data):
            return
        source = torch.frombuffer(data, dtype=torch.uint8)
        for overlap in self._overlaps_of(number):
            if overlap.run is not None:
                low, high = overlap.run
                first, last = max(low, start), min(high, start + len(data))
                if first < last:
                    overlap.view[first - low : last - low].copy_(source[first - start : last - start])
            else:
                _scatter(source, start, shard.sizes, BITS[shard.dtype] // 8, overlap)

    @torch.no_grad()
    def finish(self) -> None:
        """Tensors that could not take bytes as they are."""
        for target, whole in self._later:
            target.copy_(whole)
        for tensor in self._filled:  # autograd must know, though torch has not seen who wrote
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _crowded(views: list[Tensor]) -> set[int]:
    """Those of which another shares memory, by id: while one is verified, the other must not be written."""
    spans = []
    for view in views:
        last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        if view.numel() and view.device.type == "cpu":
            spans.append((view.data_ptr(), view.data_ptr() + (last + 1) * view.element_size(), id(view)))
    found: set[int] = set()
    end = widest = 0
    for start, stop, view_id in sorted(spans):
        if start < end:
            found |= {widest, view_id}
        if stop > end:
            end, widest = stop, view_id
    return found


_ITEM = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _overlap(box: Box, target: Target) -> _Overlap | None:
    if box == target.box and target.tensor.is_contiguous() and target.tensor.numel():
        view = as_bytes(target.tensor)  # all of one is all of the other: what most restores consist of
        return _Overlap(within(box, box), view, (0, view.numel()))
    common = intersect(box, target.box)
    if common is None:
        return None
    region = within(common, box)
    view = target.tensor[slices(within(common, target.box))]
    item = view.element_size()
    start, stop = run_of(region, box[1])
    if view.is_contiguous() and stop - start == math.prod(region[1]):
        return _Overlap(region, as_bytes(view), (start * item, stop * item))
    return _Overlap(region, view.view(_ITEM[item]), None)


def _scatter(source: Tensor, start: int, sizes: tuple[int, ...], item: int, overlap: _Overlap) -> None:
    """The elements of one blob that belong to a region, into a view of another order in memory."""
    elements = source.view(_ITEM[item]) if source.data_ptr() % item == 0 else source.clone().view(_ITEM[item])
    place = 0
    for box in boxes_of_run(sizes, start // item, (start + len(source)) // item):
        count = math.prod(box[1])
        common = intersect(box, overlap.region)
        if common is not None:
            piece = elements[place : place + count].view(box[1])
            overlap.view[slices(within(common, overlap.region))].copy_(piece[slices(within(common, box))])
        place += count
