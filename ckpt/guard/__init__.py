"""What is a fault, and how is it seen? Signals, notices of preemption, hangs, memory pressure, probes of a process.

In: the machine and the processes on it (each cloud's notice is a feed in `preemption`). Out: `Fault`, `Notice`,
`Evidence`, as values. `fault_handler` acts on them in the trainer; `watchdog` and `fault_reports` watch the trainer
from its writer and report its death. They know the core, which does not know them.
"""
