"""Types of the values that this library returns, for use in annotations."""

from __future__ import annotations

from ckpt.core.restore.restore import Restored
from ckpt.core.run.training_run import Stats
from ckpt.guard.report import Fault
from ckpt.loading import Loaded
from ckpt.saving import Checkpoint, Save
from ckpt.tools.convert.export import Exported
from ckpt.tools.maintain.examine import Verdict
from ckpt.tools.maintain.listing import CheckpointInfo

__all__ = ["Checkpoint", "CheckpointInfo", "Exported", "Fault", "Loaded", "Restored", "Save", "Stats", "Verdict"]
