"""Connects a trainer and its writer: channels, messages, and shared memory that outlives either process.

In: keys of runs, messages, sizes. Out: channels, arenas, mutexes, the heartbeat, and the identity of processes. Each
message is a class in `messages`. This package knows neither the handlers of messages nor the content of arenas, and
does not import torch.
"""
