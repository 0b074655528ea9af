"""Where the tensors of saved wrappers go: into one that lives, if it is of the same form, or into one made anew.

All of a wrapper is restored or nothing of it: codes are worth nothing without their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckpt.core.format.values import Json
from ckpt.core.state.placement import Placement
from ckpt.core.state.sharding import Replicas, StateEntry, is_dtensor, local, share_of
from ckpt.core.state.tensors import empty
from ckpt.core.state.wrappers import WrapperForm, cut_otherwise, differs, remake, take_apart
from ckpt.errors import CorruptError, MismatchError

FACT = "wrappers"  # among the facts of a module or an optimizer: the forms of what it has


def facts_of(forms: Collection[WrapperForm]) -> dict[str, Json]:
    """Nothing, for most: their layouts are what they were before there were any."""
    return {FACT: [form.to_json() for form in forms]} if forms else {}


def forms_of(facts: Mapping[str, Any]) -> dict[str, WrapperForm]:
    """By name. CorruptError if that is not what the facts say."""
    rows = facts.get(FACT, [])
    if type(rows) is not list:
        raise CorruptError("what is stored of tensors that are made of others is not a list")
    return {form.name: form for form in map(WrapperForm.from_json, rows)}


def matching(
    names: list[str], own: Mapping[str, StateEntry], facts: Mapping[str, Any], saved: Collection[str], to: Placement
) -> list[str]:
    """Those of `names` that can be filled, given that wrappers are filled as a whole. `own`: the live entries by name;
    `facts`, `saved`: of the checkpoint, and the names there. What does not fit is noted as a problem."""
    theirs, mine = forms_of(facts), dict[str, WrapperForm]()
    whole = {entry.owner.name: entry.owner for entry in own.values() if entry.part_of is not None}
    for name, owner in whole.items():
        form = take_apart(owner)[1]
        assert form is not None
        mine[name] = form
    left_out = set[str]()
    for name in mine.keys() | theirs.keys():
        here, there = mine.get(name), theirs.get(name)
        both = (name in own or here is not None) and (name in saved or there is not None)
        problem = differs(there, here, name) if both else ""
        if problem:
            to.problem(problem)
        if here is not None and (problem or not all(n in names and to.fits(n, own[n]) for n in here.names)):
            left_out.update(here.names)
    return [name for name in names if name not in left_out]


class MomentPlaces:
    """Where wrappers in the state of an optimizer go. `device_of`: where a new tensor belongs, by its name."""

    def __init__(self, placement: Placement, device_of: Callable[[str], torch.device]) -> None:
        self._placement, self._device_of = placement, device_of

    def find(
        self, form: WrapperForm | None, name: str, live: object, beside: Replicas | Tensor | None
    ) -> Tensor | None:
        """The live one, or a new one like what was saved. None, and a problem, if neither goes. `form`: None if a plain
        tensor was saved, and a wrapper lives."""
        try:
            if form is None or isinstance(live, Tensor):
                assert isinstance(live, Tensor)
                return self._live(form, StateEntry(name, live, True, beside))
            return self._new(form, beside)
        except MismatchError as error:
            self._placement.problem(str(error))
            return None

    def _live(self, form: WrapperForm | None, entry: StateEntry) -> Tensor | None:
        parts = self._placement.parts_that_fit(form, entry)
        for part in parts or ():
            self._placement.fill(part.name, part)
        return None if parts is None else entry.tensor

    def _new(self, form: WrapperForm, beside: Any) -> Tensor | None:
        placement = self._placement
        sharded, cut = is_dtensor(beside), form.share is None and form.whole is not None
        if not cut and form.share != (share_of(beside) if sharded else None):
            raise MismatchError(cut_otherwise(form))
        ranks = beside if isinstance(beside, Replicas) else None
        if any(placement.key_to_create(name, beside if cut else ranks, guarded=True) is None for name in form.names):
            return None  # a problem has been noted
        if form.whole is None:
            parts = {n: placement.create(n, self._device_of(n), ranks, guarded=True) for n in form.names}
            return remake(form, parts)
        if not sharded or tuple(beside.shape) != form.whole:
            raise MismatchError(f"{form.name} was a rank's share of a DTensor of {list(form.whole)}, as is none here")
        size = tuple(local(beside).shape) if cut else form.size
        tensors = {
            n: self._share(n, beside) if cut else placement.create(n, self._device_of(n), guarded=True)
            for n in form.names
        }
        made = remake(replace(form, size=size, whole=None, share=None), tensors)
        mesh, placements = beside.device_mesh, beside.placements
        found = type(beside).from_local(
            made, mesh, placements, run_check=False, shape=beside.shape, stride=beside.stride()
        )
        found._local_tensor = made  # a view of it is around, which not every class can make
        assert isinstance(found, Tensor)
        return found

    def _share(self, name: str, beside: Any) -> Tensor:
        """New memory for this rank's share of a tensor, which lies as `beside` does."""
        spec = replace(self._placement.spec(name), shape=tuple(local(beside).shape))
        made = empty(spec, self._device_of(name), like=local(beside))
        self._placement.fill(name, StateEntry(name, made, True, beside))
        return made
