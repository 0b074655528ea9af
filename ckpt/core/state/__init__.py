"""What is the user's state, as a layout and values, and how does it get back into the objects?

In: modules, optimizers and whatever else a state holds. Out: a `Reading` of live tensors, and tensors put into place.
It may not copy, write or wait: it knows torch, and neither stores nor processes.
"""
