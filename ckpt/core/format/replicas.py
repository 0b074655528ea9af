"""What each rank says of the tensors that it should hold equal to other ranks, and where two ranks differ.

Each rank stages a slice of such a tensor, so slices of ranks that have drifted apart would make a tensor that no rank
ever had. A part therefore carries digests of the whole tensors, as `{"sums": {group: digest}, "rows": text}`. A group
stands for the ranks that hold the same tensors. The rows are only read where the sums differ. They are compressed JSON:
for each group a list of `[name, instance, offsets, elements, digest]`. Two rows are comparable if they agree in all but
the digest; `elements` says which elements of the tensor it was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.core.format.columns import ODD
from ckpt.core.format.digest import file_digest
from ckpt.core.format.manifest import canonical, press, unpress
from ckpt.errors import CorruptError

Row = tuple[str, int, tuple[int, ...], str, str]
Replicas = dict[str, Any]
"""As a part has it."""

DIFFER = "different values of what they should hold equal"  # so says the error that names them
SHOWN = 5  # names


def replicas(rows: Mapping[tuple[int, ...], list[Row]]) -> Replicas:
    """Return what a part carries. `rows`: by the ranks that hold these tensors."""
    if not rows:
        return {}
    named = {file_digest(canonical(list(ranks)))[:16]: sorted(found) for ranks, found in rows.items()}
    sums = {group: file_digest(canonical(found))[:16] for group, found in named.items()}
    return {"sums": sums, "rows": press(canonical(named))}


def differing(said: Iterable[tuple[int, Replicas]]) -> dict[str, list[int]]:
    """Return the tensors that ranks hold differently, with all ranks that hold them. `said`: by rank.

    CorruptError if it is not what `replicas` returns.
    """
    try:
        told = [(rank, one) for rank, one in said if one]
        sums: dict[str, set[str]] = {}
        for _, one in told:
            for group, digest in one["sums"].items():
                sums.setdefault(group, set()).add(digest)
        odd = {group for group, digests in sums.items() if len(digests) > 1}
        seen: dict[tuple[Any, ...], dict[str, list[int]]] = {}
        for rank, one in told:
            if not odd.isdisjoint(one["sums"]):
                rows = unpress(one["rows"])
                for group in odd & rows.keys():
                    for name, instance, offsets, elements, digest in rows[group]:
                        label = str(name), instance, tuple(offsets), elements, group
                        seen.setdefault(label, {}).setdefault(digest, []).append(rank)
    except ODD as error:
        raise CorruptError(f"what a part says of replicated tensors is damaged: {error!r}") from error
    found: dict[str, set[int]] = {}
    for (name, *_), digests in seen.items():
        if len(digests) > 1:
            found.setdefault(name, set()).update(rank for ranks in digests.values() for rank in ranks)
    return {name: sorted(ranks) for name, ranks in sorted(found.items())}


def in_words(found: Mapping[str, list[int]]) -> str:
    """Name the tensors and the ranks, and say what to do."""
    names = ", ".join([*list(found)[:SHOWN], *([f"{len(found) - SHOWN} more"] if len(found) > SHOWN else [])])
    ranks = sorted({rank for each in found.values() for rank in each})
    listed = ", ".join([*map(str, ranks[:8]), *(["…"] if len(ranks) > 8 else [])])
    return (
        f"ranks {listed} hold {DIFFER}: {names}. A checkpoint would mix them. Find out what lets the ranks drift "
        "(no_sync(), an unequal number of steps, a faulty device) or synchronize them before saving"
    )
