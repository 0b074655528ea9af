"""Restores wrapper tensors: into a live one of the same form, or into a new one.

A wrapper is restored completely or not at all: codes are useless without their scales.
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

FACT = "wrappers"  # a fact of a module or optimizer: the forms of its wrappers


def facts_of(forms: Collection[WrapperForm]) -> dict[str, Json]:
    """Return the forms as a fact, or nothing if there are none."""
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
    """Return those of `names` that can be filled. A wrapper is filled completely or not at all. Problems are recorded.
    `own`: the live entries by name. `facts`, `saved`: of the checkpoint, and its names."""
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


class MomentPlaces:
    """Finds or creates the wrappers in the state of an optimizer. `device_of`: the device of a new tensor, by name."""

    def __init__(self, placement: Placement, device_of: Callable[[str], torch.device]) -> None:
        self._placement, self._device_of = placement, device_of

    def find(
        self, form: WrapperForm | None, name: str, live: object, beside: Replicas | Tensor | None
    ) -> Tensor | None:
        """Return the live wrapper, or a new one like the saved one. Return None, and record a problem, if neither is
        possible. `form`: None if a plain tensor was saved and the live one is a wrapper."""
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
            return None  # the problem is recorded
        if form.whole is None:
            parts = {n: placement.create(n, self._device_of(n), ranks, guarded=True) for n in form.names}
            return remake(form, parts)
        if not sharded or tuple(beside.shape) != form.whole:
            raise MismatchError(
                f"{form.name} was a rank's share of a DTensor of shape {list(form.whole)}, and here is none"
            )
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
        found._local_tensor = made  # from_local() made a view of it, which not every class supports
        assert isinstance(found, Tensor)
        return found

    def _share(self, name: str, beside: Any) -> Tensor:
        """Create memory for this rank's share of a tensor that is sharded like `beside`."""
        spec = replace(self._placement.spec(name), shape=tuple(local(beside).shape))
        made = empty(spec, self._device_of(name), like=local(beside))
        self._placement.fill(name, StateEntry(name, made, True, beside))
        return made
