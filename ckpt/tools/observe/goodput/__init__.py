"""Account for the time of a run: timeline, breakdown, plan.

The input is the run metrics of trainers and writers. The output is numbers as plain values. The package does not depend
on the storage of metrics, on its callers, or on torch.
"""
