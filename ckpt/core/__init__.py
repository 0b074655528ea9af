"""What a run, a snapshot and a checkpoint are: everything from `step()` to the commit, and back."""
