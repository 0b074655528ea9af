"""S3 and compatible stores: s3://bucket/prefix.

botocore configures credentials, endpoint, region and profile in its usual ways, or s3fs' `storage_options` do.
Requests use the client of s3fs without its retries, because only `ckpt_backends.retry` handles lost responses. This
module splits uploads into parts, because s3fs would hold the whole object in memory.

A commit is one conditional PUT. Large objects are written without a check, because their names are unique. If obstore
is installed, data files use it (`ckpt_backends.obstore`), because it takes a fraction of the CPU time.

Directory buckets (S3 Express, `s3://NAME--ZONE--x-s3`) are supported. They have conditional PUTs, and botocore creates
their sessions. They list keys unordered, and only under prefixes that end in "/".
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiobotocore.httpsession import AIOHTTPSession
from botocore import exceptions as boto

from ckpt.errors import AccessError, CorruptError, NotFoundError, StoreError, TruncatedError, UsageError
from ckpt.store import Buffer, ObjectInfo, Upload, check_key, check_prefix
from ckpt.units import count_of
from ckpt_backends.refusals import GoneError, OutOfRangeError, UnknownRequestError, refusal
from ckpt_backends.remote import RemoteStore
from ckpt_backends.s3_upload import S3Upload, body_of

if TYPE_CHECKING:
    from ckpt_backends.obstore import DataPath

DELETES = 1000  # maximum keys in one DeleteObjects request, a limit of S3
CONNECT_S, READ_S = 10, 60
CONNECTIONS = 32
Unfinished = list[tuple[str, str]]  # key and id of each upload
ENGINES = (None, "obstore", "s3fs")
_REFUSED = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError, boto.ProfileNotFound,
    boto.TokenRetrievalError, boto.SSOError, boto.NoAuthTokenError, boto.MetadataRetrievalError,
)  # fmt: skip
_PASSING = (
    boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, boto.ChecksumError,
    boto.FlexibleChecksumError,
)  # fmt: skip


class OneAttempt(AIOHTTPSession):  # type: ignore[misc]
    """Connections without aiohttp's automatic retries. When a reused connection breaks, aiohttp would send a PUT again
    unnoticed. A conditional PUT that had succeeded would then fail, because its object exists."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


