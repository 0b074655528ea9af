"""A rank dies while its newest step is being copied; another rank holds the same tensors, and finishes the copy.

What is a rank's own (plain values, buffers, random numbers) is in its memory first, and that memory outlives it. The
parameters and optimizer state that data-parallel ranks hold alike are in their replicas too, unchanged until the next
optimizer step. So one survivor of the same node copies them into the dead rank's slot, and its writer seals it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ckpt.format.layout import Layout, TensorSpec
from ckpt.format.manifest import Attempt
from ckpt.format.partition import GLOBAL
from ckpt.ipc import requests
from ckpt.ipc.arena import Arena
from ckpt.state.sharding import LocalPiece, slices
from ckpt.state.tensors import TORCH_DTYPE
from ckpt.trainer.writer_client import WriterClient

RELIEF_S = 10.0  # for the writer of a dead rank to answer


@dataclass(frozen=True)
class MissingTensors:
    """A slot of a dead rank that lacks the tensors `missing` of its layout, by number."""

    attempt: Attempt
    arena: Arena
    slot: int
    layout: Layout
    missing: tuple[int, ...]


def relieve(key: str, fill_in: Callable[[MissingTensors], list[int]]) -> str:
    """Finish the copy that the dead trainer of another writer could not; which attempt is whole now, "" if none."""
    client = WriterClient.find(key)
    if client is None:
        return ""
    try:
        gap, fds = client.ask_for_fds(requests.AskGap(), RELIEF_S)
        if gap is None:
            return ""
        attempt, layout = Attempt.parse(gap.attempt), Layout.from_json(gap.layout)
        arena = Arena.attach(fds[0])
        try:
            numbers = fill_in(MissingTensors(attempt, arena, gap.slot, layout, tuple(gap.missing)))
        finally:
            arena.close()
        return str(attempt) if client.ask(requests.Filled(gap.attempt, numbers), RELIEF_S) else ""
    finally:
        client.close()


def fill(gap: MissingTensors, pieces: Iterable[LocalPiece]) -> list[int]:
    """Copy what the pieces have of it; the numbers of the tensors that are whole now. Nothing may change meanwhile."""
    held: dict[str, list[LocalPiece]] = {}
    for piece in pieces:
        held.setdefault(piece.holding.name, []).append(piece)
    whole = torch.frombuffer(gap.arena.data(gap.slot), dtype=torch.uint8)
    filled: list[int] = []
    for number in gap.missing:
        spec = gap.layout.tensors[number]
        source = next((s for p in held.get(spec.name, ()) if (s := _part(p, spec)) is not None), None)
        if source is None:
            continue
        start = gap.layout.arrangement.offsets[number]
        target = whole[start : start + spec.nbytes].view(TORCH_DTYPE[spec.dtype]).view(spec.shape)
        target.copy_(source)
        filled.append(number)
    return filled


def _part(piece: LocalPiece, spec: TensorSpec) -> torch.Tensor | None:
    """What a piece has of a box, None if that is not all of it."""
    holding = piece.holding
    same = (holding.instance, holding.dtype, holding.full) == (spec.instance, spec.dtype, spec.full)
    if not same or spec.instance != GLOBAL:
        return None
    at = tuple(a - b for a, b in zip(spec.at, holding.offsets, strict=True))
    inside = all(a >= 0 and a + n <= size for a, n, size in zip(at, spec.shape, holding.sizes, strict=True))
    return piece.tensor.detach()[slices((at, spec.shape))] if inside else None
