"""What does the process do that outlives the trainer? Hold memory, persist, promote, watch, report.

In: messages and arenas from the trainer. Out: checkpoints in stores, the ledger, acknowledgements. It may not import
torch, nor anything of the trainer.

`main` puts it together; `dispatch` finds the method that deals with a request. What it knows: `present_trainer`,
`held_run`, `held_memory`. Saving: `persist`, `parts`, `promotion`, `settle`, `redo`. Whose it is: `succession`,
`opening`, `after_death`, `drain`. Watching: `trainer_watch`, `watchdog`, `fault_reports`,
`observers` and those they tell.
"""
