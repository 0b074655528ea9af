"""Reads the user's state as a layout and values, and restores it into the objects.

In: modules, optimizers and all other entries of the state. Out: a `CapturedState` with live tensors; restored objects.
This package knows torch. It does not know stores or processes, and it does not copy, write or wait.
"""
