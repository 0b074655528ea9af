"""Defines the format of the files on disk: names, layouts, tables, the rank index, codecs, digests and plain values.

The modules convert values and buffers to bytes, and bytes back to values or to CorruptError and FormatError. All code
in this package is pure: it does not use stores, processes, other ranks, or torch. `saved_state` decides whose values a
rank restores, and `values` joins the entries of several ranks. docs/format.md documents the format for users.
"""
