"""What is a fault, and how is it seen? Signals, notices of preemption, hangs, memory pressure, probes of a process.

In: the machine and the processes on it (each cloud's notice is a feed in `preemption`). Out: `Fault`, `Notice`,
`Evidence`, as values. What is done about them is the trainer's and the writer's business; this may not know either, nor
torch.
"""
