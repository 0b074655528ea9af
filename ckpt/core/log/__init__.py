"""The history of a run: a log of records, which alone decides which checkpoints exist and which job may write.

In: a store, and records to append. Out: `RunState`, the result of applying all records in order. This package does not
know the contents of a checkpoint, how its files are written, or who waits for a commit. It does not import torch.
"""
