"""Checks for S3 only: unfinished uploads, lifecycle rules, versioning, the server's clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from ckpt.core.checkpoint.commits import PREFIX
from ckpt.errors import NotFoundError, StoreError
from ckpt.tools.doctor.findings import ADVICE, PROBLEM, Finding, clock_difference, judge
from ckpt.units import count_of


def bare_s3(store: Any) -> Any:
    """Return the innermost store if it is an S3Store, otherwise None."""
    while hasattr(store, "store"):
        store = store.store
    return store if all(hasattr(store, name) for name in ("call", "unfinished", "bucket", "engine")) else None


async def bucket(s3: Any) -> list[Finding]:
    """Return findings about unfinished uploads, lifecycle rules, versioning and the clock of a bucket."""
    findings: list[Finding] = []
    for what, check in (("clock", s3_clock), ("unfinished uploads", _uploads), ("lifecycle", _rules)):
        try:
            findings += await check(s3)
        except StoreError as error:
            advice = "No permission to read this, or not supported: ask the owner of the bucket"
            findings.append(Finding(what, str(error), ADVICE, advice))
    return findings


async def s3_clock(s3: Any) -> list[Finding]:
    at = time.time()
    answer = await s3.call("list_objects_v2", "cannot list", Prefix=s3.prefix, MaxKeys=1)
    middle = (at + time.time()) / 2
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if not date:
        return [Finding("clock", "the server sends no date")]
    with contextlib.suppress(ValueError, TypeError):
        return [clock_difference(parsedate_to_datetime(date).timestamp() + 0.5 - middle, 2.0)]
    return [Finding("clock", "the server sends an invalid date")]


async def _uploads(s3: Any) -> list[Finding]:
    left = [key for key, _ in await s3.unfinished() if not key.startswith(PREFIX)]
    advice = (
        "Their parts are charged. A running job may be writing them; otherwise the next job that opens the run "
        "aborts them"
    )
    return [judge("unfinished uploads", str(len(left) or "none"), bool(left), advice, len(left) or None)]


async def _rules(s3: Any) -> list[Finding]:
    try:
        answer = await s3.call("get_bucket_lifecycle_configuration", "cannot read the lifecycle rules")
    except NotFoundError:
        answer = {}
    versions = await s3.call("get_bucket_versioning", "cannot read the versioning state")
    return lifecycle(answer.get("Rules", []), s3.prefix, str(versions.get("Status", "")) == "Enabled")


def lifecycle(rules: Sequence[Mapping[str, Any]], prefix: str, versioned: bool) -> list[Finding]:
    """Return findings about the lifecycle rules that affect a run under this prefix. `versioned`: versioning is on."""
    active = [rule for rule in rules if rule.get("Status") == "Enabled" and not _tagged(rule)]
    whole = [rule for rule in active if prefix.startswith(_prefix(rule))]
    touching = [rule for rule in active if _prefix(rule).startswith(prefix) or rule in whole]
    findings = []
    if any("AbortIncompleteMultipartUpload" in rule for rule in whole):
        findings.append(Finding("lifecycle", "unfinished uploads are aborted"))
    else:
        advice = "Their parts are charged: add a rule with AbortIncompleteMultipartUpload after 7 days"
        findings.append(Finding("lifecycle", "no rule aborts unfinished uploads", ADVICE, advice))
    for rule in touching:
        days = rule.get("Expiration", {}).get("Days")
        if days is not None or "Date" in rule.get("Expiration", {}):
            advice = "Checkpoints and the log would be deleted: exclude this prefix, and use keep= for retention"
            when = f"after {count_of(days, 'day')}" if days is not None else "on a date"
            findings.append(Finding("lifecycle", f"a rule deletes objects {when}", PROBLEM, advice))
        cold = {str(t.get("StorageClass")) for t in rule.get("Transitions", ())} & {"GLACIER", "DEEP_ARCHIVE"}
        if cold:
            advice = "A restore from there takes hours: exclude this prefix"
            findings.append(Finding("lifecycle", f"a rule moves objects to {', '.join(sorted(cold))}", ADVICE, advice))
    if versioned and not any("NoncurrentVersionExpiration" in rule for rule in whole):
        text = "on: checkpoints that keep= has deleted are still stored and charged"
        return [
            *findings,
            Finding("versioning", text, ADVICE, "Add a rule with NoncurrentVersionExpiration after a day"),
        ]
    return [*findings, Finding("versioning", "on, and old versions are deleted" if versioned else "off")]


def _prefix(rule: Mapping[str, Any]) -> str:
    chosen = rule.get("Filter") or rule
    return str((chosen.get("And") or chosen).get("Prefix") or "")


def _tagged(rule: Mapping[str, Any]) -> bool:
    chosen = rule.get("Filter") or {}
    return "Tag" in chosen or "Tags" in (chosen.get("And") or {})
