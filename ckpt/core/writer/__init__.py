"""What does the process do that outlives the trainer? Hold memory, persist, promote, watch, report.

In: messages and arenas from the trainer. Out: checkpoints in stores, the ledger, acknowledgements. It may not import
torch, nor anything of the trainer.

`main` puts it together; `dispatch` finds the method that deals with a request. What it knows: `held_run`, `memory`.
Whose it is: `succession`, `opening`, `after_death`. How snapshots become checkpoints in the tiers: `persist`, `parts`,
`promotion`; how one gets into one store is `ckpt.core.checkpoint`. What it sees and tells: `bookkeeper`, `status`,
`watchdog`, `fault_reports`.
"""
