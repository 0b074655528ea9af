"""What is a fault, how is it seen, and what does it trigger?

The guard watches a training from its own process and from the writer's. It lies above the core, which does not know it:
`ckpt.checkpointer` makes a `FaultHandler` and gives it the session's parts. On a fault it does four things, in order:

    detect  ->  have the newest state saved  ->  report  ->  end the process, if the trigger says so

**Detect.** `perceive` receives signals (`signals`), notices of preemption and time limits (`preemption`), and what the
writer sees of the trainer. `FaultHandler.exception` is called when an exception leaves the training loop. Each fault is
a `FaultCall` in a queue (`incidents`). One thread deals with one call after the other and never waits for the main
thread without a deadline.

**Save.** The guard has one port into the core, `ckpt.core.run.out_of_turn.OutOfTurn`:

    outcome = out_of_turn.request_save(why, deadline, far=..., leaving=..., hung=..., loop_ended=...)

The core decides what is saved and how: the ranks agree on a step that all training loops save, or the writer makes
durable what is in memory. `Outcome` has the steps, where they are, and when they arrived. With no deadline nobody is in
a hurry. The guard adds what it alone knows: whether the process ends (`leaving`), whether the machine may go (`far`),
whether a training loop stands still (`hung`), and whether this thread trained and comes to no further step
(`loop_ended`). Two more calls of the same object belong to it: `give_memory_back` if the host is short of memory, and
`await_copy` before the process ends.

**Report.** `report.Fault` is one rank's account of one fault: what was seen, where every rank stood, what was saved,
and what the launcher should do. It goes to the writer, the log, the launcher, subscribers and `on_fault`. For a hang,
`look_around` adds what every rank does (`probe`, `hang`).

**End.** `incidents.leave` ends the process from any thread, with an exit code that the launcher understands. If a
handler that came later takes the signal, or a hang has dissolved, the process goes on.

The core uses two members of the guard, by the protocol `ckpt.core.run.closing.Guard`: closing stops the guard after the
last save and before it lets go of memory, and asks it whether an exception has ended the training. Faults of earlier
starts come from the writer as plain JSON; `Checkpointer` makes `Fault`s of them.

In the writer's process, `watchdog` and `fault_reports` watch the trainer and report its death, behind the protocol
`ckpt.core.writer.watch`. `ckpt.writer_process` puts them together with the core's writer.
"""
