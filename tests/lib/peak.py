"""Measures the peak memory of a process."""

from __future__ import annotations

PEAK = """
import re, sys
from ckpt.tools.cli import main
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(status)
"""
