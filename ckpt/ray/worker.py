"""A Checkpointer in a worker of Ray Train.

Ray copies each reported checkpoint, and deletes old ones by its `num_to_keep`. So a reported checkpoint is a folder
with one small file that names the run and the step (`POINTER`). The run is next to it, and Ray never changes the run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import ray
    import ray.train
except ImportError as error:
    raise ImportError("ckpt.ray needs Ray: pip install 'everystep[ray]'") from error

from ckpt.checkpointer import Checkpointer
from ckpt.core.cadence.cadence import Auto
from ckpt.core.checkpoint import chunks
from ckpt.core.checkpoint.concurrent import run
from ckpt.core.checkpoint.retention import Keep
from ckpt.core.format.regular_file import read_regular
from ckpt.errors import CorruptError, InvalidArgumentError
from ckpt.tiers import DEFAULT_MEMORY, Memory, Tier
from ckpt.version import check_known

KNOWN = ((2, 60), (2, 70))  # the first supported version, and the first unsupported one
POINTER = "everystep.json"
MAX_POINTER = 1 << 20  # maximum bytes of a POINTER file
SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}  # by the type names of pyarrow's file systems


check_known("ckpt.ray", "Ray", ray.__version__, KNOWN)


class WorkerCheckpointer(Checkpointer):
    """A Checkpointer that reports to Ray. Created by `attach`. `place`: folder or URL of the run."""

    def __init__(self, state: dict[str, Any], tiers: list[Tier], place: str, **arguments: Any) -> None:
        self.place = place
        super().__init__(state, tiers, **arguments)

    def report(self, metrics: dict[str, Any], **options: Any) -> None:
        """Call `ray.train.report` on all workers, with a checkpoint that names the last step, and save that step to
        every tier. Ray waits here for all workers, as usual, but not for the save. `options`: further arguments of
        `ray.train.report`."""
        step = self.save().step
        if ray.train.get_context().get_world_rank() > 0:
            ray.train.report(metrics, checkpoint=None, **options)
            return
        with tempfile.TemporaryDirectory(prefix="everystep-") as folder:
            Path(folder, POINTER).write_text(json.dumps({"run": self.place, "step": step}))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder), **options)


def attach(
    state: dict[str, Any],
    *,
    every: int | str | Auto = 100,
    keep: Keep | int | str = "all",
    memory: Memory | None = DEFAULT_MEMORY,
    also: Sequence[Tier] = (),
    place: str | None = None,
    **arguments: Any,
) -> WorkerCheckpointer:
    """Return the Checkpointer of a worker. Call it in the function that `TorchTrainer` runs, on all workers.

        with ckpt.ray.attach({"model": model, "optim": optim, "rng": ckpt.RNG()}, every=500) as cp:
            for step in range(cp.restore(default=0), steps):
                loss = train_step(next(batches))
                cp.step(step + 1)
                if (step + 1) % 500 == 0:
                    cp.report({"loss": float(loss)})

    Every step is saved to `memory`, and every step that `every` schedules also to `place` and to the tiers in `also`.
    `place` is by default the folder `everystep` in the storage of the experiment (`RunConfig(storage_path=, name=)`).
    Workers that Ray restarts (`FailureConfig`) resume at the last step in memory. A later `fit` with the same name
    resumes at the newest step in `place`, with any number of workers. `state`, `keep`, `arguments`: see
    `ckpt.Checkpointer`. Raises InvalidArgumentError for storage that everystep does not support.
    """
    place = place or _experiments_place()
    tiers = [*also, Tier(place, every=every, keep=keep)]
    return WorkerCheckpointer(state, tiers, place, memory=memory, **arguments)


def _experiments_place() -> str:
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind not in SCHEMES:
        raise InvalidArgumentError(
            f"everystep does not support Ray's storage {kind!r}: pass a folder or URL, "
            'ckpt.ray.attach(state, place="s3://…")'
        )
    return f"{SCHEMES[kind]}{storage.experiment_fs_path}/everystep"


def place_of(checkpoint: Any) -> str:
    """Return the `RUN@STEP` of a reported checkpoint, for example of `result.checkpoint`, for `ckpt.load` and the
    commands. Raise UnreadableError if its file cannot be read now, CorruptError if it is lost or damaged."""
    with checkpoint.as_directory() as folder:
        try:
            pointer = json.loads(run(chunks.files(read_regular, Path(folder, POINTER), MAX_POINTER)))
            return f"{pointer['run']}@{int(pointer['step'])}"
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptError(f"{checkpoint.path} is not a checkpoint that ckpt.ray reported: {error}") from None
