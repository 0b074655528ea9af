"""Places where checkpoints are kept, one file a store. The contract is `ckpt.store.Store`."""
