"""Convert checkpoints to files of other libraries, and back.

The input is an origin: a run, safetensors, torch files or DCP folders. The output is planned files, or a run, in a
format of `forms`. The package executes no code from its input, and imports neither trainers nor the command line.
"""
