"""How ranks agree through the store of the job: the same verdict for all, or the same error, before a deadline.

Ranks are threads here, each with a store of its own, and at the end processes.
"""

from __future__ import annotations

import contextlib
import json
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
from parallel import launch
from processes import run_script
from threads import StoreOf, host, store_of, tcp, tcp_client, together

__all__ = ["host", "store_of", "tcp"]  # fixtures

OWN = "own error"

# Torch looks up the name of every address that a TCPStore talks to; where a name server lets some questions fall, that
# takes five seconds of a test. Read by the C library when it first looks anything up.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def told(outcomes: list[Any], kind: type[Exception], text: str) -> bool:
    """Whether every rank raised an error of this very class that says so."""
    return all(type(outcome) is kind and text in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_all_ranks_get_what_rank_0_decides(store_of: StoreOf, size: int) -> None:
    """In rank order, whoever comes first; `decide` runs once, on rank 0."""
    deciders = []

    def decide(values: list[Any]) -> Any:
        deciders.append(threading.get_ident())
        return {"sum": sum(values), "values": values}

    def body(world: World) -> Any:
        time.sleep(world.rank * 7 % 5 / 100)
        return world.agree("numbers", world.rank * 10, decide), world.agree("all", f"é{world.rank}"), world.rank

    numbers = [rank * 10 for rank in range(size)]
    everybody = [f"é{rank}" for rank in range(size)]
    expected = [({"sum": sum(numbers), "values": numbers}, everybody, rank) for rank in range(size)]
    assert together(size, store_of, body) == expected
    assert len(deciders) == 1


def test_a_file_store_does_as_well(tmp_path: Path) -> None:
    """With an object for each rank."""
    outcomes = together(
        3, lambda rank: dist.FileStore(str(tmp_path / "store"), 3), lambda world: world.agree("x", world.rank)
    )
    assert outcomes == [[0, 1, 2]] * 3


class Plain:
    """A store that can do the least."""

    def __init__(self, store: Any) -> None:
        self.set, self.get, self.check, self.add = store.set, store.get, store.check, store.add


def test_a_store_that_neither_clones_nor_deletes_will_do(store: Any) -> None:
    """Keys then stay, which harms nobody."""
    outcomes = together(
        2,
        Plain(store),
        lambda world: [world.agree("x", [i, world.rank]) for i in range(3)] and world.mailbox().poll([]),
    )
    assert outcomes == [True, True]
    assert store.num_keys() > 8


def test_ranks_get_equal_values(store: Any) -> None:
    """Rank 0 as well gets what JSON makes of a value; large ones travel compressed; no string hurts."""
    value = (1, {2: "\ud800\x00z"}, None, 1.5, ["word"] * 20_000)
    expected = json.loads(json.dumps([value, value]))
    assert together(2, store, lambda world: world.agree("x", value)) == [expected] * 2
    assert together(2, store, lambda world: world.agree("x", 0, lambda _: value)) == [expected[0]] * 2


def test_one_rank_alone_needs_no_store() -> None:
    """`decide` sees its value as it is; its error is raised as it is."""
    world = World(node="here")
    assert (world.rank, world.size, world.node, world.nodes, world.local_rank, world.local_size) == (
        0,
        1,
        0,
        (0,),
        0,
        1,
    )
    assert (
        world.agree("x", (1,)) == [(1,)]
        and world.agree("x", 2, sum) == 2
        and all_together(world, "x", lambda: 3) == [3]
    )
    with pytest.raises(ZeroDivisionError):
        all_together(world, "x", lambda: 1 // 0)
    world.farewell()
    mailbox = world.mailbox()
    mailbox.put("a", [1])
    assert world.mailbox().poll([]) and mailbox.poll(["a"]) and not mailbox.poll(["a", "b"])
    assert mailbox.wait(["a"], 1) == [[1]]
    with pytest.raises(DeadlineError, match=r"(?m)s: b$"):
        mailbox.wait(["a", "b"], 0.01)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0), (0, 2)])
def test_impossible_ranks_are_refused(rank: int, size: int) -> None:
    """And so are several ranks without a store."""
    with pytest.raises(UsageError):
        World(rank, size)


@pytest.mark.parametrize("nodes", ["abab", "aabb", "bbab", "cabac", "aaa", "abc"])
def test_nodes_and_local_ranks(store: Any, nodes: str) -> None:
    """Nodes are numbered by their lowest ranks, local ranks count in rank order, also where nodes interleave."""
    found = together(
        len(nodes),
        store,
        lambda w: (w.nodes, w.node, w.local_rank, w.local_size),
        node_of=lambda rank: f"host {nodes[rank]}",
    )
    order = sorted(set(nodes), key=nodes.index)
    numbers = tuple(order.index(name) for name in nodes)
    for rank, name in enumerate(nodes):
        local = [r for r in range(len(nodes)) if nodes[r] == name]
        assert found[rank] == (numbers, order.index(name), local.index(rank), len(local))


