"""What happens in the training process between `step()` and a writer that holds the snapshot?

In: the state, tiers, triggers. Out: staged slots, messages to the writer, acknowledgements to `Save`. It knows torch
and owns the run; it talks to the writer through `ckpt.core.ipc` alone and may not import it.
"""
