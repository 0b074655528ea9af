"""What changed in a step, and how is that done again? Every step as frames, small because an update is predicted.

In: two states of the same tensors. Out: a log of frames, and the later state, bit for bit. It knows files and the
format; it may not know the trainer, the writer, or which checkpoint a log goes on from.
"""