def test_a_rank_that_never_comes_is_named_on_all_ranks(store_of: StoreOf) -> None:
    """Together with the topic."""
    outcomes = together(
        4, store_of, lambda world: world.agree("open the run", 0, timeout_s=0.3) if world.rank != 2 else OWN
    )
    assert outcomes.pop(2) == OWN
    assert told(outcomes, DeadlineError, "open the run: rank 2 did not come within 0.3 s")


def test_many_missing_ranks_are_counted(store: Any) -> None:
    """Eight are named."""
    outcomes = together(16, store, lambda world: world.agree("x", 0, timeout_s=0.3) if world.rank in (0, 3) else OWN)
    text = "rank 1, 2, 4, 5, 6, 7, 8, 9 and 6 more did not come"
    assert told([outcomes[0], outcomes[3]], DeadlineError, text)


def test_a_rank_that_comes_too_late_hears_of_it(store_of: StoreOf) -> None:
    """It raises what the others raised, and all go on with the next turn."""
    gone = threading.Event()

    def body(world: World) -> Any:
        if world.rank == 1:
            gone.wait(20)
        with pytest.raises(DeadlineError, match=r"rank 1(, 2)? did not come"):
            world.agree("x", "late", timeout_s=0.2)
        gone.set()
        return world.agree("y", world.rank)

    assert together(3, store_of, body) == [[0, 1, 2]] * 3


