"""How does the state get into a slot of memory while training goes on, and whole?

In: a reading of the state, and the slots. Out: sealed slots, or why a snapshot was dropped. `device` alone knows the
API of an accelerator. It knows nothing of writers, tiers and runs.
"""
