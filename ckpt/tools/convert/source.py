"""What offline commands read from: a state of whole tensors and plain values, wherever it lies.

    open -> view -> read

An *origin* is a checkpoint of a run (`ckpt.tools.convert.source_run`), or files of another library
(`convert.source_files`). Both keep tensors as pieces, each a box of a tensor whose bytes lie in one row somewhere.
`Assembly` puts what comes of them, in whatever order, to where it is wanted, so that no tensor need ever be in memory
whole.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, structs

from ckpt.core.format.boxes import Box, Dims, boxes_of_run, intersect, run_of, within
from ckpt.core.format.digest import file_digest
from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.manifest import canonical
from ckpt.core.format.values import Json, show
from ckpt.errors import CorruptError, UsageError

Bytes = npt.NDArray[np.uint8]


class OriginEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a state, as a layout has it. `names`: of all its tensors, aliases too; `values`: tagged."""

    path: tuple[str | int, ...]
    kind: str
    facts: dict[str, Any]
    names: tuple[str, ...]
    values: Any = None

    @property
    def component(self) -> dict[str, Any]:
        """As a layout has it."""
        return {"path": list(self.path), "kind": self.kind, "facts": self.facts, "names": list(self.names)}


@dataclass(frozen=True)
class RankView:
    """What one rank takes of an origin. `tensors`: for every tensor of the entries, the label of the one that is meant.

    `aliases`: further names, each of one of these. `notes`: what a person should know, such as whose values were taken.
    `step`: of the training, None if the files do not say.
    """

    entries: tuple[OriginEntry, ...]
    tensors: Mapping[str, str]
    aliases: Mapping[str, str]
    notes: tuple[str, ...] = ()
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Want:
    """Elements `start` to `stop` of a box of a tensor, in row-major order, and memory for exactly their bytes."""

    label: str
    box: Box
    start: int
    stop: int
    into: Bytes


