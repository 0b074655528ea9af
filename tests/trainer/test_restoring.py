"""Tests of log lines and errors of a restore."""

from __future__ import annotations

from ckpt.core.checkpoint.losses import Skipped
from ckpt.core.restore.restore import Restored
from ckpt.core.run import restoring
from processes import run_script


def test_restore_log_line() -> None:
    """The line has the source, the step, the duration and the known lost steps, and says nothing unknown."""
    found = Restored(7, tier="memory", seconds=0.5)
    assert restoring._line(found, 0) == "restored step 7 from memory in 500 ms"
    assert restoring._line(found, 9).endswith("; training had come to step 9: 2 steps are lost")
    assert restoring._line(found, 8).endswith("; training had come to step 8: 1 step is lost")
    assert "lost" not in restoring._line(found, 7)
    found.skipped.append(Skipped(9, "file:///run", "damaged"))
    assert restoring._line(found, 0).endswith("; skipped 1 newer checkpoint, see above")


def test_restore_during_interpreter_exit_fails(run_dir: str) -> None:
    """In a thread that is not joined, it raises one of our errors, which explains the remedy."""
    code = """
import sys, threading, time, torch, ckpt
cp = ckpt.Checkpointer({"n": torch.zeros(1)}, sys.argv[1])
def restore():
    threading.main_thread().join()
    cp.restore(default=0)
threading.Thread(target=restore).start()
"""
    said = run_script(code, run_dir).stderr
    assert (
        "ClosedError: the interpreter is ending" in said and "RuntimeError" not in said and "never awaited" not in said
    )
