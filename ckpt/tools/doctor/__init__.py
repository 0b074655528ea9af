"""Check before a job whether its locations, machine and network are suitable, and give advice.

The input is URLs, folders and the machine; the output is findings as values. The checks change nothing permanently. The
package imports neither torch nor the command line.
"""
