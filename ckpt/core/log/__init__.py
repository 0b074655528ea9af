"""What has happened to a run? The log of records that alone decides what is a checkpoint, and who may write.

In: a store, and records to append. Out: `RunState`, folded from all records in order. It may not know what is in a
checkpoint, how parts are written, or who waits for a commit; nor torch.
"""
