"""Writes one checkpoint to one store and reads it back: encoding, commit, index, reading, repair, retention, promotion.

In: plans and buffers, or a checkpoint id. Out: files and records, or verified bytes. This package knows the run log and
the format. It does not know processes, communication between ranks, the user's objects, or torch.
"""
