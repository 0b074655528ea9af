"""Chooses the checkpoint that all ranks restore, and fills the tensors with its bytes.

`restore` performs a restore from the search to the last plain value. `sources` reads one checkpoint in one location,
and decides which rank reads which bytes. In: the snapshots and tiers that a rank can see, and the state to fill. Out:
`Restored`, with a state equal to the saved one. It may not save, start processes, or depend on the trainer.
"""
