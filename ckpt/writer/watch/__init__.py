"""What does the writer see of the trainer, and tell?

In: the heartbeat, the kernel, what the trainer says. Out: hangs and deaths that are reported, the ledger, what
`ckpt top` and metrics show. It never touches memory or tiers.
"""
