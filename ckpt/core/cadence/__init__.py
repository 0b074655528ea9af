"""How often is a run saved, and what has saving cost so far?

In: how long steps and saves took. Out: a cadence, and the ledger of a run, as values. It reads and writes no file.
"""
