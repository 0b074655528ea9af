"""How does one checkpoint get into one store, and out of it? Write, commit, parts, read, repair, retention, promote.

In: plans and buffers, or an attempt. Out: files and records, or verified bytes. It knows the run log and the format; it
may not know processes, ranks' conversations, the user's objects, or torch.
"""
