"""The adapter for Ray Train: save every step of a worker, restore it from memory after a restart, and report to Ray.

It is used in a training function under `TorchTrainer`, and creates a `ckpt.Checkpointer` whose run is in the storage of
the experiment. Only public names of Ray are used.
"""

from ckpt.ray.worker import WorkerCheckpointer as WorkerCheckpointer
from ckpt.ray.worker import attach as attach
from ckpt.ray.worker import place_of as place_of

__all__ = ["WorkerCheckpointer", "attach", "place_of"]
