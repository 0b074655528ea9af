"""Tests that ranks agree through the job's store: all get the same result, or the same error, before a deadline.

Ranks are threads here, each with its own store, and processes at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.core.ranks import world
from ckpt.core.ranks import world as worlds
from ckpt.core.ranks.world import Mailbox, World, hint_at_restarts
from ckpt.core.ranks.world import together as all_together
from ckpt.errors import (
    CheckpointError,
    DeadlineError,
    FencedError,
    MismatchError,
    NotFoundError,
    PeerError,
    TransferError,
    UsageError,
)
from processes import run_script
from threads import StoreOf, host, store_of, tcp, tcp_client, together

__all__ = ["host", "store_of", "tcp"]  # fixtures

OWN = "own error"

# Torch resolves the name of every address that a TCPStore connects to. If a name server drops some queries, that takes
# five seconds of a test. The C library reads this variable at its first query.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def told(outcomes: list[Any], kind: type[Exception], text: str) -> bool:
    """Return True if every rank raised an error of exactly this class that contains the text."""
    return all(type(outcome) is kind and text in str(outcome) for outcome in outcomes)


def test_file_store_works_too(tmp_path: Path) -> None:
    outcomes = together(
        3, lambda rank: dist.FileStore(str(tmp_path / "store"), 3), lambda world: world.agree("x", world.rank)
    )
    assert outcomes == [[0, 1, 2]] * 3


class Plain:
    """A store with only the required methods."""

    def __init__(self, store: Any) -> None:
        self.set, self.get, self.check, self.add = store.set, store.get, store.check, store.add


def test_store_without_clone_and_delete_works(store: Any) -> None:
    """Keys then stay in the store, which is harmless."""
    outcomes = together(
        2,
        Plain(store),
        lambda world: [world.agree("x", [i, world.rank]) for i in range(3)] and world.mailbox().poll([]),
    )
    assert outcomes == [True, True]
    assert store.num_keys() > 8


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0), (0, 2)])
def test_impossible_ranks_are_rejected(rank: int, size: int) -> None:
    with pytest.raises(UsageError):
        World(rank, size)


def test_missing_rank_is_named_on_all_ranks(store_of: StoreOf) -> None:
    """The error names the topic too."""
    outcomes = together(
        4, store_of, lambda world: world.agree("open the run", 0, timeout_s=0.3) if world.rank != 2 else OWN
    )
    assert outcomes.pop(2) == OWN
    assert told(outcomes, DeadlineError, "open the run: rank 2 did not arrive within 0.3 s")


def test_late_rank_raises_the_same_error(store_of: StoreOf) -> None:
    gone = threading.Event()

    def body(world: World) -> Any:
        if world.rank == 1:
            gone.wait(20)
        with pytest.raises(DeadlineError, match=r"rank 1(, 2)? did not arrive"):
            world.agree("x", "late", timeout_s=0.2)
        gone.set()
        return world.agree("y", world.rank)

    assert together(3, store_of, body) == [[0, 1, 2]] * 3


def test_missing_rank_0_is_named(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "GRACE_S", 0.1)
    outcomes = together(3, store, lambda world: world.agree("x", 0, timeout_s=0.2) if world.rank else OWN)
    assert told(outcomes[1:], DeadlineError, "x: rank 0 did not respond")


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MismatchError("odd shape"), MismatchError, "odd shape"),
        (NotFoundError("no part"), NotFoundError, "no part"),
        (KeyError("name"), PeerError, "'name'"),
    ],
    ids=["ours", "of a store", "of Python"],
)
def test_error_of_one_rank_reaches_all(
    store: Any, failing: int, error: Exception, kind: type[Exception], text: str
) -> None:
    """All raise the same message, with its class if it is one of ours. A foreign error is raised unchanged by its own
    rank.
    The next turn works normally."""

    def work(world: World) -> Any:
        if world.rank == failing:
            raise error
        return world.rank

    def body(world: World) -> Any:
        try:
            all_together(world, "x", lambda: work(world))
        except Exception as caught:
            assert world.agree("y", 1) == [1, 1, 1]
            return OWN if caught is error else caught
        raise AssertionError("no error")

    outcomes = together(3, store, body)
    if kind is PeerError:
        assert outcomes.pop(failing) == OWN
    assert told(outcomes, kind, f"rank {failing}: ") and told(outcomes, kind, text)


def test_error_of_lowest_rank_is_raised(store: Any) -> None:
    """All raise it, except that errors about failures of other ranks do not count."""
    errors = {0: TransferError("rank 1 hung up"), 1: FencedError("newer job"), 3: UsageError("no")}

    def work(world: World) -> Any:
        if world.rank in errors:
            raise errors[world.rank]

    outcomes = together(4, store, lambda world: all_together(world, "x", lambda: work(world)))
    assert told(outcomes, FencedError, "rank 1: newer job")


def test_value_without_json_form_is_rejected(store: Any) -> None:
    """This holds for values of ranks and decisions, and for values on which the store would drop the connection."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for bad in ({1, 2}, b"bytes", deep, {(1, 2): 3}):
        brought = together(2, store, lambda world, bad=bad: world.agree("x", bad if world.rank else 0))
        assert told(brought, UsageError, "must be JSON")
        decided = together(2, store, lambda world, bad=bad: world.agree("x", 0, lambda _: bad))
        assert told(decided, UsageError, "must be JSON")


