"""Findings of `ckpt doctor`, and values that its checks share: verdicts, a job, a location, numbers as text.

GB are 10**9 bytes, as for disks and networks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.store import options_of

OK, ADVICE, PROBLEM = "ok", "advice", "problem"
MIB, GB = 1 << 20, 10**9
OnBytes = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `verdict`: "ok", "advice" or "problem". `advice`: what the user should do. `data`: details for
    programs, as JSON."""

    what: str
    value: str
    verdict: str = OK
    advice: str = ""
    data: Any = None


def judge(what: str, value: str, bad: bool, advice: str, data: Any = None, *, verdict: str = ADVICE) -> Finding:
    """Return a finding. If `bad`, it has the given verdict and the advice; otherwise it is OK."""
    return Finding(what, value, verdict, advice, data) if bad else Finding(what, value, data=data)


def worst(findings: Sequence[Finding]) -> str:
    """Return the worst verdict of all findings."""
    return max((f.verdict for f in findings), key=(OK, ADVICE, PROBLEM).index, default=OK)


@dataclass(frozen=True, slots=True)
class JobSize:
    """The size of a job.

    `state`: bytes over all ranks. `step_s`: seconds per step. `world`: number of ranks. `local`: number of ranks on
        this machine. `how`: source of `local`, as text.
    """

    state: int = 0
    step_s: float | None = None
    world: int = 1
    local: int = 1
    how: str = ""

    @property
    def here(self) -> int:
        """The bytes that this machine saves, without replicas."""
        return self.state * self.local // self.world


@dataclass
class StoreRates:
    """Measured rates. `write`, `read`: bytes per second. `put_s`, `get_s`: seconds per small object. `cpu_s`: CPU
    seconds per byte written."""

    write: float = 0.0
    read: float = 0.0
    put_s: float = 0.0
    get_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class TierFindings:
    """The findings about one URL. `reached`: True if it could be read. `shared`: True if all nodes write to it."""

    url: str
    findings: list[Finding] = field(default_factory=list)
    rates: StoreRates = field(default_factory=StoreRates)
    reached: bool = True
    shared: bool = False
    free: int | None = None
    options: bool = False  # True if storage options are needed to open the URL

    @property
    def usable(self) -> bool:
        return self.reached and self.rates.write > 0 and worst(self.findings) != PROBLEM


def clock_difference(seconds: float, exact_s: float) -> Finding:
    """Return a finding about a difference of clocks. `exact_s`: difference that is normal for correct clocks."""
    off, data = abs(seconds), round(seconds, 1)
    text = f"{'the same' if off <= exact_s else f'{seconds:+.0f} s'} at the other end"
    advice = "Set the clocks (chrony, NTP)"
    if off > max(60.0, exact_s):
        advice += ": S3 rejects requests that are 15 minutes off, and run metrics become wrong"
        return Finding("clock", text, PROBLEM, advice, data)
    return judge("clock", text, off > exact_s + 2, advice, data)


def cleaner(url: str) -> Callable[[str], str]:
    """Return a function that removes secrets from any text: passwords and queries in URLs, and the keys and tokens in
    this URL's options."""
    hidden: list[str] = []
    with contextlib.suppress(CheckpointError):
        hidden = sorted(_secrets_in(options_of(url)), key=len, reverse=True)

    def clean(text: str) -> str:
        text = re.sub(r"://[^/@\s]*@", "://", re.sub(r"\?[^\s\"'<>)]*=[^\s\"'<>)]*", "", text))
        for secret in hidden:
            text = text.replace(secret, "***")
        return text

    return clean


def _secrets_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets_in(value)
        elif len(str(value)) >= 4 and re.search(r"key|secret|token|passw|credential|sas", str(name), re.IGNORECASE):
            yield str(value)


def noise(size: int) -> memoryview:
    """Return page-aligned random bytes, which cannot be compressed."""
    view = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    for start in range(0, size, 16 * MIB):
        view[start : start + 16 * MIB] = os.urandom(min(16 * MIB, size - start))
    return view


def read_text(file: Path | str) -> str:
    """Return the text of a kernel file, or "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(file).read_bytes().decode("utf-8", "replace")
    return ""
