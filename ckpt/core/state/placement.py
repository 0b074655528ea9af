"""Matches the tensors of a checkpoint with the live state, before they are filled (`state.filler`).

A `Placement` is built without changing anything. Each entry of the state (`StateNode.prepare`) compares its tensors,
and either fills a live tensor or creates a new one. All mismatches are collected, so that one error lists all of them.
`finish` registers work to run after the tensors are filled.

A wrapper tensor is restored completely or not at all, because codes are useless without their scales.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt import errors
from ckpt.core.format.boxes import GLOBAL, Seat
from ckpt.core.format.layout import TensorSpec
from ckpt.core.format.saved_state import Ambiguous, Key, SavedState
from ckpt.core.format.values import TENSORS, Json, Path, check_array, decode, show
from ckpt.core.state.filler import Target
from ckpt.core.state.sharding import (
    Division,
    LocalPiece,
    Names,
    Replicas,
    StateEntry,
    is_dtensor,
    is_plain_share,
    local,
    pieces,
    share_of,
)
from ckpt.core.state.tensors import (
    DTYPE_NAME,
    OBJECT_TAGS,
    TORCH_DTYPE,
    ObjectDecoder,
    decode_constant,
    empty,
    expand,
    is_expansion,
    memory_of,
    of_kind,
    saved_device,
    to_array,
)
from ckpt.core.state.wrappers import WrapperForm, cut_otherwise, differs, remake, take_apart
from ckpt.errors import CheckpointError, CorruptError, MismatchError

_LIBRARIES = tuple(os.path.join(os.path.dirname(str(module.__file__)), "") for module in (errors, torch, np))
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")  # other packages may be below it, in site-packages


def comes_from_user(error: BaseException) -> bool:
    """Return True if an error has a cause other than damaged bytes: too few resources, or code outside this library.

    Malformed values raise errors in this library, torch, numpy or the standard library. If an object of the user, or a
    package that the user has chosen, raised the error, its code has a frame in the traceback.
    """
    if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError)):
        return True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        standard = file.startswith("<frozen") or (file.startswith(_STANDARD) and "-packages" not in file)
        compiled = file.endswith(".pyx")  # a frame in numpy's compiled code, which has no path
        if not (standard or compiled or file.startswith(_LIBRARIES)):
            return True
    return False


@dataclass
class Placement:
    """The matched tensors of a restore. `fills`: the live or new tensors to fill from each saved tensor that this rank
    reads. `whole`: by shard number, live tensors that take a complete shard unchanged."""

    saved: SavedState
    strict: bool
    names: Names = field(default_factory=Names)
    seat: Seat = field(default_factory=Seat)
    fills: dict[Key, list[Target]] = field(default_factory=dict)
    whole: list[tuple[int, Tensor]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    overridden: list[str] = field(default_factory=list)  # settings of the script that are overridden
    cast: dict[str, str] = field(default_factory=dict)  # dtypes to which strict=False casts, by tensor name
    apart: set[str] = field(default_factory=set)  # names of live replicated tensors that each rank saved separately
    finishers: list[Callable[[], object]] = field(default_factory=list)
    last: list[Callable[[], object]] = field(default_factory=list)  # run after all finishers, which draw random numbers
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of saved wrapper tensors
    _keys: dict[tuple[str, int | None, bool], Key | None] = field(default_factory=dict)
    _reader: int | None = None
    _asked: dict[tuple[str, int, bool, int | None], tuple[StateEntry, Key | None]] = field(default_factory=dict)
    _to_create: dict[tuple[str, int, bool, bool], tuple[StateEntry, Key | None]] = field(default_factory=dict)
    _cut: dict[tuple[str, int], tuple[StateEntry, list[LocalPiece]]] = field(default_factory=dict)
    _created: dict[Key, Tensor] = field(default_factory=dict)
    _filled: dict[Key, Tensor] = field(default_factory=dict)  # live tensors of optimizers, by saved tensor
    _handed: set[Key] = field(default_factory=set)  # tensors created only for a load_state_dict call, which copies them
    _live: dict[Key, list[Tensor]] = field(default_factory=dict)  # tensors filled directly or by such a call

    @property
    def alone(self) -> bool:
        """Return True if one rank saved the state and one restores it, so that both must have the same entries."""
        return self.saved.world == self.seat.size == 1

    @property
    def resized(self) -> bool:
        """Return True if the number of ranks has changed."""
        return self.saved.world != self.seat.size

    def key(self, name: str, instance: int | None = None, *, lenient: bool = True) -> Key | None:
        """Return the saved tensor for a name on this rank. If it is ambiguous, record a problem and return None."""
        if self._reader is not None:  # the name as the reader rank had it
            found = self.saved.resolve(name, self._reader, self.saved.world, instance, lenient=True)
            return found if isinstance(found, tuple) else None
        if (name, instance, lenient) not in self._keys:
            found = self.saved.resolve(name, self.seat.rank, self.seat.size, instance, lenient=lenient)
            if found is None:
                raise CorruptError(f"the checkpoint refers to {name}, which is not in it")
            if isinstance(found, Ambiguous):
                self.problem(self.unclear(name, found.ranks))
                found = None
            self._keys[name, instance, lenient] = found
        return self._keys[name, instance, lenient]

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a whole saved tensor."""
        key = self.key(name)
        found = key if key is not None else (name, self.saved.instances(self.saved.canonical(name, self.seat.rank))[0])
        return self.saved.tensors[found].spec

    def saved_order(self, name: str) -> list[int] | None:
        """Return the order of the dimensions of a saved tensor in memory, or [] if it was contiguous.

        Return None if the checkpoint has no such tensor, or if the name is ambiguous.
        """
        key = self.saved.resolve(name, self.seat.rank, self.seat.size, None, lenient=True)
        return self.saved.order(key, self.seat.rank) or [] if isinstance(key, tuple) else None

    def unclear(self, name: str, ranks: Sequence[int]) -> str:
        """Return the message for a name under which ranks saved different values."""
        return (
            f"{name} has different values on ranks {', '.join(map(str, ranks[:8]))}: it is unclear which one this rank "
            f"should restore, because {self.saved.world} ranks saved it and {self.seat.size} restore it"
        )

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def finish(self, path: Path, work: Callable[[], object], *, last: bool = False) -> None:
        """Register work to run after the tensors are filled.

        An error of the user's own code is raised unchanged. The stored bytes match their digests, so restoring an older
        checkpoint would not help, and would lose steps.
        """

        def named() -> None:
            try:
                work()
            except CheckpointError:
                raise
            except Exception as error:
                if comes_from_user(error):
                    error.add_note(
                        f"everystep: {show(path)} raised this error during its restore. The checkpoint is intact. The "
                        "state is partly overwritten: do not continue training with it. Restart the process"
                    )
                    raise
                raise CorruptError(f"{show(path)} cannot load its saved state: {error!r}") from error

        (self.last if last else self.finishers).append(named)

    def fits(self, name: str, entry: StateEntry) -> bool:
        key = self._key_for(name, entry)
        return key is not None and self._form(entry) == (self.saved.tensors[key].spec.shape, self.spec(name).dtype)

    def _form(self, entry: StateEntry) -> tuple[tuple[int, ...], str | None]:
        """Return the shape of the whole tensor, and its dtype."""
        here = self._pieces(entry)
        alike: Any = entry.alike
        of_more = isinstance(alike, Division) or is_plain_share(entry.tensor, alike)  # this rank's shard may be empty
        whole = tuple(alike.shape if of_more else entry.tensor.shape)
        shape = here[0].holding.full if here else whole
        return shape, DTYPE_NAME.get(entry.tensor.dtype)

    def _pieces(self, entry: StateEntry) -> list[LocalPiece]:
        """Return the pieces of a live tensor, cached. Return [] if its dtype cannot be saved."""
        key = entry.name, id(entry.tensor)  # the entry keeps the tensor alive, so its id is unique
        if key not in self._cut:
            self._cut[key] = entry, pieces(entry, self.seat) if DTYPE_NAME.get(entry.tensor.dtype) else []
        return self._cut[key][1]

    def compare(self, path: Path, saved: Iterable[str], live: Mapping[str, StateEntry]) -> list[str]:
        """Record every difference, and return the names of tensors that can be filled."""
        names = set(saved)
        for name in sorted(live.keys() - names):
            self.problem(f"{name} is not in the checkpoint")
        for name in sorted(names - live.keys()) if self.alone else ():
            self.problem(f"{name} is in the checkpoint, but not in {show(path)}")
        return [name for name in live if name in names and self._comparable(name, live[name])]

    def _comparable(self, name: str, entry: StateEntry) -> bool:
        key = self._key_for(name, entry)
        if key is None:
            return False
        spec, (shape, dtype) = self.saved.tensors[key].spec, self._form(entry)
        if spec.shape != shape:
            self.problem(f"{name} has shape {list(spec.shape)} in the checkpoint and {list(shape)} here")
            return False
        if spec.dtype != dtype and (self.strict or dtype is None or entry.part_of is not None):
            self.problem(f"{name} has dtype {spec.dtype} in the checkpoint and {dtype} here")
        elif spec.dtype != dtype:
            self.cast[name] = str(dtype)
        return True

    def _key_for(self, name: str, entry: StateEntry) -> Key | None:
        asked = name, id(entry.tensor), entry.guarded, self._reader
        if asked not in self._asked:  # compare() checks each tensor several times
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
            self.apart.add(entry.name)  # the ranks' copies differed, so each rank restores its own values
        return key

    def filled(self, name: str, entry: StateEntry) -> None:
        """Let values of this optimizer that refer to the same saved tensor by other names use this live tensor too."""
        if (key := self._key_for(name, entry)) is not None:
            self._filled.setdefault(key, entry.tensor)

    def fill(self, name: str, entry: StateEntry) -> None:
        """Fill this rank's part of a tensor."""
        key = self._key_for(name, entry)
        if key is None:
            return
        self.watch(name, entry)
        for piece in self._pieces(entry):
            self.fills.setdefault(key, []).append(Target(piece.tensor, (piece.holding.offsets, piece.holding.sizes)))

    def watch(self, name: str, entry: StateEntry) -> None:
        """Record a tensor that the user's own code will fill, so that `check_sharing` checks its memory."""
        key = self._key_for(name, entry)
        if key is not None and not isinstance(entry.alike, Division):  # a user's division is identified by name instead
            self._live.setdefault(key, []).append(local(entry.tensor))

    def key_to_create(
        self, name: str, beside: Replicas | Tensor | None = None, *, guarded: bool = False, plain: bool = False
    ) -> Key | None:
        """Return the saved tensor from which to create a tensor, by the rules for a live tensor of this name.

        Return None, and record a problem, if the name is ambiguous. `guarded`: as in `StateEntry`. `plain`: as in
        `create`.
        """
        if self._reader is not None:
            return self.key(name)
        asked = name, id(beside), guarded, plain
        if asked not in self._to_create:
            spec = self.spec(name)
            live = self._becomes(name, spec, beside, plain)
            if live is None:
                live = torch.empty(spec.shape, dtype=TORCH_DTYPE[spec.dtype], device="meta")
            entry = StateEntry(name, live, guarded, beside)
            self._to_create[asked] = entry, self._look_up(name, entry)
        return self._to_create[asked][1]

    def _becomes(self, name: str, spec: TensorSpec, beside: Replicas | Tensor | None, plain: bool) -> Tensor | None:
        """Return the model for new state of a DTensor parameter: the DTensor, its shard if `plain`, or None."""
        if not isinstance(beside, Tensor) or not is_dtensor(beside):
            return None
        if tuple(beside.shape) != spec.shape or name.endswith(".step"):
            return None
        return local(beside) if plain else beside

    def create(
        self,
        name: str,
        device: torch.device,
        beside: Replicas | Tensor | None = None,
        *,
        guarded: bool = False,
        plain: bool = False,
        like: Tensor | None = None,
    ) -> Tensor:
        """Return a new tensor for `name`, or the same tensor again for an alias. State of a DTensor becomes a DTensor.

        guarded: as in `StateEntry`.
        plain: state of a DTensor becomes a plain tensor like its local shard.
        like: a tensor whose memory layout the new one gets if both have the same shape. Otherwise the new one gets the
            saved layout.
        """
        key = self.key_to_create(name, beside, guarded=guarded, plain=plain)
        spec = self.spec(name)
        if key is None:
            if not self.strict:  # the problem would not be raised, and there are no values to return
                raise MismatchError(f"{name} differs between ranks: it is unclear which one to restore here")
            return empty(spec, device)  # the problem is recorded
        if key not in self._created:
            if (parent := self._becomes(name, spec, beside, plain)) is not None:
                made = torch.empty_like(parent, dtype=TORCH_DTYPE[spec.dtype], requires_grad=False)
            else:
                made = empty(spec, device, like=like, order=self.saved.order(key, self.seat.rank))
            self._created[key] = made
            entry = StateEntry(name, made, guarded, beside)
            if isinstance(beside, Replicas) or not (is_dtensor(made) or (plain and is_dtensor(beside))):
                self.fills.setdefault(key, []).append(Target.whole(made))
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
        guarded: bool | Container[str] = False,
        objects: ObjectDecoder | None = None,
    ) -> Callable[[], Any]:
        """Return a function that builds plain values after the tensors in them, `live` or new, are filled.

        `like`: live tensors that will receive copies of the new ones; for a DTensor a DTensor is created. `rank`: the
        rank that saved these values, default: the rank whose values this one restores. `guarded`: True, or names of
        tensors, if they belong to an optimizer. Different values on the ranks are then a problem if the number of ranks
        has changed. `objects`: restores objects among the values.
        """

        def check(reference: Json) -> object:
            return None if objects is not None and reference["$"] in OBJECT_TAGS else self._check(reference)

        decode(values, check)  # raises errors before anything is changed
        if objects is not None:
            for problem in objects.check(values):
                self.problem(problem)
        self._reader = rank
        try:
            wrappers, tensors, live = self._match(values, live, like, guarded)
        finally:
            self._reader = None

        made: dict[int, Tensor] = {}  # one Parameter for each saved tensor, for all references to it

        def extern(reference: Json) -> object:
            if objects is not None and reference["$"] in OBJECT_TAGS:
                return objects.decode(reference)
            if reference["$"] == "wrapper":
                return wrappers[reference["name"]]
            if reference["$"] == "tensor":
                tensor, have = tensors[reference["name"]], (live or {}).get(reference["name"])
                if have is not None and have.tensor is tensor:
                    return tensor
                found = made.setdefault(id(tensor), of_kind(tensor, reference))
                return expand(found, reference["expanded"]) if "expanded" in reference else found
            if reference["$"] == "ndarray":
                return to_array(tensors[reference["name"]].cpu(), reference)
            return decode_constant(reference)

        return lambda: decode(values, extern)

    def _match(
        self,
        values: Json,
        live: Mapping[str, StateEntry] | None,
        like: Mapping[str, StateEntry] | None,
        guarded: bool | Container[str],
    ) -> tuple[dict[str, Tensor | None], dict[str, Tensor], Mapping[str, StateEntry] | None]:
        """Return all wrappers and tensors in plain values, live or new, and the `live` tensors that fit."""
        wrappers: dict[str, Tensor | None] = {}
        others = dict(live or {})
        wholes = {entry.owner.name: entry.owner for entry in others.values()}
        new: list[WrapperForm] = []
        for one in _tagged(values, ("wrapper",)):
            form = WrapperForm.from_json(one)
            owner = wholes.get(form.name)
            if owner is not None and self.parts_that_fit(form, owner) is not None:
                wrappers[form.name] = owner.tensor
                continue
            new.append(form)
            for part in take_apart(owner)[0] if owner is not None else ():
                others.pop(part.name, None)
        tensors: dict[str, Tensor] = {}
        for name in references(values):
            of_optimizer = guarded if isinstance(guarded, bool) else name in guarded
            have = others.get(name)
            if have is not None and self._comparable(name, have):
                self.fill(name, have)
                tensors[name] = have.tensor
            elif of_optimizer and like is None and (key := self.key_to_create(name, guarded=True)) in self._filled:
                tensors[name] = self._filled[key]
            else:
                model = like[name].tensor if like and name in like else None
                device = saved_device(self.spec(name))
                tensors[name] = self.create(name, device, model, guarded=of_optimizer, like=model)
                key = self.key_to_create(name, model, guarded=of_optimizer)
                if live is None and key is not None:
                    self._handed.add(key)
        for form in new:
            try:
                if form.whole is not None:
                    raise MismatchError(f"{form.name} was a rank's share of a DTensor and can only be filled in place")
                wrappers[form.name] = remake(form, tensors)
            except MismatchError as error:
                if not self.strict:  # there is no other value to return
                    raise
                self.problem(str(error))
                wrappers[form.name] = None
        return wrappers, tensors, others

    def parts_that_fit(self, form: WrapperForm | None, live: StateEntry) -> list[StateEntry] | None:
        """Return the tensors of a live wrapper if all can be filled. Otherwise record a problem and return None.
        `form`: form of the saved wrapper, or None for a plain tensor."""
        parts, here = take_apart(live)
        if problem := differs(form, here, live.name):
            self.problem(problem)
            return None
        fit = all(self._comparable(part.name, part) and self.fits(part.name, part) for part in parts)
        return parts if fit else None

    def moment(
        self,
        form: WrapperForm | None,
        name: str,
        live: object,
        beside: Any,
        device_of: Callable[[str], torch.device],
    ) -> Tensor | None:
        """Return the live wrapper in the state of an optimizer, or a new one like the saved one. Return None, and
        record a problem, if neither is possible.

        form: None if a plain tensor was saved and the live one is a wrapper
        device_of: the device of a new tensor, by name
        """
        try:
            if form is not None and not isinstance(live, Tensor):
                return self._new_moment(form, beside, device_of)
            assert isinstance(live, Tensor)
            parts = self.parts_that_fit(form, StateEntry(name, live, True, beside))
        except MismatchError as error:
            self.problem(str(error))
            return None
        for part in parts or ():
            self.fill(part.name, part)
        return None if parts is None else live

    def _new_moment(self, form: WrapperForm, beside: Any, device_of: Callable[[str], torch.device]) -> Tensor | None:
        sharded, cut = is_dtensor(beside), form.share is None and form.whole is not None
        if not cut and form.share != (share_of(beside) if sharded else None):
            raise MismatchError(cut_otherwise(form))
        ranks = beside if isinstance(beside, Replicas) else None
        if any(self.key_to_create(name, beside if cut else ranks, guarded=True) is None for name in form.names):
            return None  # the problem is recorded
        if form.whole is not None and (not sharded or tuple(beside.shape) != form.whole):
            raise MismatchError(
                f"{form.name} was a rank's share of a DTensor of shape {list(form.whole)}, but here it is not"
            )
        tensors: dict[str, Tensor] = {}
        for name in form.names:
            if cut:  # memory for this rank's share of a tensor that is sharded like `beside`
                spec = replace(self.spec(name), shape=tuple(local(beside).shape))
                tensors[name] = empty(spec, device_of(name), like=local(beside))
                self.fill(name, StateEntry(name, tensors[name], True, beside))
            else:
                tensors[name] = self.create(name, device_of(name), ranks, guarded=True)
        if form.whole is None:
            return remake(form, tensors)
        size = tuple(local(beside).shape) if cut else form.size
        made = remake(replace(form, size=size, whole=None, share=None), tensors)
        found: Tensor = type(beside).from_local(
            made, beside.device_mesh, beside.placements, run_check=False, shape=beside.shape, stride=beside.stride()
        )
        found._local_tensor = made  # type: ignore[attr-defined]  # not a view of `made`, as not every class supports it
        return found

    def _check(self, reference: Json) -> object:
        """Check a reference. Raise CorruptError or ValueError unless it refers to a constant, a tensor, or an array
        with the number of bytes that are stored."""
        if reference["$"] == "wrapper":
            WrapperForm.from_json(reference)
            return None
        if reference["$"] not in ("tensor", "ndarray"):
            return decode_constant(reference)
        if type(name := reference["name"]) is not str:
            raise CorruptError(f"not the name of a tensor: {name!r:.80}")
        if reference["$"] == "ndarray":
            check_array(self.spec(name), reference)
        elif not is_expansion(reference.get("expanded", []), len(self.spec(name).shape)):
            raise CorruptError(f"{name} cannot be expanded by {reference['expanded']!r:.80}")
        elif reference.get("kind") not in TENSORS:
            raise CorruptError(f"unknown kind of tensor {reference['kind']!r:.80}: written by a newer version?")
        return None

    def check(self) -> None:
        """Raise MismatchError with a list of all problems, unless strict is False."""
        if self.problems and self.strict:
            raise mismatch(self.problems)

    def check_sharing(self) -> None:
        """Record weights that are tied on only one side. Untying them silently would change the training."""
        owners: dict[Any, Key] = {}
        for key, tensors in self._live.items():
            handed = self._created.get(key) if key in self._handed else None
            apart = None if handed is None else memory_of(local(handed))
            memories = {m for t in tensors if (m := memory_of(t)) is not None and m != apart}
            if len(memories) > 1:
                aliases = (a for view in self.saved.views for a, n in view.aliases.items() if n == key[0])
                names = dict.fromkeys([key[0], *aliases])
                self.problem(f"{' and '.join(names)} were one tensor when they were saved, but are not here")
            for memory in memories:
                other = owners.setdefault(memory, key)
                if not self.saved.same(other, key):
                    self.problem(f"{other[0]} and {key[0]} are one tensor here, but were not when they were saved")


