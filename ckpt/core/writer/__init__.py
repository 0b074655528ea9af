"""The writer: the process that outlives the trainer. It holds memory, saves snapshots and records run metrics.

In: messages and arenas from the trainer. Out: checkpoints in stores, run metrics, replies. It may not import torch, nor
anything of the trainer, the guard or the tools.

`ckpt.writer_process` assembles it, and `Dispatch` passes requests to their handlers. Its state is in `held_run` and
`memory`. `life` decides which trainer it serves, and when it leaves. `opening` opens a run. `saver` makes
checkpoints of snapshots, with `parts` (commit) and `promotion` (queues, and copies between stores);
`ckpt.core.checkpoint` does that in one store. `bookkeeper` records run metrics. A guard watches the trainer through the
port `life.TrainerWatch`.
"""
