"""Agreement between ranks (`world`), orders of saves (`orders`), and transfer of bytes between ranks (`transfer`).

In: a `World` and the values that this rank posts. Out: the values that all ranks post, with deadlines, and bytes that
one rank has read for others. This package never uses a collective, and does not depend on the subject of an agreement.
"""
