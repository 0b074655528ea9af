"""Training has priority: the writer uses only the remaining CPU time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.writer_process import NICE
from processes import writers

SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")


def autogroup_nice(pid: int) -> int | None:
    """Return the niceness of a process's autogroup, or None without one, as in some containers."""
    words = Path(f"/proc/{pid}/autogroup").read_text().split()
    return int(words[-1]) if words else None


def test_writer_has_lower_priority_than_trainer(tmp_path: Path) -> None:
    """The writer lowers its own niceness, and that of its session where Linux schedules by session.

    Otherwise a busy writer would get half of the cores that training uses."""
    before = os.nice(0)
    model = torch.nn.Linear(4, 4)
    with ckpt.Checkpointer({"model": model}, ckpt.Tier(str(tmp_path / "run")), memory=ckpt.Memory(linger_s=0)) as cp:
        cp.restore(default=0)
        cp.save(1).wait_durable()
        (writer,) = writers(Path(os.environ["CKPT_RUNTIME_DIR"]))
        assert writer.nice() == min(19, before + NICE) and os.getsid(writer.pid) != os.getsid(0)
        if not SWITCH.exists() or SWITCH.read_text().strip() != "1":
            pytest.skip("this system does not schedule by session")
        if autogroup_nice(os.getpid()) is None:
            pytest.skip("processes are in no group here")
        assert autogroup_nice(writer.pid) == NICE
        assert autogroup_nice(os.getpid()) != NICE
