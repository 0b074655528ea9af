"""Convert checkpoints to files of other libraries, and back.

Input: origins (runs, safetensors, torch files, DCP folders). Output: planned files, or a run, in a format of `forms`.
It executes no code from its input, and imports neither trainers nor the command line.
"""
