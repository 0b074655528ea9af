"""Which writer does this trainer have, what does it hold, and what happens if it dies?

In: requests of the other parts of a trainer. Out: replies of the current writer, whichever it is by then, and the error
if another job owns the run. It knows nothing of the state and of training.

`writer_link`: a connection, and the current writer. `opening`: find or start a writer, open the run. `memory`: arenas.
`writes`: layouts, writes and acknowledgements. `writer_supervisor`: all of these, and the replacement of a dead writer.
"""
