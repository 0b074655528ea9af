"""A storage writer and reader for torch's distributed checkpoint (DCP) that save into everystep runs.

The input is DCP's plans; the output is checkpoints like those of any other run. torch's planners decide which rank
saves and reads which tensors.
"""

from ckpt.dcp.storage import StorageReader as StorageReader
from ckpt.dcp.storage import StorageWriter as StorageWriter
from ckpt.dcp.storage import latest as latest
from ckpt.dcp.storage import step_of as step_of

__all__ = ["StorageReader", "StorageWriter", "latest"]
