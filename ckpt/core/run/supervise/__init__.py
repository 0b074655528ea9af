"""Finds or starts the writer of this trainer, tracks what it holds, and replaces it if it dies.

In: requests from other parts of the trainer. Out: replies of the current writer, even if it was replaced since, and the
error if another job owns the run. This package does not depend on the state or the training.

`writer_link`: a connection, and the current writer. `opening`: find or start a writer, open the run. `memory`: arenas.
`writes`: layouts, writes and acknowledgements. `writer_supervisor`: all of these, and the replacement of a dead writer.
"""
