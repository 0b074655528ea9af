"""Defines the format of the files on disk: names, layouts, tables, the rank index, codecs, digests and plain values.

In: values and buffers. Out: the same as bytes, and back, or CorruptError and FormatError. All code here is pure. It
does not know stores, processes, other ranks, or torch. `saved_state` decides whose values a rank restores, and
`saved_nodes` joins the entries of several ranks. docs/format.md documents the format for users.
"""
