"""Classify errors of drivers and servers, and format them without secrets."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

from ckpt.errors import AccessError, ExistsError, FullError, NotFoundError, StoreError

_MISSING = "not there"  # a marker, because a driver may use None as a value


class OutOfRangeError(StoreError):
    """Raised if the object ends before the first requested byte."""


class GoneError(StoreError):
    """Raised if the upload does not exist, because it was finished or aborted."""


class UnknownRequestError(StoreError):
    """Raised if the server does not support this request, or this form of it."""


_ADVICE = {
    code: advice
    for codes, advice in (
        ("NoSuchBucket InvalidBucketName", "Create the bucket, or correct the URL: everystep never creates buckets"),
        (
            "AccessDenied AllAccessDisabled AccountProblem NotSignedUp UnauthorizedAccess",
            "Allow these credentials to list, read, write and delete there; to read only, use ckpt.load",
        ),
        ("InvalidAccessKeyId InvalidSecurity", "Check the access key, and that it belongs to this endpoint"),
        ("SignatureDoesNotMatch", "Check the secret key, and that no proxy changes requests"),
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
"""S3 codes of transient errors. They include a wrong digest, because only the transfer can have damaged the bytes."""
_UNKNOWN = {
    "NotImplemented", "MethodNotAllowed", "MalformedXML", "InvalidRequest", "MissingContentMD5", "InvalidDigest",
}  # fmt: skip
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "StorageFull"}


def refusal(code: str, status: int, text: str) -> StoreError:
    """Return the error for a failed response, by its S3 error code or HTTP status. `text`: the error's message."""
    advice = _ADVICE.get(code)
    if advice is None and status in (301, 307, 308):
        advice = _ADVICE["PermanentRedirect"]
    if advice is None and status in (401, 403) and code not in _FULL:
        advice = f"The key or the secret may be wrong or expired. Otherwise: {_ADVICE['AccessDenied']}"
    if advice is not None:
        return AccessError(f"{text}. {advice}")
    if code in _PASSING:
        return StoreError(text, retryable=True)
    if code == "PreconditionFailed" or status == 412:
        return ExistsError(text)
    if code in _FULL or status == 507:
        return FullError(
            f"no space left: {text}. Free some space, raise the quota, or keep fewer checkpoints: Tier(..., keep=3)"
        )
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
    """Return the StoreError that corresponds to a driver's error. `text`: message of the StoreError."""
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
    """Return the HTTP status from one of the attributes in which drivers store it, or 0."""
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, _MISSING)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, int) and 300 <= value < 600:
            return value
    return 0


def _is_passing(error: Exception) -> bool:
    """Return True if the error is a transient failure of the network or server."""
    if isinstance(error, (TimeoutError, ConnectionError, EOFError)):
        return True
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY):
        return True
    names = {base.__name__ for base in type(error).__mro__}
    return bool(names & {"ClientConnectionError", "ClientPayloadError", "gaierror", "IncompleteRead", "FSTimeoutError"})


def without_secrets(text: str, *places: Mapping[str, Any]) -> str:
    """Remove queries and passwords from URLs, and the secrets in the mappings `places`, from a text."""
    text = re.sub(r"://[^/@\s]*@", "://", re.sub(r"\?[^\s\"'<>)]*=[^\s\"'<>)]*", "", text))
    for secret in set[str]().union(*map(_secrets_in, places)):
        text = text.replace(secret, "***")
    return text


def _secrets_in(options: Mapping[str, Any]) -> set[str]:
    """Return the secrets in nested options, at any depth."""
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _secrets_in(value)
        elif isinstance(value, str) and len(value) >= 8 and _SECRET.search(str(name)):
            found.add(value)
    return found


_SECRET = re.compile(r"key|secret|token|passw|credential|sas|connection_string", re.IGNORECASE)
