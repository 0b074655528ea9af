"""Copies the state consistently into a slot of memory while training continues.

In: a reading of the state, and the slots. Out: sealed slots, or the reason why a snapshot was dropped. Only `device`
uses the API of an accelerator. This package does not depend on writers, tiers or runs.
"""
