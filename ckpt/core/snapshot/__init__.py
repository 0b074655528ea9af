"""Copies the state consistently into a slot of memory while training continues.

The input is a reading of the state and the slots. The result is a sealed slot, or the reason why the snapshot was
dropped. Only `device` uses the API of an accelerator. This package does not depend on writers, tiers or runs.
"""
