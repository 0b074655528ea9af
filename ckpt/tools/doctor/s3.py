"""What S3 knows of besides objects: uploads lying about, rules, versions, its clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from ckpt.core.checkpoint.store_trial import PREFIX
from ckpt.errors import NotFoundError, StoreError
from ckpt.tools.doctor.findings import ADVICE, PROBLEM, Finding, clock_difference, judge


def bare_s3(store: Any) -> Any:
    """The store beneath all wrapping if it speaks S3, else None."""
    while hasattr(store, "store"):
        store = store.store
    return store if all(hasattr(store, name) for name in ("call", "unfinished", "bucket", "engine")) else None


async def bucket(s3: Any) -> list[Finding]:
    """What S3 knows of besides objects: uploads lying about, rules, versions, its clock."""
    found: list[Finding] = []
    for what, check in (("clock", s3_clock), ("unfinished uploads", _uploads), ("lifecycle", _rules)):
        try:
            found += await check(s3)
        except StoreError as error:
            advice = "Not allowed to look, or not known there: ask whoever owns the bucket"
            found.append(Finding(what, str(error), ADVICE, advice))
    return found


async def s3_clock(s3: Any) -> list[Finding]:
    at = time.time()
    answer = await s3.call("list_objects_v2", "cannot list", Prefix=s3.prefix, MaxKeys=1)
    middle = (at + time.time()) / 2
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if not date:
        return [Finding("clock", "the server does not say")]
    with contextlib.suppress(ValueError, TypeError):
        return [clock_difference(parsedate_to_datetime(date).timestamp() + 0.5 - middle, 2.0)]
    return [Finding("clock", "the server says no date that can be read")]


async def _uploads(s3: Any) -> list[Finding]:
    left = [key for key, _ in await s3.unfinished() if not key.startswith(PREFIX)]
    advice = "Their parts are paid for. A running job may be at them; else the next job that opens the run drops them"
    return [judge("unfinished uploads", str(len(left) or "none"), bool(left), advice, len(left) or None)]


async def _rules(s3: Any) -> list[Finding]:
    try:
        answer = await s3.call("get_bucket_lifecycle_configuration", "cannot read the lifecycle rules")
    except NotFoundError:
        answer = {}
    versions = await s3.call("get_bucket_versioning", "cannot see whether versions are kept")
    return lifecycle(answer.get("Rules", []), s3.prefix, str(versions.get("Status", "")) == "Enabled")


def lifecycle(rules: Sequence[Mapping[str, Any]], prefix: str, versioned: bool) -> list[Finding]:
    """What a bucket's rules do to a run under a prefix."""
    active = [rule for rule in rules if rule.get("Status") == "Enabled" and not _tagged(rule)]
    whole = [rule for rule in active if prefix.startswith(_prefix(rule))]
    touching = [rule for rule in active if _prefix(rule).startswith(prefix) or rule in whole]
    found = []
    if any("AbortIncompleteMultipartUpload" in rule for rule in whole):
        found.append(Finding("lifecycle", "unfinished uploads are aborted"))
    else:
        advice = "Their parts are paid for: add a rule with AbortIncompleteMultipartUpload after 7 days"
        found.append(Finding("lifecycle", "no rule aborts unfinished uploads", ADVICE, advice))
    for rule in touching:
        days = rule.get("Expiration", {}).get("Days")
        if days is not None or "Date" in rule.get("Expiration", {}):
            advice = "Checkpoints and the log would vanish: exclude this prefix; what is old goes by keep="
            when = f"after {days} days" if days is not None else "on a date"
            found.append(Finding("lifecycle", f"a rule deletes objects {when}", PROBLEM, advice))
        cold = {str(t.get("StorageClass")) for t in rule.get("Transitions", ())} & {"GLACIER", "DEEP_ARCHIVE"}
        if cold:
            advice = "From there nothing is restored within hours: exclude this prefix"
            found.append(Finding("lifecycle", f"a rule moves objects to {', '.join(sorted(cold))}", ADVICE, advice))
    if versioned and not any("NoncurrentVersionExpiration" in rule for rule in whole):
        text = "on: checkpoints that keep= has deleted are still stored, and paid for"
        return [*found, Finding("versioning", text, ADVICE, "Add a rule with NoncurrentVersionExpiration after a day")]
    return [*found, Finding("versioning", "on, and old versions go" if versioned else "off")]


def _prefix(rule: Mapping[str, Any]) -> str:
    chosen = rule.get("Filter") or rule
    return str((chosen.get("And") or chosen).get("Prefix") or "")


def _tagged(rule: Mapping[str, Any]) -> bool:
    chosen = rule.get("Filter") or {}
    return "Tag" in chosen or "Tags" in (chosen.get("And") or {})
