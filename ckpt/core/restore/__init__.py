"""Which source does a restore use, agreed by all ranks? Memory, a store, a peer.

In: sources, and the state to fill. Out: `Restored`, with the state whole and equal to what was saved. How long ranks
wait for each other, and how often a source is asked again, is said in `restore_first`. It may not save anything, start
processes, or know the trainer that calls it.
"""
