"""A robust, process-shared mutex, which detects the death of a process within milliseconds.

When a thread dies while it owns the mutex, for any reason, the kernel gives the mutex to a waiter and reports the death
(EOWNERDEAD), before it frees the memory of the process. Measured delay after SIGKILL: 0.1-5 ms at any size. With 3 GB
of resident memory, a pidfd or the end of a pipe reported the death 1.8 s later.

It uses glibc through ctypes, because Python has no such lock. The mutex is in shared memory that both processes map.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from enum import Enum
from functools import lru_cache

from ckpt.core.ipc.process import number_in_proc

_SHARED = 1
_ROBUST = 1
_KIND = 16  # offset of the kind in a glibc mutex, on 64-bit machines
_OWNER = 0x3FFFFFFF  # mask of its first word: the number of the owning thread

_libc = ctypes.CDLL(None)  # releases the GIL while it waits


class Got(Enum):
    """The result of a lock: it was free, its owner died, or it is busy."""

    FREE = "free"
    OWNER_DIED = "owner died"
    BUSY = "busy"


class RobustMutex:
    """A mutex at `offset` of a shared mapping. The thread that locked it must unlock it, before the mapping ends."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._anchor = ctypes.c_char.from_buffer(memory, offset)  # keeps the mapping alive
        self._address = ctypes.c_void_p(ctypes.addressof(self._anchor))

    def initialise(self) -> None:
        """Initialize the mutex, once, in the process that creates the memory."""
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._address, attributes))

    def is_sound(self) -> bool:
        """Return False if damage to the memory has changed the kind of the mutex. glibc must not use such a mutex,
        because it would end the process."""
        return self._word(_KIND) == _sound_kind()

    def is_orphaned(self) -> bool:
        """Return True if the owning thread does not exist, so that it will never be unlocked. Then the memory was
        damaged, because the kernel releases the mutexes of a dying thread before it removes the thread."""
        if number_in_proc(os.getpid()) != os.getpid():
            return False  # /proc belongs to another PID namespace: it lists threads under other numbers
        owner = self._word(0) & _OWNER
        return bool(owner) and not os.path.exists(f"/proc/{owner}") and owner == self._word(0) & _OWNER

    def _word(self, offset: int) -> int:
        return ctypes.c_uint32.from_address((self._address.value or 0) + offset).value

    def lock(self) -> Got:
        """Wait until the owner unlocks or dies."""
        return self._got(_libc.pthread_mutex_lock(self._address))

    def try_lock(self) -> Got:
        return self._got(_libc.pthread_mutex_trylock(self._address))

    def unlock(self) -> None:
        _check(_libc.pthread_mutex_unlock(self._address))

    def _got(self, code: int) -> Got:
        if code == errno.EBUSY:
            return Got.BUSY
        if code == errno.EOWNERDEAD:
            _check(_libc.pthread_mutex_consistent(self._address))  # this thread owns it now, and it is usable again
            return Got.OWNER_DIED
        _check(code)
        return Got.FREE


@lru_cache(1)
def _sound_kind() -> int:
    mutex = RobustMutex(mmap.mmap(-1, mmap.PAGESIZE), 0)
    mutex.initialise()
    return mutex._word(_KIND)


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code), "robust mutex")
