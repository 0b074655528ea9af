"""The training process's side of a save, from `step()` until a writer holds the snapshot.

In: the state, tiers, triggers. Out: staged slots, messages to the writer, acknowledgements to `Save`. This package
imports torch and owns the run. It may not import the writer, and communicates with it only through `ckpt.core.ipc`.
"""
