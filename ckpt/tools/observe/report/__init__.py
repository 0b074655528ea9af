"""The report page of a run, as one HTML file.

Input: statements and chronicles, as values. Output: text and SVG. It reads no stores, and imports neither torch nor the
command line.
"""
