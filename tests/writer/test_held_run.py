"""Owner of a writer's actions: the owner in the log, or the next epoch of its own trainer."""

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
def test_commit_continues_only_in_next_epoch_of_own_job(ours: bool) -> None:
    """A restore starts another epoch during a commit and completes it. Another job's epoch fences the commit."""

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


def test_actions_for_a_trainer_end_when_another_connects() -> None:
    trainer: Any = SimpleNamespace(adoptions=3)
    run = HeldRun(trainer)
    run.check_still(3)
    with pytest.raises(FencedError):
        run.check_still(2)


def test_writer_start_fails_if_a_request_has_no_handler() -> None:
    """A handler method in another class does not suffice."""
    run: Any = HeldRun(SimpleNamespace(adoptions=0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no handler for"):
        Dispatch(run)
