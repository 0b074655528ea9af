"""What `ckpt doctor` finds, and the words that its checks share: verdicts, a job, a place, figures for people.

GB are 10**9 bytes, as disks and networks count.
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
    """`verdict`: "ok", "advice" or "problem"; `advice` says what to do. `data` is more of it for programs, as JSON."""

    what: str
    value: str
    verdict: str = OK
    advice: str = ""
    data: Any = None


def judge(what: str, value: str, bad: bool, advice: str, data: Any = None, *, verdict: str = ADVICE) -> Finding:
    """All is well with it unless it is `bad`; only then the advice is given."""
    return Finding(what, value, verdict, advice, data) if bad else Finding(what, value, data=data)


def worst(findings: Sequence[Finding]) -> str:
    """The verdict over all of them."""
    return max((f.verdict for f in findings), key=(OK, ADVICE, PROBLEM).index, default=OK)


@dataclass(frozen=True, slots=True)
class JobSize:
    """`state` in bytes, over all ranks; `step_s` seconds a step; `world` ranks, `local` of them on this machine: `how`
    that is known, for people."""

    state: int = 0
    step_s: float | None = None
    world: int = 1
    local: int = 1
    how: str = ""

    @property
    def here(self) -> int:
        """Bytes that this machine saves, replicas cut."""
        return self.state * self.local // self.world


@dataclass
class StoreRates:
    """`write` and `read` in bytes a second, `put_s` and `get_s` of a small object, `cpu_s` of CPU a byte written."""

    write: float = 0.0
    read: float = 0.0
    put_s: float = 0.0
    get_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class TierFindings:
    """What was found about one URL. `reached`: it could be read. `shared`: all nodes write to the same disks of it."""

    url: str
    findings: list[Finding] = field(default_factory=list)
    rates: StoreRates = field(default_factory=StoreRates)
    reached: bool = True
    shared: bool = False
    free: int | None = None
    options: bool = False  # whether it needs some

    @property
    def usable(self) -> bool:
        return self.reached and self.rates.write > 0 and worst(self.findings) != PROBLEM


def clock_difference(seconds: float, exact_s: float) -> Finding:
    """`exact_s`: how far off a right clock may seem to be."""
    off, data = abs(seconds), round(seconds, 1)
    text = f"{'the same' if off <= exact_s else f'{seconds:+.0f} s'} at the other end"
    advice = "Set the clocks (chrony, NTP)"
    if off > max(60.0, exact_s):
        advice += ": S3 refuses requests that are 15 minutes off, and accounts mislead"
        return Finding("clock", text, PROBLEM, advice, data)
    return judge("clock", text, off > exact_s + 2, advice, data)


def cleaner(url: str) -> Callable[[str], str]:
    """What takes passwords and queries out of URLs, and what options call a key or a token out of any text."""
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
    """Page-aligned bytes that nothing on the way can make smaller."""
    view = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    for start in range(0, size, 16 * MIB):
        view[start : start + 16 * MIB] = os.urandom(min(16 * MIB, size - start))
    return view


def read_text(file: Path | str) -> str:
    """Of a file of the kernel; empty where it does not tell."""
    with contextlib.suppress(OSError):
        return Path(file).read_bytes().decode("utf-8", "replace")
    return ""
