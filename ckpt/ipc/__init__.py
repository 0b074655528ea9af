"""How do a trainer and its writer reach each other, and share memory that outlives either?

In: keys of runs, messages, sizes. Out: channels, arenas, mutexes, the heartbeat, and who a process is. It may not know
what the bytes in an arena or the words of a message mean; nor torch.
"""
