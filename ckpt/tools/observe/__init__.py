"""Observe a run: its goodput, report and metrics."""