def test_large_value_is_sent_in_pieces(tcp: StoreOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TCPStore would drop the connection. Values beyond the limit are rejected on all ranks."""
    small, large = os.urandom(6_200_000).hex(), os.urandom(8_000_000).hex()  # 6.7 and 8.6 MiB when compressed

    def body(world: World) -> Any:
        for value in (small, large):
            assert world.agree("x", value if world.rank else 0, lambda values: values[1]) == value
        monkeypatch.setattr(worlds, "MAX_VALUE", 8 << 20)
        with pytest.raises(UsageError, match="more than the limit"):
            world.agree("y", large if world.rank else 0)
        return True

    assert together(2, lambda rank: dist.PrefixStore("large", tcp(rank)), body) == [True, True]


def test_different_calls_of_ranks_raise_error(store: Any) -> None:
    outcomes = together(4, store, lambda world: world.agree("save" if world.rank == 2 else "restore", 0))
    assert told(outcomes, PeerError, "rank 0 called 'restore', rank 2 called 'save'")


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"{}",
        b"j",
        b"j[1]",
        b"zj{}",
        b'j{"error":1}',
    ],
)
def test_foreign_message_raises_error_on_all_ranks(store: Any, rubbish: bytes) -> None:

    def posted(world: World) -> Any:
        if world.rank == 1:
            store.set(f"{world.prefix}0/1", rubbish)
            return OWN
        return world.agree("x", 0)

    def decided(world: World) -> Any:
        if world.rank == 0:
            store.set(f"{world.prefix}0/verdict", rubbish)
            return OWN
        return world.agree("x", 0)

    outcomes = together(3, store, posted)
    assert told([outcomes[0], outcomes[2]], PeerError, "invalid message")
    assert told(together(3, store, decided)[1:], PeerError, "invalid message")


def keys_after(store: Any, rounds: int) -> int:
    """Return the number of keys that three ranks leave, including failed rounds."""

    def decide(values: list[Any]) -> Any:
        raise UsageError("no")

    def body(world: World) -> None:
        for i in range(rounds):
            with contextlib.suppress(CheckpointError):
                world.agree("x", "v" * 5000, decide if i % 5 == 1 else None)

    assert together(3, store, body) == [None] * 3
    return int(store.num_keys())


def test_rounds_leave_a_bounded_number_of_keys() -> None:
    few = keys_after(dist.HashStore(), 10)
    assert keys_after(dist.HashStore(), 50) == few <= 3 + 2


def test_negative_control_undeleted_keys_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cleanup, more rounds leave more keys."""
    monkeypatch.setattr(world.Board, "drop", lambda self, keys: None)
    assert keys_after(dist.HashStore(), 20) > keys_after(dist.HashStore(), 10) > 30


def test_messages_of_dead_processes_are_ignored(store_of: StoreOf) -> None:
    """A launcher keeps its store across restarts: ranks that restarted more or less often than others still meet."""
    for rank, token in ((1, "00" * 8), (2, "11" * 8)):
        store_of(0).set(f"everystep/worlds/{rank}", world.pack(token))
    store_of(0).set("everystep/answers/" + "00" * 8, world.pack("22" * 8))

    def body(world: World) -> Any:
        return world.prefix, world.agree("x", world.rank)

    outcomes = together(3, store_of, body)
    assert {prefix for prefix, _ in outcomes} == {outcomes[0][0]}
    assert [value for _, value in outcomes] == [[0, 1, 2]] * 3


def test_second_world_has_its_own_keys(store: Any) -> None:

    def body(world: World) -> Any:
        world.mailbox().put("k", "first")
        first = world.agree("x", "first")
        second = World(world.rank, world.size, world._store, timeout_s=20)
        assert not second.mailbox().poll(["k"])
        return first, second.agree("x", "second"), world.agree("x", "third")

    assert together(2, store, body) == [(["first"] * 2, ["second"] * 2, ["third"] * 2)] * 2


def test_rank_0_leaves_last(store_of: StoreOf) -> None:
    """They do not wait, and only the counts of Worlds stay in the store."""
    passed = []
    before = set(store_of(0).list_keys())

    def body(world: World) -> Any:
        if world.rank:
            time.sleep(0.1 * world.rank)
            passed.append(world.rank)
        world.farewell()
        return sorted(passed)

    outcomes = together(4, store_of, body)
    assert outcomes[0] == [1, 2, 3] and outcomes[1] == [1]
    left_over = set(store_of(0).list_keys()) - before
    assert all("worlds/" in key for key in left_over)


def test_negative_control_farewell_ends_after_timeout(store: Any) -> None:
    left = threading.Event()

    def body(world: World) -> Any:
        if world.rank == 0:
            world.farewell(0.2)
            left.set()
            return OWN
        return left.wait(20)

    assert together(2, store, body) == [OWN, True]


def test_mailboxes_work_during_turns(store_of: StoreOf) -> None:
    """A thread that waits for mail blocks neither its rank nor other users of the mailbox."""

    def body(world: World) -> Any:
        mailbox = world.mailbox()
        own_connection = mailbox._board._store is not world._board._store
        assert own_connection or isinstance(world._store, dist.HashStore)  # it has none, and needs none
        names = [f"step/{rank}" for rank in range(world.size)]
        got: list[Any] = []
        reader = threading.Thread(target=lambda: got.extend(mailbox.wait(names, 20)))
        reader.start()
        assert not mailbox.poll(names)
        assert world.agree("turn", world.rank) == [0, 1, 2]  # while all wait
        mailbox.put(names[world.rank], {"from": world.rank, "long": "x" * 10_000})
        reader.join(20)
        assert mailbox.poll(names)
        return [message["from"] for message in got]

    assert together(3, store_of, body) == [[0, 1, 2]] * 3


def mail(world: World, mailbox: Mailbox) -> Any:
    return mailbox.wait(["never"], 20)


def turn(world: World, mailbox: Mailbox) -> Any:
    return world.agree("x", 0) if world.rank != 2 else mail(world, mailbox)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_store_raises_error_on_ranks(host: tuple[subprocess.Popen[str], int], how: signal.Signals) -> None:
    """A waiting rank and a later call raise the error. No rank hangs, and farewell is silent.

    A frozen host is treated like a dead one.
    """
    process, port = host
    ready = threading.Barrier(4)

    def body(world: World) -> Any:
        mailbox = world.mailbox()
        world._board.answer_s = mailbox._board.answer_s = 1.0
        ready.wait(20)
        with pytest.raises(PeerError, match=r"cannot reach the torch\.distributed store"):
            turn(world, mailbox)
        with pytest.raises(PeerError, match=r"cannot reach the torch\.distributed store"):
            world.agree("later", 0)
        world.farewell()
        return True

    def end() -> None:
        ready.wait(20)
        time.sleep(0.1)
        process.send_signal(how)

    threading.Thread(target=end).start()
    assert together(3, lambda rank: tcp_client(port), body) == [True] * 3


DETECT = """
import os, sys, ckpt.core.ranks.world
assert "torch" not in sys.modules
import torch
assert "torch" in sys.modules  # negative control
import torch.distributed as dist
from ckpt.errors import UsageError
from ckpt.core.ranks.world import World
os.environ.pop("WORLD_SIZE", None)
print(World.detect("here").size)
os.environ["WORLD_SIZE"] = "2"
try:
    World.detect("here")
except UsageError as error:
    print(error)
for alone in "1", "", "many":
    os.environ["WORLD_SIZE"] = alone
    print(World.detect("here").size)
os.environ["WORLD_SIZE"] = "2"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(World.detect("here").nodes)
dist.destroy_process_group()
dist.is_available = lambda: False
del dist.is_initialized
os.environ["WORLD_SIZE"] = "1"
print(World.detect("here").size)
"""


def test_detect_single_process_without_ranks() -> None:
    """A single process is a World of one, also in a process group of one. Multiple ranks must have met before.

    The module itself is light: until a World is created, torch is not imported.
    """
    result = run_script(DETECT, fresh=True)
    assert result.returncode == 0, result.stderr
    one, refused, *rest = result.stdout.splitlines()
    assert one == "1" and "call torch.distributed.init_process_group() before creating a Checkpointer" in refused
    assert rest == ["1", "1", "1", "(0,)", "1"]


def test_negative_control_disagreement_is_detected(store: Any) -> None:
    """The comparisons above detect a rank with another value or error."""
    outcomes = together(3, store, lambda world: [*world.agree("x", 0), world.rank // 2])
    assert outcomes != [outcomes[0]] * 3
    other = [DeadlineError("x"), DeadlineError("x"), PeerError("x")]
    assert told(other[:2], DeadlineError, "x") and not told(other, DeadlineError, "x")
    assert not told([DeadlineError("y")], DeadlineError, "x")


def test_mail_does_not_fill_the_store() -> None:
    """Only the newest messages are kept, so that a long job does not fill the memory of rank 0."""
    store = dist.HashStore()
    mailbox = World(store=store).mailbox()
    box = type(mailbox)(type(mailbox._board)(store), "mail/")
    before = store.num_keys()
    for i in range(500):
        box.put(f"{i}", i)
    assert store.num_keys() - before <= 70
    assert box.wait(["499"], 1.0) == [499]


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, 1),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, 0),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, 0),
        ({}, 0),
    ],
)
def test_shared_store_of_torchrun_is_hinted_at_once_with_restarts(
    environment: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without this variable, torchrun's new ranks read the addresses of dead ones."""
    for name in ("TORCHELASTIC_MAX_RESTARTS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hint_at_restarts.cache_clear()
    for _ in range(2):
        World.detect("here")
    assert caplog.text.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == count
