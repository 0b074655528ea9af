"""The stores for folders and buckets, one file each. `ckpt.store.Store` is the contract."""
