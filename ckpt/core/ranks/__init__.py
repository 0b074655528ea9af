"""How do ranks agree, and pass bytes on to each other?

In: a `World` and what this rank says. Out: what all have said, by deadlines, and bytes that one has read for many. It
never uses a collective; it may not know what is agreed on.
"""
