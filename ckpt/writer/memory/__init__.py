"""What does the writer hold of the trainer's memory, and of other ranks'?

In: arenas and layouts. Out: sealed snapshots, their digests, copies on other nodes. It knows no tier and no run.
"""
