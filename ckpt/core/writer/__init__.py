"""What does the process do that outlives the trainer? Hold memory, persist, promote, keep the ledger.

In: messages and arenas from the trainer. Out: checkpoints in stores, the ledger, acknowledgements. It may not import
torch, nor anything of the trainer, the guard or the tools.

`ckpt.writer_process` puts it together; `dispatch` finds the methods that deal with a request. What it knows:
`held_run`, `memory`. Whom it serves, and when it leaves: `life`. How a run is opened: `opening`. How snapshots become
checkpoints in the tiers: `persist`, `parts`, `promotion`; how one gets into one store is `ckpt.core.checkpoint`. The
ledger: `bookkeeper`. Who watches the trainer does so behind the port in `life`, `TrainerWatch`.
"""
