"""What the errors of drivers and servers mean, and how they are told without anything secret."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

from ckpt.errors import AccessError, ExistsError, FullError, NotFoundError, StoreError

_MISSING = "not there"  # not None: a driver may mean something by that


class OutOfRangeError(StoreError):
    """The object ends before the first byte that was asked for."""


class GoneError(StoreError):
    """No such upload: finished, aborted, or dropped by somebody."""


class UnknownRequestError(StoreError):
    """The server does not know this request, or not in this form."""


_ADVICE = {
    code: advice
    for codes, advice in (
        ("NoSuchBucket InvalidBucketName", "Make the bucket, or correct the URL: buckets are never made here"),
        (
            "AccessDenied AllAccessDisabled AccountProblem NotSignedUp UnauthorizedAccess",
            "Allow these credentials to list, read, write and delete there; only to read, use ckpt.load",
        ),
        ("InvalidAccessKeyId InvalidSecurity", "Check the access key, and that it belongs to this endpoint"),
        ("SignatureDoesNotMatch", "Check the secret key, and that no proxy changes requests on their way"),
        ("ExpiredToken InvalidToken ExpiredTokenException TokenRefreshRequired", "Renew the credentials"),
        ("RequestTimeTooSkewed RequestExpired", "Set the clock of this machine"),
        (
            "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException",
            "The bucket is in another region: set AWS_REGION, or client_kwargs={'region_name': ...}",
        ),
    )
    for code in codes.split()
}
_PASSING = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
    "RequestThrottled", "TooManyRequests", "BandwidthLimitExceeded", "OperationAborted", "ConditionalRequestConflict",
    "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "ServerBusy",
}  # fmt: skip
"""Worth a retry. The digest that does not fit among them: it was right when we computed it."""
_UNKNOWN = {
    "NotImplemented", "MethodNotAllowed", "MalformedXML", "InvalidRequest", "MissingContentMD5", "InvalidDigest",
}  # fmt: skip
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "StorageFull"}


def refusal(code: str, status: int, text: str) -> StoreError:
    """The error for an answer that is none: by the code of S3, else by the status of HTTP. `text`: what to say."""
    advice = _ADVICE.get(code)
    if advice is None and status in (301, 307, 308):
        advice = _ADVICE["PermanentRedirect"]
    if advice is None and status in (401, 403) and code not in _FULL:
        advice = f"The key or the secret is wrong or expired, or: {_ADVICE['AccessDenied']}"
    if advice is not None:
        return AccessError(f"{text}. {advice}")
    if code in _PASSING:
        return StoreError(text, retryable=True)
    if code == "PreconditionFailed" or status == 412:
        return ExistsError(text)
    if code in _FULL or status == 507:
        return FullError(f"no space left: {text}. Free some, raise the quota, or keep fewer: keep=3 on its Tier")
    if code == "InvalidRange" or status == 416:
        return OutOfRangeError(text)
    if code == "NoSuchUpload":
        return GoneError(text)
    if status == 404:
        return NotFoundError(text)
    if code in _UNKNOWN or status in (405, 501):
        return UnknownRequestError(text)
    return StoreError(text, retryable=status in (408, 425, 429, 500, 502, 503, 504))


def meaning(error: Exception, text: str) -> StoreError:
    """Of an error of any driver. `text`: what to say."""
    status = next((s for s in map(_status, (error, error.__cause__)) if s), 0)
    if isinstance(error, FileExistsError) or "PreconditionFailed" in str(error):
        return ExistsError(text)
    if _is_passing(error):
        return StoreError(text, retryable=True)
    if status:
        return refusal("", status, text)
    if isinstance(error, PermissionError):
        return AccessError(f"{text}. {_ADVICE['AccessDenied']}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(text)
    return StoreError(text)


def _status(error: BaseException | None) -> int:
    """The status of HTTP, under the names that drivers have for it."""
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, _MISSING)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, int) and 300 <= value < 600:
            return value
    return 0


def _is_passing(error: Exception) -> bool:
    """Whether the network or the server was only for a moment not as it should be."""
    if isinstance(error, (TimeoutError, ConnectionError, EOFError)):
        return True
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY):
        return True
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & {"ClientConnectionError", "ClientPayloadError", "gaierror", "IncompleteRead", "FSTimeoutError"})


def without_secrets(text: str, *places: Mapping[str, Any]) -> str:
    """Without queries and passwords of URLs, and without the secrets that are in these, by their names."""
    text = re.sub(r"://[^/@\s]*@", "://", re.sub(r"\?[^\s\"'<>)]*=[^\s\"'<>)]*", "", text))
    for secret in set[str]().union(*map(_secrets_in, places)):
        text = text.replace(secret, "***")
    return text


def _secrets_in(options: Mapping[str, Any]) -> set[str]:
    """At any depth."""
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _secrets_in(value)
        elif isinstance(value, str) and len(value) >= 8 and _SECRET.search(str(name)):
            found.add(value)
    return found


_SECRET = re.compile(r"key|secret|token|passw|credential|sas|connection_string", re.IGNORECASE)
