"""What is checked before a COMMIT: parts fit, every element is there, bases are live. Nothing is read or written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from ckpt.core.checkpoint.parts import MANY
from ckpt.core.checkpoint.write import WrittenPart
from ckpt.core.format import replicas
from ckpt.core.format.join_ranks import build
from ckpt.core.format.layout import Layout
from ckpt.core.format.manifest import MAX_NEEDS, Attempt, owner, rank_and_try
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.table import merge
from ckpt.core.log.records import RunState
from ckpt.errors import CorruptError, SaveError

WHOLE = 1 << 14  # rows of all tables (pieces and blobs): with more, the index is a directory of them

# -- what is built on --


def check_sources(
    state: RunState, attempt: Attempt, needs: Iterable[Attempt], packs: Iterable[str] = frozenset()
) -> None:
    """SaveError unless the older checkpoints that an attempt builds on are live in this very state.

    Then all that it takes from them is there, also what they took from still older ones, since no PLAN deletes what a
    live one uses; and what is committed next to this state protects it from then on by using it too. `packs`: of these
    checkpoints only those count that were committed, and of no other try.
    """
    tries = {a: {(rank, number) for rank, number, _ in state.commits[a].parts} for a in needs if a in state.commits}
    for base in needs:
        if base not in tries:
            why = "was given up meanwhile" if base in state.retired else "is no checkpoint here"
            raise SaveError(f"step {attempt.step} builds on step {base.step}, which {why}: the next save will be whole")
    for key in packs:
        of = owner(key)
        if of in tries and rank_and_try(key) not in tries[of]:
            raise SaveError(f"step {attempt.step} builds on {key}, which was not committed")


def check_borrowed(state: RunState, attempt: Attempt, packs: Iterable[str], used: Mapping[Attempt, Set[str]]) -> None:
    """SaveError if what was copied refers to a pack that a PLAN may have named: of an attempt that has ended here, and
    in use by no live checkpoint. `used`: as far as it is known, what each of them uses."""
    safe = set[str]().union(*(used[a] for a in used.keys() & state.commits.keys()))
    for key in sorted(packs):
        of = owner(key)
        if of is not None and of != attempt and key not in safe and state.ended(of):
            raise SaveError(f"step {attempt.step} refers to {key}, of a save that was given up here")


def vouches(state: RunState, base: WrittenPart) -> bool:
    """Whether one may build on a part: it belongs to a live checkpoint, which was made of this very try."""
    part = base.part
    found = state.commits.get(Attempt.parse(part.attempt))
    return found is not None and (part.rank, part.number, base.digest) in found.parts


def check_needs(attempt: Attempt, needs: Collection[Attempt]) -> None:
    """SaveError if nobody could read the record that says this."""
    if len(needs) > MAX_NEEDS:
        raise SaveError(f"step {attempt.step} builds on {len(needs)} older ones, which is too many: save it whole")
    if needs and max(needs) >= attempt:
        raise SaveError(f"step {attempt.step} builds on step {max(needs).step}, which is not older: save it whole")


# -- what the ranks say --


def check_fit(parts: list[WrittenPart]) -> None:
    """SaveError if the ranks do not agree about what they saved: some of it twice, or by nobody."""
    ordered = sorted(parts, key=lambda w: w.part.rank)
    try:
        layouts = [Layout.from_json(w.part.layout) for w in ordered]
        SavedState(layouts, [w.part.values for w in ordered], merge([w.table for w in ordered]))
    except CorruptError as error:
        raise SaveError(str(error)) from error


def check_replicas(parts: Sequence[WrittenPart]) -> None:
    """SaveError naming each tensor of which ranks hold different values although they should hold the same."""
    try:
        found = replicas.differing((w.part.rank, w.part.replicas) for w in parts)
    except CorruptError as error:
        raise SaveError(str(error)) from error
    if found:
        raise SaveError(replicas.in_words(found))


def index_of(parts: Sequence[WrittenPart], kind: str = "COMMIT") -> bytes:
    """The index of parts in rank order: all tables as one while that is small, so that restoring reads one file and a
    lost table can be made again; else a directory of them. SaveError if the ranks do not agree about what they saved.
    """
    if not is_large(parts, kind):
        if any(w.pieces is not None for w in parts):
            step = Attempt.parse(parts[0].part.attempt).step
            raise SaveError(f"what the ranks wrote of step {step} makes no checkpoint together")
        return merge([w.table for w in parts]).to_bytes()
    try:
        return build([w.part for w in parts], [w.pieces or w.table for w in parts]).to_bytes()
    except CorruptError as error:
        raise SaveError(str(error)) from error


def is_large(parts: Sequence[WrittenPart], kind: str) -> bool:
    """Whether the index will be a directory. What lies on several disks is told by each, with its whole table."""
    if kind != "COMMIT" or not 1 < len(parts) == parts[0].part.world:
        return False
    return len(parts) > MANY or sum(len(w.table.shards) + len(w.table.length) for w in parts) > WHOLE


def all_finite(said: list[bool | None]) -> bool | None:
    """What ranks said, as one: one that has seen a NaN is enough."""
    return False if False in said else None if None in said else True


def is_whole(parts: list[WrittenPart]) -> bool:
    worlds = {w.part.world for w in parts}
    return len(worlds) == 1 and {w.part.rank for w in parts} == set(range(worlds.pop()))
