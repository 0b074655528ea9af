"""What does a run look like over time, for people? One page, as a file of HTML.

In: statements and chronicles, as values. Out: text and SVG. It may not read stores, nor know torch or the command line.
"""
