"""The report page of a run, as one HTML file.

The input is statements and chronicles as values; the output is text and SVG. The package reads no stores, and imports
neither torch nor the command line.
"""
