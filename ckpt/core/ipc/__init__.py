"""How do a trainer and its writer reach each other, and share memory that outlives either?

In: keys of runs, messages, sizes. Out: channels, arenas, mutexes, the heartbeat, and the identity of processes. Each
message is a class in `requests`, `watch_requests` or `notes`. This package knows neither the handlers of messages nor
the content of arenas, and does not import torch.
"""
