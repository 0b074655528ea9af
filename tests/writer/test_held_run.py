"""As whom a writer acts: as the owner that the log names, or as the one that its own trainer is about to be."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.core.checkpoint import commits
from ckpt.core.log.run_log import Acquire
from ckpt.core.writer.held_run import Dispatch, HeldRun
from ckpt.errors import FencedError, UsageError
from ckpt_backends.memory import MemoryStore
from logs import new_log


@pytest.mark.parametrize("ours", [True, False])
def test_what_was_begun_goes_on_as_our_next_epoch_and_as_nobody_elses(ours: bool) -> None:
    """A restore opens another epoch while a checkpoint is on its way: it is committed by that one. Another job's epoch
    fences it."""

    async def main() -> None:
        trainer: Any = SimpleNamespace(adoptions=0)
        run, acted = HeldRun(trainer), list[Acquire]()
        with pytest.raises(UsageError):
            run.mine()
        log, mine = await new_log(MemoryStore("file:///near"))
        run.become(mine)
        run.next_nonces = frozenset({"4" * 8, "5" * 8})
        await commits.acquire(log, "5" * 8 if ours else "6" * 8)

        async def act(owner: Acquire) -> str:
            acted.append(owner)
            log.check_owner(owner)
            return "done"

        if ours:
            assert await run.as_owner(log, act) == "done"
            assert [one.term for one in acted] == [1, 2] and run.acquires == acted and run.mine().nonce == "5" * 8
        else:
            with pytest.raises(FencedError):
                await run.as_owner(log, act)
            assert acted == run.acquires == [mine]

    asyncio.run(main())


def test_nothing_is_done_for_a_trainer_after_another_has_come() -> None:
    trainer: Any = SimpleNamespace(adoptions=3)
    run = HeldRun(trainer)
    run.check_still(3)
    with pytest.raises(FencedError):
        run.check_still(2)


def test_a_writer_does_not_start_with_a_request_that_no_object_deals_with() -> None:
    """That a class somewhere has a method for it is not enough."""
    run: Any = HeldRun(SimpleNamespace(adoptions=0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nobody deals with"):
        Dispatch(run)
