"""How do a trainer and its writer reach each other, and share memory that outlives either?

In: keys of runs, messages, sizes. Out: channels, arenas, mutexes, the heartbeat, and who a process is. Each message is
a class in `requests`, `watch_requests` or `notes`. It may not know what is done about it, or what the bytes in an arena
mean; nor torch.
"""
