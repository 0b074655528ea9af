"""The trainer's side of a run: opening, restoring, saves from `step()` until a writer has them, and closing.

In: the state, tiers, triggers. Out: sealed slots, messages to the writer, acknowledgements to `Save`. This package
imports torch and owns the run. It may not import the writer, and communicates with it only through `ckpt.core.ipc`.
"""