def test_rank_0_that_never_comes_is_named(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all others, a little after the deadline."""
    monkeypatch.setattr(worlds, "GRACE_S", 0.1)
    outcomes = together(3, store, lambda world: world.agree("x", 0, timeout_s=0.2) if world.rank else OWN)
    assert told(outcomes[1:], DeadlineError, "x: rank 0 did not answer")


def test_a_world_that_is_not_complete_is_not_made(store: Any) -> None:
    """Whoever waits for the others learns who is missing."""
    with pytest.raises(DeadlineError, match=r"rank 1, 2 did not come"):
        World(0, 3, store, timeout_s=0.1)


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
def test_an_error_of_one_rank_reaches_all(
    store: Any, failing: int, error: Exception, kind: type[Exception], text: str
) -> None:
    """All raise the same, word for word, with its class where it is ours; somebody else's is raised as it is by the
    rank that met it. The next turn is a turn like any."""

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


def test_of_several_errors_the_lowest_rank_is_heard(store: Any) -> None:
    """By all, but for what only says that another rank has failed."""
    errors = {0: TransferError("rank 1 hung up"), 1: FencedError("newer job"), 3: UsageError("no")}

    def work(world: World) -> Any:
        if world.rank in errors:
            raise errors[world.rank]

    outcomes = together(4, store, lambda world: all_together(world, "x", lambda: work(world)))
    assert told(outcomes, FencedError, "rank 1: newer job")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [(FencedError("no"), FencedError, "no"), (ValueError("bug"), PeerError, "ValueError: bug")],
)
def test_an_error_of_the_decision_reaches_all(store: Any, error: Exception, kind: type[Exception], text: str) -> None:
    """Nobody is left waiting, whatever goes wrong in it."""

    def decide(values: list[Any]) -> Any:
        raise error

    outcomes = together(3, store, lambda world: world.agree("x", 0, decide))
    assert outcomes[0] is error
    assert told(outcomes[1:], kind, f"rank 0: {text}")


def test_what_is_not_json_is_refused_on_all_ranks(store: Any) -> None:
    """Be it brought by a rank or decided; and so is what the store would drop the connection for."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for bad in ({1, 2}, b"bytes", deep, {(1, 2): 3}):
        brought = together(2, store, lambda world, bad=bad: world.agree("x", bad if world.rank else 0))
        assert told(brought, UsageError, "JSON only")
        decided = together(2, store, lambda world, bad=bad: world.agree("x", 0, lambda _: bad))
        assert told(decided, UsageError, "JSON only")


def test_what_is_too_large_for_one_key_travels_in_pieces(tcp: StoreOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TCPStore would drop the connection; what is beyond all reason is refused, on all ranks."""
    small, large = os.urandom(6_200_000).hex(), os.urandom(8_000_000).hex()  # 6.7 and 8.6 MiB when compressed

    def body(world: World) -> Any:
        for value in (small, large):
            assert world.agree("x", value if world.rank else 0, lambda values: values[1]) == value
        monkeypatch.setattr(worlds, "MAX_VALUE", 8 << 20)
        with pytest.raises(UsageError, match="too much for one message"):
            world.agree("y", large if world.rank else 0)
        return True

    assert together(2, lambda rank: dist.PrefixStore("large", tcp(rank)), body) == [True, True]


def test_ranks_that_make_different_calls_are_told(store: Any) -> None:
    """Both topics are named, on all ranks."""
    outcomes = together(4, store, lambda world: world.agree("save" if world.rank == 2 else "restore", 0))
    assert told(outcomes, PeerError, "rank 0 came to 'restore', rank 2 to 'save'")


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"{}",
        b'x{"topic":"x","value":1}',
        b"j",
        b"jnull",
        b"j[1]",
        b"j{}",
        b"zj{}",
        b"j\xff",
        b'j{"error":1}',
        b'j{"topic":"x","error":{}}',
    ],
)
def test_what_is_no_message_of_ours_is_told(store: Any, rubbish: bytes) -> None:
    """By all ranks, when a rank posted it, and when rank 0 did."""

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
    assert told([outcomes[0], outcomes[2]], PeerError, "no message of ours")
    assert told(together(3, store, decided)[1:], PeerError, "no message of ours")


def keys_after(store: Any, rounds: int) -> int:
    """How many keys three ranks leave, failed rounds among them."""

    def decide(values: list[Any]) -> Any:
        raise UsageError("no")

    def body(world: World) -> None:
        for i in range(rounds):
            with contextlib.suppress(CheckpointError):
                world.agree("x", "v" * 5000, decide if i % 5 == 1 else None)

    assert together(3, store, body) == [None] * 3
    return int(store.num_keys())


def test_rounds_leave_a_bounded_number_of_keys() -> None:
    """As many after 50 as after 10."""
    few = keys_after(dist.HashStore(), 10)
    assert keys_after(dist.HashStore(), 50) == few <= 3 + 2


def test_negative_control_keys_that_nobody_deletes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the clean-up, there are more keys after more rounds."""
    monkeypatch.setattr(world.Board, "drop", lambda self, keys: None)
    assert keys_after(dist.HashStore(), 20) > keys_after(dist.HashStore(), 10) > 30


def test_keys_of_a_turn_that_a_rank_missed_go_later(store: Any) -> None:
    """Once it has come to a later turn."""
    late = threading.Event()

    def body(world: World) -> None:
        if world.rank:
            late.wait(20)
        with pytest.raises(DeadlineError):
            world.agree("x", 0, timeout_s=0.1)
        late.set()
        world.agree("y", 0)

    assert together(2, store, body) == [None, None]
    assert store.num_keys() == 1 + 1


def test_what_dead_processes_said_is_not_believed(store_of: StoreOf) -> None:
    """A launcher keeps its store over restarts: ranks that came less or more often than others meet all the same."""
    for rank, token in ((1, "00" * 8), (2, "11" * 8)):
        store_of(0).set(f"everystep/worlds/{rank}", world.pack(token))
    store_of(0).set("everystep/answers/" + "00" * 8, world.pack("22" * 8))

    def body(world: World) -> Any:
        return world.prefix, world.agree("x", world.rank)

    outcomes = together(3, store_of, body)
    assert {prefix for prefix, _ in outcomes} == {outcomes[0][0]}
    assert [value for _, value in outcomes] == [[0, 1, 2]] * 3


def test_a_second_world_does_not_read_what_the_first_left(store: Any) -> None:
    """Each World of a job has keys of its own, also while the earlier one lives."""

    def body(world: World) -> Any:
        world.mailbox().put("k", "first")
        first = world.agree("x", "first")
        second = World(world.rank, world.size, world._store, timeout_s=20)
        assert not second.mailbox().poll(["k"])
        return first, second.agree("x", "second"), world.agree("x", "third")

    assert together(2, store, body) == [(["first"] * 2, ["second"] * 2, ["third"] * 2)] * 2


def test_rank_0_stays_until_the_others_have_left(store_of: StoreOf) -> None:
    """They do not wait, and nothing is left in the store but the counts of Worlds."""
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


def test_negative_control_a_rank_that_does_not_leave_is_not_waited_for_for_ever(store: Any) -> None:
    """Rank 0 leaves when its time is over, without an error; it had not been waiting for nothing."""
    left = threading.Event()

    def body(world: World) -> Any:
        if world.rank == 0:
            world.farewell(0.2)
            left.set()
            return OWN
        return left.wait(20)

    assert together(2, store, body) == [OWN, True]


def test_mailboxes_carry_messages_beside_the_turns(store_of: StoreOf) -> None:
    """A thread that waits for mail holds up neither its rank nor other users of the same mailbox."""

    def body(world: World) -> Any:
        mailbox = world.mailbox()
        own_connection = mailbox._board._store is not world._board._store
        assert own_connection or isinstance(world._store, dist.HashStore)  # which has none, and needs none
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


def test_mail_that_does_not_come_is_named(store: Any) -> None:
    """By its key as it was asked for, and only what is missing."""

    def body(world: World) -> Any:
        mailbox = world.mailbox()
        mailbox.put(f"there {world.rank}", 1)
        world.agree("x", 0)
        with pytest.raises(DeadlineError, match=r"(?m)0\.1 s: a, b$"):
            mailbox.wait(["a", "there 0", "b", "there 1"], 0.1)
        with pytest.raises(UsageError, match="JSON"):
            mailbox.put("c", object())
        return mailbox.poll(["c"])

    assert together(2, store, body) == [False, False]


def mail(world: World, mailbox: Mailbox) -> Any:
    return mailbox.wait(["never"], 20)


def turn(world: World, mailbox: Mailbox) -> Any:
    return world.agree("x", 0) if world.rank != 2 else mail(world, mailbox)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_lost_is_told(host: tuple[subprocess.Popen[str], int], how: signal.Signals) -> None:
    """By a rank that waits and by one that asks later; nobody hangs, farewell is silent.

    A host that is frozen is no different from one that is dead.
    """
    process, port = host
    ready = threading.Barrier(4)

    def body(world: World) -> Any:
        mailbox = world.mailbox()
        world._board.answer_s = mailbox._board.answer_s = 1.0
        ready.wait(20)
        with pytest.raises(PeerError, match="store of the job cannot be reached"):
            turn(world, mailbox)
        with pytest.raises(PeerError, match="store of the job cannot be reached"):
            world.agree("later", 0)
        world.farewell()
        return True

    def end() -> None:
        ready.wait(20)
        time.sleep(0.1)
        process.send_signal(how)

    threading.Thread(target=end).start()
    assert together(3, lambda rank: tcp_client(port), body) == [True] * 3


def test_a_store_is_asked_also_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run is closed while the interpreter shuts down."""
    world = World(0, 1)
    mailbox = world.mailbox()
    with monkeypatch.context() as patch:

        def refuse(self: Any) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        patch.setattr(threading.Thread, "start", refuse)
        mailbox.put("k", 1)
        assert mailbox.wait(["k"], 1) == [1]


RANK = """
import os, torch.distributed as dist
from ckpt.core.ranks.world import World, together
from ckpt.errors import *
rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
world = World.detect(f"host {rank % 2}", timeout_s=60)
print(world.rank, world.nodes, world.local_rank, world.agree("pids", os.getpid(), lambda pids: len(set(pids))))
try:
    together(world, "fail", lambda: 1 // (rank - 1))
except (PeerError, ZeroDivisionError) as error:
    print(type(error).__name__, error)
world.mailbox().put(str(rank), rank)
print(world.mailbox().wait(["0", "1", "2"], 60))
world.farewell()
"""


def test_ranks_that_are_processes() -> None:
    """They find each other through the store of torch's process group, and leave it without an error."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, done in enumerate(launch(3, RANK, port=server.port)):
        assert done.returncode == 0, done.stderr
        failed = "ZeroDivisionError integer" if rank == 1 else "PeerError rank 1: ZeroDivisionError: integer"
        assert done.stdout.splitlines() == [
            f"{rank} (0, 1, 0) {[0, 0, 1][rank]} 3",
            f"{failed} division or modulo by zero",
            "[0, 1, 2]",
        ]


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


def test_detect_without_other_ranks() -> None:
    """A process by itself is a World of one, also in a process group of one; of several, it must have met them first.

    The module itself is light: until a World is made, torch is not imported.
    """
    result = run_script(DETECT, fresh=True)
    assert result.returncode == 0, result.stderr
    one, refused, *rest = result.stdout.splitlines()
    assert one == "1" and "call torch.distributed.init_process_group() before making a Checkpointer" in refused
    assert rest == ["1", "1", "1", "(0,)", "1"]


def test_negative_control_ranks_that_disagree_are_seen(store: Any) -> None:
    """The comparisons above would see a rank that got something else, or raised something else."""
    outcomes = together(3, store, lambda world: [*world.agree("x", 0), world.rank // 2])
    assert outcomes != [outcomes[0]] * 3
    other = [DeadlineError("x"), DeadlineError("x"), PeerError("x")]
    assert told(other[:2], DeadlineError, "x") and not told(other, DeadlineError, "x")
    assert not told([DeadlineError("y")], DeadlineError, "x")


def test_mail_does_not_fill_the_store() -> None:
    """Of many messages only the newest stay, so that a long job does not fill the memory of rank 0."""
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
    """torchrun's new ranks read the addresses of dead ones, unless a variable is set."""
    for name in ("TORCHELASTIC_MAX_RESTARTS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hint_at_restarts.cache_clear()
    for _ in range(2):
        World.detect("here")
    assert caplog.text.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == count