class Origin(Protocol):
    """A state to read. `title`: what it is, for people, and `about` for programs; `identity`: equal if nothing can have
    changed since; `keep`: bytes that it may hold between two readings. Errors are CorruptError, which names the tensor,
    and StoreError.
    """

    title: str
    identity: str
    about: dict[str, Any]
    keep: int

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Of whole tensors, by labels that are unique here."""

    @property
    def names(self) -> Mapping[str, str]:
        """Of every name, aliases too, the label."""

    def view(self, rank: int = 0, world: int = 1) -> RankView:
        """What a rank of so many takes. MismatchError if that is not clear."""

    def plain(self, wanted: Callable[[str], bool] = ...) -> dict[str, tuple[dict[str, Any], Json]]:
        """By path of each entry that is wanted: what never changes about it, and its plain values, tagged."""

    def same(self, label: str, other: Origin, theirs: str) -> bool:
        """Whether digests alone tell that two tensors hold the same bytes."""

    async def read(self, wants: Sequence[Want]) -> None:
        """Fill all of these. What has been filled before an error must not be used."""

    async def unchanged(self) -> None:
        """CorruptError if what was read may not be what was there when it was opened."""

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Landing:
    """Where a piece and a want meet. `region`: in the piece; `target`: memory of that shape, and bytes of an element.

    `run`: the bytes of the piece that this is, and `row` their place, if both are one row.
    """

    region: Box
    target: Bytes
    run: tuple[int, int] | None


@dataclass
class Assembly:
    """Takes bytes of pieces and puts them into wants. Different bytes may be added by different threads."""

    _landings: dict[int, list[_Landing]] = field(default_factory=dict)
    _pieces: dict[int, tuple[Dims, int]] = field(default_factory=dict)

    def meet(self, number: int, piece: Box, want: Want) -> None:
        """Note what a piece, known by its number from now on, has of a want."""
        item = len(want.into) // max(1, want.stop - want.start)
        place = 0
        for offsets, sizes in boxes_of_run(want.box[1], want.start, want.stop):
            count = math.prod(sizes) * item
            target = want.into[place : place + count].reshape(*sizes, item)
            place += count
            at = tuple(i + j for i, j in zip(want.box[0], offsets, strict=True))
            common = intersect((at, sizes), piece)
            if common is None:
                continue
            region, inside = within(common, piece), within(common, (at, sizes))
            view = target[tuple(slice(i, i + n) for i, n in zip(*inside, strict=True))]
            self._landings.setdefault(number, []).append(_Landing(region, view, _row(region, piece[1], view, item)))
            self._pieces[number] = piece[1], item

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(piece, first byte, behind the last byte) of what is needed of each piece: the shortest row that has it."""
        for number, found in self._landings.items():
            sizes, item = self._pieces[number]
            ends = [run_of(landing.region, sizes) for landing in found]
            yield number, min(low for low, _ in ends) * item, max(high for _, high in ends) * item

    def landings(self, number: int) -> list[tuple[Box, Bytes]]:
        """All that is wanted of a piece: boxes of it, and memory of their shape (and the bytes of an element)."""
        return [(landing.region, landing.target) for landing in self._landings[number]]

    def needs(self, number: int, start: int, stop: int) -> bool:
        """Whether any of these bytes of a piece is wanted."""
        sizes, item = self._pieces[number]
        for landing in self._landings[number]:
            low, high = landing.run or tuple(n * item for n in run_of(landing.region, sizes))
            if start < high and stop > low:
                boxes = boxes_of_run(sizes, start // item, stop // item)
                if landing.run or any(intersect(box, landing.region) for box in boxes):
                    return True
        return False

    def room(self, number: int, start: int, stop: int) -> memoryview | None:
        """Where these bytes of a piece may be put instead of adding them: if all belong in one place, and no other."""
        found = self._landings.get(number, ())
        if len(found) != 1 or found[0].run is None or start < found[0].run[0] or stop > found[0].run[1]:
            return None
        low = found[0].run[0]
        return found[0].target.reshape(-1)[start - low : stop - low].data

    def add(self, number: int, start: int, data: memoryview) -> None:
        """Bytes of a piece, whole elements, from byte `start` of it on."""
        sizes, item = self._pieces[number]
        source = np.frombuffer(data, np.uint8)
        for landing in self._landings.get(number, ()):
            if landing.run is not None:
                low, high = landing.run
                first, last = max(low, start), min(high, start + len(source))
                if first < last:
                    landing.target.reshape(-1)[first - low : last - low] = source[first - start : last - start]
            else:
                _scatter(source, start, sizes, item, landing)


def _row(region: Box, sizes: Dims, view: Bytes, item: int) -> tuple[int, int] | None:
    start, stop = run_of(region, sizes)
    whole = stop - start == math.prod(region[1]) and view.flags.c_contiguous
    return (start * item, stop * item) if whole else None


def _scatter(source: Bytes, start: int, sizes: Dims, item: int, landing: _Landing) -> None:
    place = 0
    for box in boxes_of_run(sizes, start // item, (start + len(source)) // item):
        count = math.prod(box[1]) * item
        common = intersect(box, landing.region)
        if common is not None:
            piece = source[place : place + count].reshape(*box[1], item)
            there = tuple(slice(i, i + n) for i, n in zip(*within(common, landing.region), strict=True))
            here = tuple(slice(i, i + n) for i, n in zip(*within(common, box), strict=True))
            landing.target[there] = piece[here]
        place += count


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a shell pattern matches a name, or is the name of what it belongs to: `model` means all of it."""
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def entry_matches(path: str, patterns: Sequence[str]) -> bool:
    """An entry `sched` is meant by `sched` and by `sched.*`."""
    return matches(path, patterns) or matches(f"{path}.", patterns)


def select(view: RankView, patterns: Sequence[str], *, whole: bool = True) -> RankView:
    """Only tensors whose name matches a shell pattern, and entries without tensors that do.

    Of a module a part may be left; what else has lost a tensor is left out, unless it need not be `whole`. A tensor of
    which only another name matches gets that name.
    """
    entries, notes = list[OriginEntry](), list(view.notes)
    for entry in view.entries:
        names = tuple(name for name in entry.names if matches(name, patterns))
        if names and (entry.kind == "module" or not whole or len(names) == len(entry.names)):
            entries.append(structs.replace(entry, names=names))
        elif not entry.names and entry_matches(show(entry.path), patterns):
            entries.append(entry)
        elif names:
            notes.append(f"{show(entry.path)} is left out: only some of its tensors match")
    tensors, aliases, called = dict[str, str](), dict[str, str](), dict[str, str]()
    kept = dict.fromkeys(name for entry in entries for name in entry.names)
    for name in sorted(kept, key=lambda name: name in view.aliases):  # those that are known by it first
        of = view.aliases.get(name, name)
        if called.setdefault(of, name) == name:
            tensors[name] = view.tensors[of]
        else:
            aliases[name] = called[of]
    ordered = {name: tensors[name] for name in kept if name in tensors}
    return replace(view, entries=tuple(entries), tensors=ordered, aliases=aliases, notes=tuple(notes))


def check_patterns(views: Sequence[RankView], patterns: Sequence[str]) -> None:
    """UsageError that names a pattern which matches nothing."""
    names = {name for view in views for name in (*view.tensors, *view.aliases)}
    entries = [entry for view in views for entry in view.entries]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names) and not any(
            entry_matches(show(entry.path), [pattern]) for entry in entries
        ):
            some = ", ".join(sorted(names)[:3]) or "(there are no tensors)"
            raise UsageError(f"nothing matches {pattern!r}: names are such as {some}; * stands for anything")


def canonical_names(entries: Iterable[OriginEntry], aliases: Mapping[str, str]) -> list[str]:
    """The names of all tensors of some entries, each once, none of them an alias."""
    return list(dict.fromkeys(aliases.get(name, name) for entry in entries for name in entry.names))


# -- what is written beside tensors into files of other libraries, so that nothing is lost on the way back --

DESCRIPTION = "__everystep__"  # the name that it has there
MAX_DESCRIPTION = 64 << 20  # bytes


def fingerprint(root: Any, form: Callable[[Any], tuple[str, tuple[int, ...]] | None]) -> str:
    """Of all that a file holds beside the bytes of tensors: whoever changes any of it changes this.

    `form`: dtype and shape of a tensor, None of anything else. Kinds of containers, the order in them, empty ones and
    whether keys are numbers do not matter: not every format keeps these.
    """
    lines = list[Any]()
    pending: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while pending:
        path, value = pending.pop()
        if (tensor := form(value)) is not None:
            lines.append([path, "tensor", *tensor])
        elif isinstance(value, Mapping):
            # Settings by parameter are further names of what is there (`ckpt.tools.convert.to_dcp`).
            pending += [((*path, str(k)), v) for k, v in value.items() if not str(k).startswith("param_groups.")]
        elif isinstance(value, (list, tuple)):
            pending += [((*path, str(i)), one) for i, one in enumerate(value)]
        else:
            plain = sorted(repr(_plain(one)) for one in value) if isinstance(value, set) else _plain(value)
            lines.append([path, type(plain).__name__, repr(plain)])
    return file_digest("\n".join(sorted(json.dumps(line) for line in lines)).encode())


def _plain(value: Any) -> Any:
    """Return the name of a dtype or a device of torch, which is what an import makes of it."""
    return str(value) if type(value).__module__ == "torch" else value


def describe(view: RankView, places: Mapping[str, Sequence[str | int]], seal: str = "") -> str:
    """Entries and aliases as JSON text. `places`: under which keys of the file each tensor lies; `seal`: the
    fingerprint of the file, without this text."""
    aliases, at = dict(view.aliases), {name: tuple(place) for name, place in places.items()}
    return canonical(msgspec.to_builtins(Described(1, view.entries, aliases, at, view.step, seal))).decode()


class Described(msgspec.Struct, frozen=True):
    """What `describe` writes."""

    version: Annotated[int, Meta(le=1)]
    entries: tuple[OriginEntry, ...]
    aliases: dict[str, str]
    places: dict[str, tuple[str | int, ...]]
    step: Annotated[int, Meta(ge=0, lt=10**18)] | None
    seal: str = ""


def described(text: str) -> Described:
    """CorruptError unless it is as `describe` writes it."""
    try:
        if len(text) > MAX_DESCRIPTION:
            raise ValueError("implausibly large")
        return msgspec.convert(json.loads(text), Described)
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"{DESCRIPTION} is damaged, or of a newer version: {error}") from None
