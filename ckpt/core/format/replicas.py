"""Digests of replicated tensors, and a comparison that finds ranks with different values.

Each rank stages a slice of such a tensor. If the replicas differ, the slices would form a tensor that no rank ever had.
A manifest therefore contains digests of the whole tensors, as `{"sums": {group: digest}, "rows": text}`. A group stands
for the ranks with the same tensors. The rows are read only if the sums differ. They are compressed JSON: for each group
a list of `[name, instance, offsets, elements, digest]`. Two rows are comparable if they agree in all fields except the
digest; `elements` identifies the elements that were digested.
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
"""The digests as a manifest contains them."""

DIFFER = "different values of replicated tensors"  # part of the error of a failed save, recognized by the trainer
SHOWN = 5  # names


def replicas(rows: Mapping[tuple[int, ...], list[Row]]) -> Replicas:
    """Return the digests for a manifest. `rows`: by the ranks with these tensors."""
    if not rows:
        return {}
    named = {file_digest(canonical(list(ranks)))[:16]: sorted(found) for ranks, found in rows.items()}
    sums = {group: file_digest(canonical(found))[:16] for group, found in named.items()}
    return {"sums": sums, "rows": press(canonical(named))}


def differing(saved: Iterable[tuple[int, Replicas]]) -> dict[str, list[int]]:
    """Return the tensors that differ between ranks, with all ranks that have them. `saved`: by rank.

    Raise CorruptError if a rank's digests are malformed.
    """
    try:
        digested = [(rank, one) for rank, one in saved if one]
        sums: dict[str, set[str]] = {}
        for _, one in digested:
            for group, digest in one["sums"].items():
                sums.setdefault(group, set()).add(digest)
        odd = {group for group, digests in sums.items() if len(digests) > 1}
        seen: dict[tuple[Any, ...], dict[str, list[int]]] = {}
        for rank, one in digested:
            if not odd.isdisjoint(one["sums"]):
                for group in odd & unpress(one["rows"]).keys():
                    for name, instance, offsets, elements, digest in unpress(one["rows"])[group]:
                        label = str(name), instance, tuple(offsets), elements, group
                        seen.setdefault(label, {}).setdefault(digest, []).append(rank)
    except ODD as error:
        raise CorruptError(f"the digests of replicated tensors in a manifest are damaged: {error!r}") from error
    found: dict[str, set[int]] = {}
    for (name, *_), digests in seen.items():
        if len(digests) > 1:
            found.setdefault(name, set()).update(rank for ranks in digests.values() for rank in ranks)
    return {name: sorted(ranks) for name, ranks in sorted(found.items())}


def in_words(found: Mapping[str, list[int]]) -> str:
    """Return a message with the tensors, the ranks and the remedy."""
    names = ", ".join([*list(found)[:SHOWN], *([f"{len(found) - SHOWN} more"] if len(found) > SHOWN else [])])
    ranks = sorted({rank for each in found.values() for rank in each})
    listed = ", ".join([*map(str, ranks[:8]), *(["…"] if len(ranks) > 8 else [])])
    return (
        f"ranks {listed} have {DIFFER}: {names}. A checkpoint would mix them. Find out why the ranks differ "
        "(no_sync(), an unequal number of steps, a faulty device) or synchronize them before saving"
    )
