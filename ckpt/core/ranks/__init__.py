"""How do ranks agree, and how do they send bytes to each other?

In: a `World` and what this rank posts. Out: what all ranks have posted, with deadlines, and bytes that one rank has
read for others. It never uses a collective, and it may not know what is agreed on.
"""
