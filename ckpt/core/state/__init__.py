"""Reads the user's state as a layout and values, and restores it into the objects.

Reading turns modules, optimizers and all other entries of the state into a `CapturedState` with live tensors. This
package uses torch. It does not use stores or processes, and it does not copy, write or wait.
"""
