"""How do snapshots that the writer holds become checkpoints in the tiers?

In: a slot that is to be written, or all of them after the trainer's death. Out: parts, COMMIT records, copies in the
tiers behind, redo logs. How one checkpoint gets into one store is `ckpt.checkpoint`.
"""
