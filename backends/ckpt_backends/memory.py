"""A store in this process's memory, for tests and experiments. Listings are shuffled, so that tests fail if code relies
on their order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from random import SystemRandom

from ckpt.errors import CorruptError, ExistsError, NotFoundError, StoreError, TruncatedError
from ckpt.store import Buffer, ObjectInfo, check_key, check_prefix

_DICE = SystemRandom()  # a separate generator, so the random state of the training does not change


class MemoryStore:
    """Implements `ckpt.store.Store`. Each instance is a separate store. `objects` maps keys to bytes."""

    remote = False

    def __init__(
        self, url: str = "memory://", *, writable: bool = False, objects: dict[str, bytes] | None = None
    ) -> None:
        self.url = url
        self.objects: dict[str, bytes] = {} if objects is None else objects

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        if create and key in self.objects:
            raise ExistsError(f"{key} exists")
        self.objects[check_key(key)] = bytes(data)

    async def upload(self, key: str, *, size: int, replace: bool = False) -> MemoryUpload:
        if key in self.objects and not replace:
            raise ExistsError(f"{key} exists")
        return MemoryUpload(self, check_key(key), size, replace=replace)

    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        limit: int | None = None,
    ) -> memoryview:
        size = (await self.head(key)).size
        if limit is not None and size > limit:
            raise CorruptError(f"{key} is implausibly large: {size} bytes")
        end = size if length is None else start + length
        if end > size or start > size:
            raise TruncatedError(f"{key} has {size} bytes, but {end} were requested")
        return memoryview(self.objects[key])[start:end]

    def scatter(self, key: str, start: int, views: Sequence[memoryview]) -> None:
        check_key(key)
        if key not in self.objects:
            raise NotFoundError(f"{key} is not in {self.url}")
        data = memoryview(self.objects[key])[start:]
        if sum(map(len, views)) > len(data):
            raise TruncatedError(f"{key} has {len(data)} bytes from {start} on, but more were requested")
        for view in views:
            view[:], data = data[: len(view)], data[len(view) :]

    async def head(self, key: str) -> ObjectInfo:
        if check_key(key) not in self.objects:
            raise NotFoundError(f"{key} is not in {self.url}")
        return ObjectInfo(key, len(self.objects[key]))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        found = [ObjectInfo(key, len(data)) for key, data in self.objects.items() if key.startswith(prefix)]
        _DICE.shuffle(found)
        for info in found:
            yield info

    async def delete(self, key: str) -> None:
        self.objects.pop(check_key(key), None)

    async def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self.delete(key)

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        return 0

    async def aclose(self) -> None:
        pass


class MemoryUpload:
    part = 0

    def __init__(self, store: MemoryStore, key: str, size: int, *, replace: bool = False) -> None:
        self._store, self._key, self._data = store, key, bytearray(size)
        self._replace = replace

    async def write_at(self, offset: int, view: memoryview) -> None:
        if offset + len(view) > len(self._data):
            raise StoreError(f"{self._key}: write beyond the declared size")
        self._data[offset : offset + len(view)] = view

    async def finish(self) -> None:
        await self._store.put(self._key, self._data, create=not self._replace)

    async def abort(self) -> None:
        self._data = bytearray()