def mismatch(problems: list[str]) -> MismatchError:
    shown = "\n  ".join(problems[:20])
    more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
    return MismatchError(
        f"the checkpoint does not fit this state:\n  {shown}{more}\n"
        "Change the model back, or pass strict=False to restore the entries that fit (dtypes are converted)."
    )


def references(values: Json) -> list[str]:
    """Return the names of all tensors that plain values refer to."""
    return [str(one.get("name")) for one in _tagged(values, ("tensor", "ndarray"))]


def _tagged(values: Json, tags: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield all references with these tags, but not references inside other references."""
    pending = [values]
    while pending:
        value = pending.pop()
        if type(value) is dict and value.get("$") in tags:
            yield value
        else:
            pending.extend(value.values() if type(value) is dict else value if type(value) is list else ())


# -- wrapper tensors --


FACT = "wrappers"  # fact of a module or optimizer: the forms of its wrappers


def facts_of(forms: Collection[WrapperForm]) -> dict[str, Json]:
    """Return the forms as a fact, or {} if there are no forms."""
    return {FACT: [form.to_json() for form in forms]} if forms else {}


def forms_of(facts: Mapping[str, Any]) -> dict[str, WrapperForm]:
    """Return the forms by name. Raise CorruptError if the fact is not a list of forms."""
    rows = facts.get(FACT, [])
    if type(rows) is not list:
        raise CorruptError("the stored forms of wrapper tensors are not a list")
    return {form.name: form for form in map(WrapperForm.from_json, rows)}


def matching(
    names: list[str], own: Mapping[str, StateEntry], facts: Mapping[str, Any], saved: Collection[str], to: Placement
) -> list[str]:
    """Return those of `names` that can be filled, and record problems. A wrapper is filled completely or not at all.
    `own`: live entries by name. `facts`, `saved`: facts and names in the checkpoint."""
    saved_forms, live_forms = forms_of(facts), dict[str, WrapperForm]()
    whole = {entry.owner.name: entry.owner for entry in own.values() if entry.part_of is not None}
    for name, owner in whole.items():
        form = take_apart(owner)[1]
        assert form is not None
        live_forms[name] = form
    left_out = set[str]()
    for name in live_forms.keys() | saved_forms.keys():
        here, there = live_forms.get(name), saved_forms.get(name)
        both = (name in own or here is not None) and (name in saved or there is not None)
        problem = differs(there, here, name) if both else ""
        if problem:
            to.problem(problem)
        if here is not None and (problem or not all(n in names and to.fits(n, own[n]) for n in here.names)):
            left_out.update(here.names)
    return [name for name in names if name not in left_out]
