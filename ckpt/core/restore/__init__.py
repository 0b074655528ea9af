"""Which checkpoint do all ranks restore, and how do its bytes get into the tensors?

`restore` tells the story from the first look to the last tensor, `sources` reads one checkpoint in one location, and
`division` decides which rank reads which bytes. In: what a rank can see, and the state to fill. Out: `Restored`, with
the state whole and equal to what was saved. It may not save anything, start processes, or know the trainer.
"""
