"""What tells how a run does: its goodput, its report, its metrics."""
