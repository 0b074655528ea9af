"""How does a Ray Train worker save every step, come back from memory when Ray starts it again, and report to Ray?

In: what a training function has, under `TorchTrainer`. Out: a `ckpt.Checkpointer` whose run lies in the experiment's
own storage. Only public names of Ray are used.
"""

from ckpt.ray.worker import WorkerCheckpointer as WorkerCheckpointer
from ckpt.ray.worker import attach as attach
from ckpt.ray.worker import place_of as place_of

__all__ = ["WorkerCheckpointer", "attach", "place_of"]
