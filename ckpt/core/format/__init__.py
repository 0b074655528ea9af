"""What does every byte on disk mean? Names, layouts, tables, the rank index, codecs, digests and plain values.

In: values and buffers. Out: the same as bytes, and back, or CorruptError and FormatError. All of it is pure: it may not
know a store, a process, a rank's peers, or torch. `saved_state` says whose values a rank takes back, `saved_nodes`
how what several ranks say of one entry is joined. docs/format.md says the same to strangers.
"""
