"""torch's distributed checkpoint (DCP) on everystep runs: `dcp.save`, `dcp.async_save` and `dcp.load` with one
additional argument.

    import torch.distributed.checkpoint as dcp
    import ckpt.dcp

    writer = ckpt.dcp.StorageWriter("runs/exp1")
    dcp.save(state, checkpoint_id="step-500", storage_writer=writer)
    dcp.load(state, storage_reader=ckpt.dcp.StorageReader("runs/exp1"))      # newest, or checkpoint_id="step-500"

The result is a run: verified, atomic, fenced against a second job, pruned by `Tier(keep=)`, and readable by `ckpt.load`
and the `ckpt` commands. torch's planners decide which rank saves and reads which tensors. The step is the number at the
end of `checkpoint_id`, for example ".../step-500". All ranks must see the same folders and buckets.

DCP's planner pickles objects that are not tensors with `torch.save`, and reads them with `torch.load(...,
weights_only=False)`, so anyone who can write to the run could run code. This reader first reads them with
`weights_only=True` and rejects them if that fails, unless it has `trusted=True`. Nothing else is pickled.
"""

from __future__ import annotations

import contextlib
import operator
import os
import re
import secrets
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckpt.core.checkpoint import read
from ckpt.core.format.manifest import CheckpointId
from ckpt.dcp import coordinator, in_flight, incarnation
from ckpt.dcp import read as dcp_source
from ckpt.dcp.rank_write import RankShare, Receipt, content_of
from ckpt.errors import InvalidArgumentError, PeerError, SaveError, UsageError
from ckpt.store import remember_options
from ckpt.tiers import Memory, Tier

__all__ = ["StorageReader", "StorageWriter", "latest"]

Places = str | Path | Tier | Sequence[str | Path | Tier]
StepOrPath = str | os.PathLike[str] | int | None

RECEIPT = "(receipt)"  # name under which a rank's Receipt travels to the coordinator
MAX_STEP = 10**18
STEP = re.compile(r"(?:^|[^0-9.])([0-9]{1,18})/*$")
ODD = re.compile(r"(?:^|/)[-+0-9]*[-+][0-9]+/*$|[0-9][.e+]+[-+]?[0-9]+/*$")  # -5, 2024-11-21, 1e6; not exp1-500
MAX_SPENT = 64
_spent: dict[
    str, incarnation.Incarnation
] = {}  # job by the token of each share that was written; a plan with a token in this dict is an old, cached plan
_spending = threading.Lock()


class _Now(threading.local):
    """The save of the calling thread, because torch makes each save in one thread."""

    def __init__(self, default: int | None) -> None:
        self.clear(default)

    def clear(self, default: int | None) -> None:
        self.step: int | None = default
        self.id: StepOrPath = default
        self.job: incarnation.Incarnation | None = None
        self.saving: coordinator.Saving | None = None


