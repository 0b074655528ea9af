"""How does a checkpoint become files of another library, and back?

In: origins (our runs, safetensors, torch's files, DCP). Out: planned files, or a run, in one of the forms of `forms`.
It may run nothing of what it reads; it knows no trainer and no command line.
"""
