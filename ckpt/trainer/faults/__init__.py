"""What does the trainer do about what befalls it?

In: signals, notices, exceptions, requests, what the writer sees. Out: a state that is safe, an account of the fault,
and the end of the process if that is called for. It never waits for the main thread without a deadline, and touches a
run only by `LiveRun` and the supervisor of its writer.
"""
