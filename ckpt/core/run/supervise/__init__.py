"""Which writer do we have, what does it hold, and what if it dies?

In: requests of the other parts of a trainer. Out: a writer that has the memory and the run, whichever it is by then;
answers, and who has lost the run. It knows nothing of the state and of training.
"""
