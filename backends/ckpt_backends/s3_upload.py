"""Multipart uploads of large objects to S3."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from ckpt.store import Buffer
from ckpt_backends.remote_upload import PART, RemoteUpload, check_complete

if TYPE_CHECKING:
    from ckpt_backends.s3 import S3Store

MAX_PARTS = 10_000


def part_size(size: int) -> int:
    """Return a part size in bytes, in whole MiB, with which the number of parts does not exceed S3's limit."""
    mib = 1 << 20
    return max(PART, -(-size // MAX_PARTS // mib) * mib)


def body_of(data: Buffer) -> Any:
    """Return a request body for botocore, with at most one copy of the data."""
    return data if isinstance(data, bytes) and len(data) < 1 << 20 else io.BytesIO(data)


class S3Upload(RemoteUpload):
    """A multipart upload. Parts may be written in any order and several at a time. Each call may be repeated after an
    error. That includes `finish`: if its response was lost, the object exists already."""

    _store: S3Store

    def __init__(self, store: S3Store, key: str, size: int, *, replace: bool = False) -> None:
        super().__init__(store, key, size, part_size(size), replace=replace)
        self.resumable = True
        self._id = ""
        self._parts: dict[int, tuple[int, dict[str, Any]]] = {}

    async def begin(self) -> None:
        """Create a multipart upload, if the object has several parts."""
        if not self.keeps:
            name = self._store.name(self._key)
            answer = await self._store.call("create_multipart_upload", f"cannot begin {self._key}", Key=name)
            self._id = answer["UploadId"]

    async def _send(self, offset: int, view: memoryview) -> None:
        number = offset // self.part + 1
        answer = await self._store.call(
            "upload_part",
            f"cannot write part {number} of {self._key}",
            Key=self._store.name(self._key),
            UploadId=self._id,
            PartNumber=number,
            Body=body_of(view),
        )
        sums = {name: value for name, value in answer.items() if re.fullmatch("Checksum(CRC|SHA).*", name)}
        self._parts[number] = (len(view), {"ETag": answer["ETag"], "PartNumber": number, **sums})

    async def _complete(self) -> None:
        check_complete(self._key, sum(length for length, _ in self._parts.values()), self._size)
        parts = [self._parts[number][1] for number in sorted(self._parts)]
        answer = await self._once.run(
            lambda: self._store.call(
                "complete_multipart_upload",
                f"cannot finish {self._key}",
                Key=self._store.name(self._key),
                UploadId=self._id,
                MultipartUpload={"Parts": parts},
            )
        )
        if answer is not None and not answer.keys() & {"ETag", "Key", "Location"}:  # status 200, but without a result
            await self._once.check()

    async def _drop(self) -> None:
        if self._id:
            await self._store.drop(self._key, self._id)
