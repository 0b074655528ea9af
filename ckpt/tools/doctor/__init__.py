"""Check before a job whether its locations, machine and network are fit for it, and give advice.

Input: URLs, folders, the machine. Output: findings as values. It changes nothing permanently, and imports neither torch
nor the command line.
"""