class S3Store(RemoteStore):
    """Implements `ckpt.store.Store`. The additional option `engine` selects "obstore" or "s3fs" for data files."""

    in_flight = 256 << 20  # maximum bytes in flight of one upload

    def __init__(self, url: str, *, writable: bool = False) -> None:
        super().__init__(url, writable=writable)
        self._s3: Any = None
        self._data: DataPath | None = None
        self._bulk = True
        bucket, _, prefix = self._root.partition("/")
        if not bucket:
            raise UsageError(f"{url} has no bucket: use s3://BUCKET/FOLDER")
        if self._root.startswith("arn:"):  # the ARN of an access point contains either a slash or only colons
            bucket, prefix = self._class(asynchronous=True, skip_instance_cache=True)._find_bucket_key(self._root)
        self.bucket, self.prefix = bucket, f"{prefix}/" if prefix else ""
        self.engine = self._engine()

    def _engine(self) -> str:
        """Return the name of the library for data files: obstore if it is installed and supports the options."""
        config = self.options.get("config_kwargs") or {}
        hindered = [
            name
            for name, given in {
                "s3_additional_kwargs": self.options.get("s3_additional_kwargs"),
                "requester_pays": self.options.get("requester_pays"),
                "signature_version": config.get("signature_version"),
                "proxies": config.get("proxies"),
                "client_cert": config.get("client_cert"),
                "an access point": self.bucket.startswith("arn:"),
                "a directory bucket": self.bucket.endswith("--x-s3"),
            }.items()
            if given
        ]
        if self.engine not in ENGINES:
            raise UsageError(f"engine={self.engine!r}: it must be 'obstore' or 's3fs'")
        installed = importlib.util.find_spec("obstore") is not None
        if self.engine == "obstore" and hindered:
            raise UsageError(f"obstore does not support {', '.join(hindered)}: remove engine=")
        if self.engine == "obstore" and not installed:
            raise UsageError("engine='obstore' needs a package: pip install everystep[obstore]")
        return self.engine or ("obstore" if installed and not hindered else "s3fs")

    # -- small objects --

    async def put(self, key: str, data: Buffer, *, create: bool = False) -> None:
        condition = {"IfNoneMatch": "*"} if create else {}
        await self.call("put_object", f"cannot store {key}", Key=self.name(key), Body=body_of(data), **condition)

    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        limit: int | None = None,
    ) -> memoryview:
        if length == 0:
            return await self._nothing(key, start)
        await self.connected()
        if length is None and start == 0:
            return await self._get_whole(key, limit)
        if length is None:
            length = (await self.head(key)).size - start
            if length <= 0:
                return await self._nothing(key, start)
        if self._data is not None and self._data.ranges:
            with contextlib.suppress(UnknownRequestError):
                return await self._data.get(key, start, length)
            self._data.ranges = False
        return await self._get_range(key, start, length)

    async def _nothing(self, key: str, start: int) -> memoryview:
        """Return no bytes, because HTTP has no empty range. Raise TruncatedError if the object ends before `start`."""
        size = (await self.head(key)).size
        if start > size:
            raise TruncatedError(f"{key} has {size} bytes and ends before byte {start}")
        return memoryview(b"")

    async def _get_whole(self, key: str, limit: int | None) -> memoryview:
        what = f"cannot read {key}"
        answer = await self.call("get_object", what, Key=self.name(key))
        size = int(answer["ContentLength"])
        if limit is not None and size > limit:
            answer["Body"].close()  # close the connection, because the body is not read
            raise CorruptError(f"{key} is implausibly large: {size} bytes")
        data = await self._body_of(answer, what)
        if len(data) != size:
            raise StoreError(f"{key} ended early, at {len(data)} of {size} bytes", retryable=True)
        return memoryview(data)

    async def _get_range(self, key: str, start: int, length: int) -> memoryview:
        what = f"cannot read {key}"
        wanted = f"bytes={start}-{start + length - 1}"
        try:
            answer = await self.call("get_object", what, Key=self.name(key), Range=wanted)
        except OutOfRangeError:
            raise await self.short(key, start, length, 0) from None
        if int(answer["ContentLength"]) > length:
            answer["Body"].close()
            raise StoreError(f"{what}: more bytes arrived than requested: the server does not seem to support ranges")
        data = await self._body_of(answer, what)
        if len(data) != length:
            raise await self.short(key, start, length, len(data))
        return memoryview(data)

    async def _body_of(self, answer: Any, what: str) -> bytes:
        with self.errors(what):
            async with answer["Body"] as body:
                data: bytes = await body.read()
        return data

    async def head(self, key: str) -> ObjectInfo:
        answer = await self.call("head_object", f"cannot inspect {key}", Key=self.name(key))
        return ObjectInfo(key, int(answer["ContentLength"]))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        folder, more = self.prefix + check_prefix(prefix), dict[str, str]()
        while True:
            answer = await self.call("list_objects_v2", f"cannot list {prefix or 'everything'}", Prefix=folder, **more)
            for found in answer.get("Contents", ()):
                key = str(found["Key"]).removeprefix(self.prefix)
                if key:  # skip the marker of the folder itself
                    yield ObjectInfo(key, int(found["Size"]))
            token = answer.get("NextContinuationToken")
            if not answer.get("IsTruncated") or not token:
                return
            if more.get("ContinuationToken") == token:
                raise StoreError(f"cannot list {self.url}: the server returns the same page repeatedly")
            more = {"ContinuationToken": token}

    async def delete(self, key: str) -> None:
        with contextlib.suppress(NotFoundError):
            await self.call("delete_object", f"cannot delete {key}", Key=self.name(key))

    async def delete_many(self, keys: Sequence[str]) -> None:
        names = [self.name(key) for key in keys]
        for first in range(0, len(keys), DELETES):
            if self._bulk:
                self._bulk = await self._delete_batch(names[first : first + DELETES])
            if not self._bulk:
                await self.in_parallel(self.delete, keys[first : first + DELETES])

    async def _delete_batch(self, names: Sequence[str]) -> bool:
        """Delete a batch. Return False, with nothing deleted, if the server does not support this request."""
        what = f"cannot delete {count_of(len(names), 'object')}"
        objects = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            answer = await self.call("delete_objects", what, Delete=objects)
        except UnknownRequestError:
            return False
        errors = [
            error for error in answer.get("Errors", ()) if error.get("Code") not in ("NoSuchKey", "NoSuchVersion")
        ]
        for error in errors:  # a response with status 200 may still list objects that were not deleted
            code, message = str(error.get("Code", "")), str(error.get("Message", ""))
            text = self.clean(f"cannot delete {error.get('Key')} in {self.url}: {code} {message}".rstrip())
            raise refusal(code, 0, f"{text} ({len(errors)} like it)")
        return True

    # -- large objects --

    async def upload(self, key: str, *, size: int, replace: bool = False) -> Upload:
        """Begin an upload without checking whether the object exists, because names of data files are unique."""
        check_key(key)
        await self.connected()
        if self._data is not None and size:
            return self._data.upload(key, size, replace=replace)
        upload = S3Upload(self, key, size, replace=replace)
        await upload.begin()
        return upload

    async def drop_uploads(self, wanted: Callable[[str], bool]) -> int:
        dropped = 0
        for key, upload_id in await self.unfinished():
            if not wanted(key):
                await self.drop(key, upload_id)
                dropped += 1
        return dropped

    async def unfinished(self, prefix: str = "") -> Unfinished:
        """Return the key and id of each upload under the root that was begun, but neither finished nor aborted."""
        found: Unfinished = []
        more: dict[str, str] = {}
        while True:
            try:
                answer = await self.call(
                    "list_multipart_uploads", "cannot list uploads", Prefix=self.prefix + prefix, **more
                )
            except UnknownRequestError:
                return []
            for upload in answer.get("Uploads", ()):
                name = str(upload["Key"])
                if name.startswith(self.prefix + prefix):
                    found.append((name.removeprefix(self.prefix), str(upload["UploadId"])))
            following = {"KeyMarker": answer.get("NextKeyMarker"), "UploadIdMarker": answer.get("NextUploadIdMarker")}
            following = {name: value for name, value in following.items() if value}
            if not answer.get("IsTruncated") or not following or following == more:
                return found
            more = following

    async def drop(self, key: str, upload_id: str) -> None:
        """Abort one upload. Do nothing if it does not exist."""
        with contextlib.suppress(NotFoundError, GoneError):
            await self.call("abort_multipart_upload", f"cannot drop {key}", Key=self.prefix + key, UploadId=upload_id)

    # -- the driver --

    def name(self, key: str) -> str:
        return self.prefix + check_key(key)

    async def call(self, method: str, what: str, **arguments: Any) -> Any:
        """Send one request without retries. Add `s3_additional_kwargs` and `requester_pays` if the method supports
        them."""
        with self.errors(what):
            fs = await self.connected()
            function = getattr(self._s3, method)
            arguments["Bucket"] = self.bucket
            return await function(**fs._get_s3_method_kwargs(function, fs.req_kw, **arguments))

    async def _connect(self) -> Any:
        fs = self._class(**self._patient(), asynchronous=True, skip_instance_cache=True)
        with self.errors("cannot connect"):
            try:
                await fs.set_session()
            except TypeError as error:  # s3fs passes an unknown option on to the botocore session, which rejects it
                raise UsageError(
                    "storage_options have an option that s3fs does not support: "
                    f"{str(error).partition('()')[2].strip()}. "
                    "It supports key, secret, token, profile, anon, endpoint_url, client_kwargs, config_kwargs, "
                    "s3_additional_kwargs and more"
                ) from None
            try:
                self._s3 = await fs.get_s3(self.bucket)
                self._s3.meta.events.register("before-call.s3.HeadBucket", _do_not_redirect)
                if self.engine == "obstore":
                    from ckpt_backends.obstore import DataPath

                    self._data = await DataPath.of(self, fs, self._s3)
            except BaseException:
                await fs._s3creator.__aexit__(None, None, None)
                raise
        return fs

    @property
    def endpoint(self) -> str:
        """Return the endpoint. Before the first connection, only an endpoint in the options is known."""
        return super().endpoint if self._s3 is None else self.clean(str(self._s3.meta.endpoint_url))

    def _patient(self) -> dict[str, Any]:
        """Return the user's options with this module's default timeouts and without retries."""
        config: dict[str, Any] = {
            "connect_timeout": CONNECT_S,
            "read_timeout": READ_S,
            "max_pool_connections": CONNECTIONS,
            "http_session_cls": OneAttempt,
        }
        for name in ("request_checksum_calculation", "response_checksum_validation"):
            if f"AWS_{name.upper()}" not in os.environ:  # everystep has its own digests; many servers support none
                config[name] = "when_required"
        config |= self.options.get("config_kwargs") or {}
        config["retries"] = {**(config.get("retries") or {}), "mode": "standard", "total_max_attempts": 1}
        return {**self._quiet(), "config_kwargs": config}

    async def aclose(self) -> None:
        fs, self._fs, self._s3, self._data = self._fs, None, None, None
        if fs is not None:
            await fs._s3creator.__aexit__(None, None, None)

    def translated(self, error: Exception, what: str) -> StoreError:
        if isinstance(error, boto.ClientError):
            return self._answered(error, what)
        text = self.clean(f"{what}: {error}")
        if isinstance(error, _REFUSED):
            return AccessError(
                f"{text}. Configure credentials: AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a role,"
                " or storage_options={'key': ..., 'secret': ...}; {'anon': True} for a public bucket"
            )
        if isinstance(error, boto.SSLError):
            return AccessError(f"{text}. Set AWS_CA_BUNDLE to a file with the certificates to trust")
        if isinstance(error, (boto.ParamValidationError, boto.InvalidRegionError)):
            return AccessError(f"{text}. Correct the URL or the region")
        if isinstance(error, _PASSING) or type(error).__name__ == "ResponseParserError":
            return StoreError(text, retryable=True)
        return super().translated(error, what)

    def _answered(self, error: Any, what: str) -> StoreError:
        details, meta = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        code, status = str(details.get("Code", "")), int(meta.get("HTTPStatusCode", 0))
        if code.isdigit():  # the response to a HEAD has no body, so botocore uses the HTTP status as the error code
            code, status = "", status or int(code)
        text = self.clean(f"{what}: {code or status} {details.get('Message', '')}".rstrip())
        region = meta.get("HTTPHeaders", {}).get("x-amz-bucket-region")
        if region and status in (301, 307, 400):
            text += f" (the bucket is in {region})"
            code = code or "PermanentRedirect"
        return refusal(code, status, text)


def _do_not_redirect(context: dict[str, Any], **_: Any) -> None:
    """Stop botocore from following redirects. It would query the bucket's region first, and loop forever if the query
    is redirected as well."""
    context.setdefault("s3_redirect", {})["redirected"] = True
