"""What is said of a restore."""

from __future__ import annotations

from ckpt.checkpoint.losses import Skipped
from ckpt.faults.report import Fault
from ckpt.restore.restore_first import Restored
from ckpt.trainer import restoring


def test_what_is_said_of_a_restore() -> None:
    """From where, which step, how long; what is lost by all that is known of the end; nothing where nothing is."""
    found = Restored(7, tier="memory", seconds=0.5)
    assert restoring._line(found, []) == "restored step 7 from memory in 500 ms"
    end = Fault("death", "", steps={"0": 9, "1": 8})
    assert restoring._line(found, [end]).endswith("; training had come to step 9: 2 steps are lost")
    assert "lost" not in restoring._line(found, [Fault("death", "", steps={"0": 7})])
    found.skipped.append(Skipped(9, "file:///run", "damaged"))
    assert restoring._line(found, []).endswith("; newer ones that cannot be used, see above: 1")
