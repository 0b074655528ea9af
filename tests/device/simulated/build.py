"""Compile the device for the installed torch, once for all processes of this machine with the same torch."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
NAME = "simulated_core"
FLAGS = ("-O1", "-fPIC", "-shared", "-std=c++20", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")
# A request for the system's CUDA runtime library loads the device, which implements the needed part.
SONAME = "libcudart.so.13"


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def why_not() -> str:
    """Return why no device is possible here, or ""."""
    if _place().exists() or compiler() is not None:
        return ""
    return "a simulated device has to be compiled: install g++"


def library() -> Path:
    """Return the path of the compiled device. Concurrent callers share one build."""
    place = _place()
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{place.parent} belongs to another user, so it is not safe to load from")
    with open(place.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            _compile(place)
    return place


@functools.cache
def _place() -> Path:
    digest = hashlib.sha256(" ".join((*FLAGS, SONAME, importlib.metadata.version("torch"), str(_torch()))).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    folder = Path(tempfile.gettempdir(), f"everystep-simulated-{os.getuid()}")
    return folder / f"{digest.hexdigest()[:16]}.so"


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _compile(place: Path) -> None:
    torch, made = _torch(), place.with_suffix(f".{os.getpid()}")
    headers = (torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    command = [
        compiler() or "g++", *FLAGS, *(f"-I{one}" for one in headers), str(SOURCES / "device.cpp"), "-o", str(made),
        f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
        f"-Wl,-rpath,{torch / 'lib'}", f"-Wl,-soname,{SONAME}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the simulated device cannot be compiled:\n{done.stderr[-4000:]}")
        os.replace(made, place)
    finally:
        made.unlink(missing_ok=True)
