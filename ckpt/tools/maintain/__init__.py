"""Maintain a whole run without a training job: audit, repair, prune, copy.

Input: runs in stores. Output: plans to show, and results. Training does not import it; it imports neither torch nor the
command line.
"""
