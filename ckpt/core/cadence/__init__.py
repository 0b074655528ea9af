"""Save intervals, the measured cost of saving, and the record of each job attempt (the ledger).

In: durations of steps and saves. Out: a save interval, and the run metrics, as values. This package reads and writes no
files.
"""
