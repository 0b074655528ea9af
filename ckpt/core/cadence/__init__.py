"""Save intervals, and the measured cost of saving.

In: durations of steps and saves. Out: a save interval, and the run metrics, as values. This package reads and writes no
files.
"""
