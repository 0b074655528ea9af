"""How does torch's distributed checkpoint save into a run, and load from one? As its storage writer and reader.

In: its plans. Out: checkpoints as of any other run. torch's planners stay in charge of who saves and reads what.
"""

from ckpt.dcp.storage import StorageReader as StorageReader
from ckpt.dcp.storage import StorageWriter as StorageWriter
from ckpt.dcp.storage import latest as latest
from ckpt.dcp.storage import step_of as step_of

__all__ = ["StorageReader", "StorageWriter", "latest"]
