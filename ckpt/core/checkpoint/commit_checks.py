"""Checks before a COMMIT: manifests fit together, all elements are covered, sources are live. No reads or writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from ckpt.core.checkpoint.write import WrittenPart
from ckpt.core.format import replicas
from ckpt.core.format.index import Share, build
from ckpt.core.format.manifest import MAX_NEEDS, Attempt, owner
from ckpt.core.log.records import RunState
from ckpt.errors import CorruptError, SaveError

WHOLE_NEXT = "the next save will be whole"  # in the reason of a failed save, where every rank's writer finds it

# -- sources of an increment --


def check_files(
    state: RunState,
    attempt: Attempt,
    packs: Iterable[str],
    used: Mapping[Attempt, Set[str]],
    *,
    copied: bool = False,
) -> None:
    """Raise SaveError unless each data file was written by this checkpoint, or is used by a live checkpoint.

    No PLAN deletes a data file that a live checkpoint uses. The COMMIT that follows this state keeps the file from then
    on.

    used: the files of live checkpoints, as far as they could be read.
    copied: the data files were copied here with the checkpoint. Then it may also name files of checkpoints that have
        not ended here, because no clean-up deletes these.
    """
    safe = set[str]().union(*(used[a] for a in used.keys() & state.commits.keys()))
    for key in sorted(packs):
        of = owner(key)
        if of != attempt and key not in safe and not (copied and of is not None and not state.ended(of)):
            then = "" if copied else f": {WHOLE_NEXT}"
            raise SaveError(f"step {attempt.step} builds on {key}, which no live checkpoint uses{then}")


def check_live(state: RunState, attempt: Attempt, needs: Iterable[Attempt]) -> None:
    """Raise SaveError unless every checkpoint that a HELD one builds on is live in this state."""
    for base in needs:
        if base not in state.commits:
            raise SaveError(f"step {attempt.step} builds on step {base.step}, which was retired")


def check_trusted(parts: Sequence[WrittenPart], distrusted: Attempt | None) -> None:
    """Raise SaveError if a rank built on a checkpoint that the committing writer had found damaged before.

    Checkpoints in flight at that time are at most `distrusted`, and pass. So do emergency saves: no later save could
    replace them, and the damage may be repaired.
    """
    if any(one.part.reason != "due" for one in parts):
        return
    attempt = Attempt.parse(parts[0].part.attempt)
    needs = sorted({Attempt.parse(need) for one in parts for need in one.part.needs})
    if distrusted is not None and attempt > distrusted and needs and needs[0] <= distrusted:
        raise SaveError(f"step {attempt.step} builds on step {needs[0].step}, which is damaged: {WHOLE_NEXT}")


def vouches(state: RunState, base: WrittenPart) -> bool:
    """Return True if a checkpoint may build on this manifest, because it belongs to a live checkpoint."""
    part = base.part
    found = state.commits.get(Attempt.parse(part.attempt))
    return found is not None and (part.rank, base.digest) in found.parts


def check_needs(attempt: Attempt, needs: Collection[Attempt]) -> None:
    """Raise SaveError if the sources could not be recorded."""
    if len(needs) > MAX_NEEDS:
        raise SaveError(
            f"step {attempt.step} builds on {len(needs)} older checkpoints, which is too many: it must be full"
        )
    if needs and max(needs) >= attempt:
        raise SaveError(f"step {attempt.step} builds on step {max(needs).step}, which is not older: it must be full")


# -- the manifests of the ranks --


def check_replicas(parts: Sequence[WrittenPart]) -> None:
    """Raise SaveError listing the tensors that should be replicated but differ between ranks."""
    try:
        found = replicas.differing((w.part.rank, w.part.replicas) for w in parts)
    except CorruptError as error:
        raise SaveError(str(error)) from error
    if found:
        raise SaveError(replicas.in_words(found))


def index_of(parts: Sequence[WrittenPart]) -> bytes:
    """Return the index of these parts. Raise SaveError if the ranks disagree about what they saved.

    On a disk that only some nodes see, the parts are those of some ranks. Then tensors may be incomplete.
    """
    ordered = sorted(parts, key=lambda w: w.part.rank)
    shares = [Share(w.part.rank, w.part.world, w.part.layout, w.part.values, w.table) for w in ordered]
    try:
        return build(shares, partial=not is_whole(parts)).to_bytes()
    except CorruptError as error:
        raise SaveError(str(error)) from error


def all_finite(values: list[bool | None]) -> bool | None:
    """Return False if any rank saw a NaN, None if that is unknown for a rank, and True otherwise."""
    return False if False in values else None if None in values else True


def is_whole(parts: Sequence[WrittenPart]) -> bool:
    worlds = {w.part.world for w in parts}
    return len(worlds) == 1 and {w.part.rank for w in parts} == set(range(worlds.pop()))
