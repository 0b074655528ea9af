"""Maintain a whole run without a training job: audit, repair, prune, copy.

The input is runs in stores; the output is plans to show, and results. Training does not import this package. It imports
neither torch nor the command line.
"""