class StorageWriter(storage.StorageWriter):
    """Saves to one or several tiers, nearest first. Pass it to `dcp.save(..., storage_writer=)`.

    - `tiers`: a folder or URL stores and keeps every save, like torch's own writer. A `Tier` stores the saves that its
      `every` schedules, and its `keep` is applied after each save. A step that no tier has scheduled goes to the
      nearest tier. Checkpoints are always complete: `full_every` and `compression` have no effect.
    - `step`: step of the saves that have no `checkpoint_id`.

    A failed save raises an error, and does not affect other saves. If one tier fails, the other tiers still get the
    checkpoint. Steps must increase. After `dcp.load` of an older step from the same tiers, later steps leave the
    history. Raises FencedError if a newer job has taken ownership, so the same rank must coordinate all saves of a job.
    A save is rejected while another save of this process writes to the same tier.
    """

    def __init__(self, tiers: Places, *, step: int | None = None) -> None:
        self._tiers = _tiers(tiers)
        self._default = None if step is None else step_of(step)
        self._now = _Now(self._default)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. It includes the job, so that the receiving process saves as the same job."""
        return {"tiers": self._tiers, "default": self._default, "job": incarnation.incarnation_of(self._urls)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tiers, self._default = state["tiers"], state["default"]
        self._now = _Now(self._default)
        incarnation.adopt(self._urls, state["job"])

    @property
    def _urls(self) -> tuple[str, ...]:
        return tuple(tier.url for tier in self._tiers)

    @property
    def checkpoint_id(self) -> StepOrPath:
        return self._now.id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StepOrPath) -> bool:
        return _is_id(checkpoint_id)

    def reset(self, checkpoint_id: StepOrPath = None) -> None:
        self._now.clear(self._default)
        in_flight.watch(self._default if checkpoint_id is None else checkpoint_id)
        if checkpoint_id is not None:
            self._now.step, self._now.id = step_of(checkpoint_id), checkpoint_id
        self._now.job = incarnation.incarnation_of(self._urls)  # fixed, so that a later load does not affect it

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=None if self._now.id is None else str(self._now.id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives", True) is False:
            raise InvalidArgumentError(
                "use_collectives=False is not supported, because nothing would commit the ranks' files"
            )
        if self._now.step is None:
            raise UsageError(
                'the step is missing: use dcp.save(..., checkpoint_id="step-500"), or StorageWriter(..., step=500)'
            )
        in_flight.check_time(self._now.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the checkpoint, and send each rank its share. Called on the coordinator only."""
        step = self._now.step
        assert step is not None
        job, self._now.job = self._now.job or incarnation.incarnation_of(self._urls), None
        in_flight.claim(self._urls, step)
        saving = self._now.saving = read.run(coordinator.begin(self._tiers, job, step, len(plans)))
        names = [{item.index.fqn for item in plan.items} for plan in plans]
        everything, token = set[str]().union(*names), secrets.token_hex(8)
        share = RankShare(token, str(saving.checkpoint), 0, len(plans), saving.urls, saving.read_back, job=job.nonce)
        return [
            replace(plan, storage_data=replace(share, rank=rank, names=tuple(sorted(everything - names[rank]))))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share. The write is complete on return, because staged memory may be reused afterwards."""
        share = self._share(plan)
        tiers = [tier for tier in self._tiers if tier.url in share.tiers]
        try:
            content = content_of(plan, planner, share)
        except BaseException as error:
            read.run(coordinator.give_up_share(tiers, share, error))
            raise
        receipt = read.run(coordinator.write(tiers, share, content))
        sizes = {spec.key: spec.nbytes for spec in content.layout.tensors}
        results = [WriteResult(MetadataIndex(RECEIPT), sum(sizes.values()), receipt)]
        results += [WriteResult(item.index, 0, None) for item in plan.items]
        self._now.step = self._now.id = self._default  # reset for the next save
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _share(self, plan: SavePlan) -> RankShare:
        """Return the coordinator's data of this save. If the planner cached the plan of an older save, take the data
        from the log instead."""
        share, step = plan.storage_data, self._now.step
        if not isinstance(share, RankShare) or step is None:
            raise SaveError("another storage writer made this plan: use one StorageWriter for the whole save")
        own = incarnation.incarnation_of(self._urls)
        then = _spend(share.token, own)
        if then is not None:
            restored = None if then == own else own.restored
            share = read.run(coordinator.renewed(share, self._tiers, step, restored))
        if CheckpointId.parse(share.checkpoint).step != step:
            raise PeerError(f"rank {share.rank} saves step {step}, but the coordinator saves {share.checkpoint}")
        if not set(share.tiers) <= set(self._urls):
            raise PeerError(f"rank {share.rank} saves to {', '.join(self._urls)}, but the coordinator to {share.tiers}")
        return share

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, which exists on return. Called on the coordinator only."""
        saving, self._now.saving = self._now.saving, None
        if saving is None:
            raise SaveError("no save is in progress")
        receipts = [r.storage_data for each in results for r in each if isinstance(r.storage_data, Receipt)]
        try:
            read.run(coordinator.end(saving, receipts))
        finally:
            in_flight.release()


class StorageReader(storage.StorageReader):
    """Reads the checkpoint of a step, by default the newest, from the nearest tier that has it.

    Every byte is verified. Damaged chunks are read from another tier or step; if there is no intact copy, CorruptError
    names the tensor. Waits for a `dcp.async_save` of this process to one of these tiers.

    - `places`: folder, URL, `Tier`, or a list of them.
    - `step`: number of the step, default the newest.
    - `trusted`: True also unpickles objects that could run code, see the module's docstring. Default False.
    - `resume`: True (default) makes later saves of this process continue from the loaded checkpoint; False only reads
      it.

    Checkpoints of a Checkpointer can be read too, with the tensor names that `ckpt show` lists. If a load raises an
    error, some tensors may already have new values.
    """

    def __init__(self, places: Places, *, step: int | None = None, trusted: bool = False, resume: bool = True) -> None:
        self._tiers = _tiers(places)
        self._default = self._step = None if step is None else step_of(step)
        self._id: StepOrPath = step
        self._trusted, self._resume = trusted, resume
        self._found: dcp_source.Found | None = None
        self._load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> StepOrPath:
        return self._id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StepOrPath) -> bool:
        return _is_id(checkpoint_id)

    def reset(self, checkpoint_id: StepOrPath = None) -> None:
        self._found = None
        self._step = self._default if checkpoint_id is None else step_of(checkpoint_id)
        self._id = self._default if checkpoint_id is None else checkpoint_id
        self._load_id = str(uuid.uuid4())

    # No **kwargs: otherwise torch would treat an unreadable checkpoint as a separate checkpoint of each rank.
    def read_metadata(self) -> Metadata:
        in_flight.wait_for([tier.url for tier in self._tiers])
        self._found = read.run(dcp_source.find(_reachable(self._tiers), self._step))
        return replace(dcp_source.metadata_of(self._found.saved), storage_meta=self.storage_meta())

    def storage_meta(self) -> StorageMeta:
        """Return the checkpoint to load, by default the step that was found, and the id of this load."""
        step = self._id if self._id is not None or self._found is None else self._found.checkpoint.step
        return StorageMeta(checkpoint_id=None if step is None else str(step), load_id=self._load_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._found is None:
            raise UsageError("call read_metadata() first")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._found is not None
        return replace(plan, storage_data=str(self._found.checkpoint))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: check that all ranks found the same checkpoint, because a save may have ended."""
        chosen = sorted({str(plan.storage_data) for plan in plans})
        if len(chosen) > 1:
            raise PeerError(f"ranks found different newest checkpoints ({', '.join(chosen)}): pass a checkpoint_id")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found = self._found
        if found is None:
            raise UsageError("call read_metadata() first")
        dcp_source.fill(found, plan, planner, trusted=self._trusted)
        if self._resume:
            incarnation.went_back(found.roots, found.checkpoint)
        self._found, self._step, self._id = None, self._default, self._default  # for the next load
        done: Future[None] = Future()
        done.set_result(None)
        return done


def latest(places: Places) -> int | None:
    """Return the newest step that `dcp.load` would find, or None if there is no checkpoint yet."""
    urls = _reachable(_tiers(places))
    in_flight.wait_for(urls)
    return read.run(dcp_source.latest(urls))


def _spend(token: str, job: incarnation.Incarnation) -> incarnation.Incarnation | None:
    """Record that a share was written. If its token was recorded before, return the job of that earlier write."""
    with _spending:
        then = _spent.pop(token, None)
        _spent[token] = then or job
        for oldest in list(_spent)[:-MAX_SPENT]:
            del _spent[oldest]
    return then


def _reachable(tiers: Sequence[Tier]) -> list[str]:
    """Register the storage options of each tier. Return the URLs of the tiers."""
    for tier in tiers:
        remember_options(tier.url, tier.storage_options)
    return [tier.url for tier in tiers]


def step_of(checkpoint_id: object) -> int:
    """Return the number at the end of an id. Raise InvalidArgumentError if there is none, or if it may be part of
    something else, for example a date."""
    number: int | None = None
    with contextlib.suppress(TypeError):
        if isinstance(checkpoint_id, (str, os.PathLike)):
            name = os.fspath(checkpoint_id)
            found = None if ODD.search(name) else STEP.search(name)
            number = int(found[1]) if found else None
        elif not isinstance(checkpoint_id, bool):
            number = operator.index(checkpoint_id)  # type: ignore[arg-type]
    if number is None or not 0 <= number < MAX_STEP:
        raise InvalidArgumentError(
            f'{checkpoint_id!r} has no step: use a number, or a name that ends with one ("step-500")'
        )
    return number


def _is_id(checkpoint_id: object) -> bool:
    try:
        step_of(checkpoint_id)
    except UsageError:
        return False
    return True


def _tiers(places: object) -> list[Tier]:
    """Convert the user's argument to tiers, nearest first. A plain folder or URL stores and keeps every save."""
    given = places if isinstance(places, (list, tuple)) else [places]
    if any(isinstance(one, Memory) for one in given):
        raise InvalidArgumentError(
            "ckpt.Memory is not supported here: dcp.async_save stages its copy in memory, which is lost with the "
            "process. For memory that survives the process use ckpt.Checkpointer"
        )
    if not given or not all(isinstance(one, (str, Path, Tier)) for one in given):
        raise InvalidArgumentError(f"pass a folder, a URL, a Tier, or a list of these, not {places!r}")
    tiers = [one if isinstance(one, Tier) else Tier(str(one), every=1) for one in given]
    for tier in tiers:
        tier.steps  # noqa: B018 - raises an error for every="auto", because step times are unknown here
    if len({tier.url for tier in tiers}) != len(tiers):
        raise InvalidArgumentError("a tier is listed twice")
    return tiers
