"""What does the process do that outlives the trainer? Hold memory, persist, promote, watch, report.

In: messages and arenas from the trainer. Out: checkpoints in stores, the ledger, acknowledgements. It may not import
torch, nor anything of the trainer.
"""
