"""Detects faults of a training, and reacts to them.

The guard runs in the training process and in the writer's process. It imports the core, and the core does not
import it: `ckpt.checkpointer` creates a `FaultHandler` and passes the session's parts to it. A fault is handled in four
    steps:

    detect  ->  have the newest state saved  ->  report  ->  end the process, if the trigger requests it

**Detect.** `perceive` receives signals (`signals`), preemption notices and time limits (`preemption`), and the writer's
notes about the trainer. `FaultHandler.exception` is called when an exception leaves the training loop. Each fault is
put into a queue as a `FaultCall` (`incidents`). One thread handles the calls in order, and waits for the main thread
only with a deadline.

**Save.** The guard calls the core through one class, `ckpt.core.run.closing.EmergencySaver`:

    outcome = emergency.request_save(why, deadline, far=..., leaving=..., hung=..., loop_ended=...)

The core decides which step is saved and how. Either the ranks agree on a step that all training loops save, or the
writer makes the contents of memory durable. `Outcome` has the steps, their tiers and times. Without a deadline, the
save may take any time. The guard passes the facts that only it has: the process ends (`leaving`), the machine may
disappear (`far`), a training loop hangs (`hung`), or the calling thread trained and makes no further step
(`loop_ended`). It also calls `give_memory_back` if the host is short of memory, and `await_copy` before the exit.

**Report.** `report.Fault` is one rank's report of one fault. It has the detected fault, the step of every rank, the
saved steps, and the advice to the launcher. It goes to the writer, the log, the launcher, subscribers and `on_fault`.
For a hang, `look_around` adds the activity of every rank (`probe`, `hang`).

**End.** `incidents.leave` ends the process from any thread, with an exit code for the launcher. The process continues
if another signal handler, installed later, handles the signal, or if a hang has ended.

The core uses two members of the guard, through the protocol `ckpt.core.run.closing.Guard`: closing stops the guard
after the last save and before memory is released, and checks whether an exception ended the training. The writer
sends faults of earlier job attempts as plain JSON, and `Checkpointer` converts them to `Fault`s.

In the writer's process, `watchdog` and `fault_reports` watch the trainer and report its death, through the protocol
`ckpt.core.writer.life.TrainerWatch`. `ckpt.writer_process` connects them with the core's writer.
"""
