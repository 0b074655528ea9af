"""The writer: the process that outlives the trainer. It holds memory, saves snapshots and records run metrics.

In: messages and arenas from the trainer. Out: checkpoints in stores, run metrics, replies. It may import neither torch
nor anything of the trainer, the guard or the tools.

`ckpt.writer_process` assembles the writer, and `Dispatch` passes requests to their handlers. `held_run` and `memory`
have its state. `life` decides which trainer it serves, and when it leaves. `opening` opens a run. `saver` makes
checkpoints of snapshots, with `parts` (commit) and `promotion` (queues, and copies between stores), and uses
`ckpt.core.checkpoint` to write to one store. `bookkeeper` records run metrics. A guard watches the trainer through the
port `life.TrainerWatch`.
"""
