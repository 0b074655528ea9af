"""Packs that are doubted."""

from __future__ import annotations

from typing import Any

from ckpt.core.format.table import Table


def suspect(table: Table, blob: int) -> Any:
    """What a place remembers of a blob that it has found damaged."""
    return table.packs[int(table.pack[blob])], int(table.offset[blob])
