"""Is this place, machine or network fit for a job? Measured before it begins, with advice.

In: URLs, folders, the machine. Out: findings as values. It may not change anything it does not remove again, nor know
torch or the command line.
"""
