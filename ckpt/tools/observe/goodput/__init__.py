"""Where did the time of a run go? Timeline, breakdown, plan.

In: the ledgers of trainers and writers. Out: figures, as pure values. It may not know where a ledger is stored, who
asks, or torch.
"""
