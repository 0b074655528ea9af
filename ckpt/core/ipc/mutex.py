"""A robust, process-shared mutex: how a death is noticed at once.

When a thread that holds it dies, however it dies, the kernel hands the mutex to a waiter together with the news
(EOWNERDEAD), before it takes the process's memory apart. Measured: 0.1-5 ms after SIGKILL at any size, where a pidfd or
the end of a pipe came 1.8 s late at 3 GB of resident memory.

Through glibc by ctypes: Python has no such lock. The mutex lives in shared memory that both processes map.
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
_KIND = 16  # where glibc keeps the kind of a mutex, on 64-bit machines
_OWNER = 0x3FFFFFFF  # of its first word: the number of the thread that holds it

_libc = ctypes.CDLL(None)  # releases the GIL while it waits


class Got(Enum):
    """How a lock was obtained: from nobody, or from an owner that died holding it."""

    FREE = "free"
    OWNER_DIED = "owner died"
    BUSY = "busy"


class RobustMutex:
    """At `offset` of a shared mapping. Must be unlocked by the thread that locked it, before the mapping goes."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._anchor = ctypes.c_char.from_buffer(memory, offset)  # keeps the mapping alive
        self._address = ctypes.c_void_p(ctypes.addressof(self._anchor))

    def initialise(self) -> None:
        """Once, by whoever creates the memory."""
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._address, attributes))

    def is_sound(self) -> bool:
        """Return False if the memory was damaged so that it is not a mutex of this kind any more. glibc must not see
        such a one: it would end the process."""
        return self._word(_KIND) == _sound_kind()

    def is_orphaned(self) -> bool:
        """Return True if a thread holds it, by its number, that does not exist: nobody will ever unlock it. The kernel
        hands over what a thread leaves locked before it takes the thread away, so the memory was damaged."""
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
            _check(_libc.pthread_mutex_consistent(self._address))  # ours now, and usable again
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
