"""Account for the time of a run: timeline, breakdown, plan.

Input: the run metrics of trainers and writers. Output: numbers, as pure values. It does not depend on where metrics are
stored, on its callers, or on torch.
"""
