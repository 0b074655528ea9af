"""Where did the time go, and how often should be saved? Ledger, timeline, breakdown, model, cadence.

In: what trainers and writers measured. Out: figures and decisions, as pure values. It may not know where a ledger is
stored, who asks, or torch.
"""
