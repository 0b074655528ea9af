"""How is a whole run looked after from outside? Audit, repair, prune, copy.

In: runs in stores. Out: plans that can be shown, and what was done. It may not be needed by a training, nor know torch
or the command line.
"""
