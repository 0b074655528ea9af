"""What CUDA's runtime library can and torch does not offer: a thread whose waiting spoils no capture, a stream of one's
own.

Called by ctypes, in the library that torch itself has loaded. Where that does not have it (ROCm, other accelerators),
there is neither.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import Any

import torch

RELAXED = 2  # cudaStreamCaptureModeRelaxed
NON_BLOCKING = 1  # cudaStreamNonBlocking: the default stream does not wait for it, nor it for that one
LOWEST = 0  # of priorities: other streams come first
NEEDED = ("cudaThreadExchangeStreamCaptureMode", "cudaStreamCreateWithPriority")


@cache
def _library() -> Any:
    """None if there is none. Looked for among what the process has loaded, then beside it."""
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (None, f"libcudart.so.{major}") if torch.version.hip is None else ():
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(name)
            if all(hasattr(found, function) for function in NEEDED):
                return found
    return None


def relax_capture() -> None:
    """While another thread captures a graph in the usual mode, a call of this thread that waits would fail, and spoil
    the graph. Not after this: nothing that this thread does belongs into anybody's graph."""
    library = _library()
    if library is not None:
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))


def new_stream(device: torch.device) -> Any:
    """A stream that torch gives to nobody else: its own come from a pool of 32, in turn, and a collective that hangs
    may sit on any of these. Where that is not to be had, one of torch's."""
    library = _library() if device.type == "cuda" else None
    handle = ctypes.c_void_p()
    if library is not None:
        with torch.cuda.device(device):
            if library.cudaStreamCreateWithPriority(ctypes.byref(handle), NON_BLOCKING, LOWEST) == 0:
                return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]
    return torch.get_device_module(device).Stream(device)
