"""Deaths of the trainer, of the writer, and of both, at every fail point and of every kind.

A run is a chain of training processes. Each is killed somewhere, and reports before that which steps are safe. The next
one must never start before a safe step, and the last one must end with exactly the bits of an undisturbed run.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

import toy
from inside import POINTS, TRAINER_POINTS, WRITER_POINTS
from kills import DISK, EVERY, STEPS, Chain, Told, Trainer, kill_all, problems, steps_on_disk
from processes import REPO, eventually, killed, run_script, writers
from run_files import checkpoint_files, data_files

OPENING = ("acquire.done", "recover.done")  # where a writer is before training starts
TRAINING = [p for p in WRITER_POINTS if p not in (*OPENING, "drain.started", "mirror.taken")]
DRAINING = [p for p in WRITER_POINTS if p not in (*OPENING, "mirror.taken")]
RESTORING = ("restore.chosen", "restore.filled", "run.taken")


@pytest.fixture
def chain(run_dir: str) -> Chain:
    return Chain(run_dir, Told())


# -- the trainer --


def test_trainer_killed_at_every_point(chain: Chain, own_sockets: Path) -> None:
    """A SIGKILL at any named point loses no staged step, and the finished run has the bits of one never killed."""
    visits = {"restore.chosen": 1, "restore.filled": 1, "run.taken": 2, "stage.claimed": 7, "save.requested": 2}
    # Without a restore, its fail points are not visited: begin with the others.
    for i, point in enumerate(sorted(TRAINER_POINTS, key=lambda p: p in RESTORING)):
        assert killed(chain.train(f"trainer/{point}:kill:{visits.get(point, 4 + i)}")), point
    chain.finish(own_sockets)


def test_trainer_killed_while_it_acquires_the_run(chain: Chain, own_sockets: Path) -> None:
    """Between the ACQUIRE record and the writer's confirmation, at the start and after a restore: memory stays, because
    the writer must not take its own trainer's next job attempt for another job."""
    assert killed(chain.train("trainer/stage.sealed:kill:8"))
    (writer,) = writers(own_sockets)
    for nth in (2, 1):
        assert killed(chain.train(f"trainer/run.taken:kill:{nth}"))
        assert chain.told.start == -1
        assert not eventually(lambda: not writer.is_running(), 2.0), "the writer left, and the memory with it"
    chain.finish(own_sockets)


# -- the writer --


def test_writer_killed_at_every_point_while_training(run_dir: str, own_sockets: Path) -> None:
    """However a writer dies, another one takes the memory over and writes again; training notices nothing."""
    # four runs, because a trainer stops restarting its writer at the 4th death
    for part, group in enumerate(TRAINING[i::4] for i in range(4)):
        chain = Chain(f"{run_dir}{part}", Told())
        fails = [f"writer/{point}:kill:{nth}" for point, nth in zip(group, (2, 3, 1), strict=False)]
        result = chain.train(fails[0], spares=tuple(fails[1:]))
        assert result.returncode == 0, result.stderr
        # The last one may reach its point only while the run is closed, when it is not replaced.
        assert chain.told.replaced >= len(group) - 1, f"{fails}: {result.stderr}"
        assert chain.told.digest == toy.reference(STEPS)
        assert problems(chain.run) == []
        assert eventually(lambda: not writers(own_sockets))


def test_writer_killed_while_the_run_is_opened(chain: Chain, own_sockets: Path) -> None:
    """A writer that dies before training has begun: it is replaced or the job fails; the next one loses nothing."""
    assert killed(chain.train("trainer/stage.sealed:kill:8"))
    for fail in ("writer/acquire.done:kill:1", "writer/recover.done:kill:1", "writer/acquire.done:kill:2"):
        kill_all(writers(own_sockets))  # an adopted one would not be armed
        Path(chain.run, "lease.json").unlink()  # if its term is not the last one, a start waits 30 s for its renewal
        chain.left = DISK
        chain.train(fail, steps=chain.told.committed + 8, left=DISK)
    chain.finish(own_sockets)


# -- both --


def test_both_killed_together(chain: Chain, own_sockets: Path) -> None:
    """If memory is lost too, the run continues from the newest committed step, even if killed during a save or an
    emergency save."""
    together = [
        "trainer/stage.copied:kill:9,writer/drain.started:kill",
        "trainer/save.requested:kill:3,writer/data_file.written:kill:3",
        "trainer/save.requested:kill:2,writer/log.linked:kill:5",  # ACQUIRE, its rollback, PLANs and COMMITs
        "trainer/stage.sealed:kill:8,writer/manifest.stored:kill:4",
    ]
    for fail in together:
        assert killed(chain.train(fail, left=DISK)), fail
        kill_all(writers(own_sockets))
    chain.finish(own_sockets)


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["stage.claimed", "stage.copied", "stage.sealed", "save.requested"])
@pytest.mark.parametrize("point", DRAINING)
def test_both_killed_at_points(chain: Chain, own_sockets: Path, trainer: str, point: str) -> None:
    """The same for every pair of points, twice in a row."""
    for nth in (2, 4):
        assert killed(chain.train(f"trainer/{trainer}:kill:{nth + 4},writer/{point}:kill:{nth}", left=DISK))
        kill_all(writers(own_sockets))
    chain.finish(own_sockets)


# -- other deaths --

DIE = """
import ctypes, os, signal, sys, threading
import ckpt, toy

run, more, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
state = toy.build()
cp = ckpt.Checkpointer(state, ckpt.Tier(run, every=1000))
start = cp.restore(default=0)
print("start", start, flush=True)
for step in range(start + 1, start + more + 1):
    toy.train_step(state)
    cp.step(step).wait_staged(60)
    print("staged", step, flush=True)
print("digest", toy.digest(state), flush=True)

def fail():
    raise RuntimeError("in a thread")

def thread():
    t = threading.Thread(target=fail)
    t.start()
    t.join()

ways = {
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "segfault in a thread": lambda: threading.Thread(target=ctypes.string_at, args=(0,)).start() or signal.pause(),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sys.exit": lambda: sys.exit(5),
    "exception": lambda: 1 / 0,
    "exception in a thread": thread,
}
ways[how]()
"""


def test_every_kind_of_death_keeps_memory(chain: Chain, own_sockets: Path) -> None:
    """A death that runs no code of ours leaves the last staged step in memory, whatever kind it is."""
    for how, code in {
        "exit": 3,
        "segfault": -signal.SIGSEGV,
        "abort": -signal.SIGABRT,
        "segfault in a thread": -signal.SIGSEGV,
        "terminated": 128 + signal.SIGTERM,
    }.items():
        safe = chain.told.staged
        result = run_script(DIE, chain.run, 3, how)
        chain.told.hear(result.stdout)
        assert result.returncode == code, result.stderr
        assert chain.told.start == safe, f"before {how}"
    assert chain.told.digest == toy.reference(15)
    assert writers(own_sockets), "the memory is held"


def test_every_orderly_end_makes_the_last_step_durable(chain: Chain, own_sockets: Path) -> None:
    """Python's own exit, after sys.exit or an exception and without close(), ends the run as close() does."""
    for how, code in {"sys.exit": 5, "exception": 1, "exception in a thread": 0}.items():
        safe = chain.told.staged
        result = run_script(DIE, chain.run, 3, how)
        chain.told.hear(result.stdout)
        assert result.returncode == code, result.stderr
        assert chain.told.start == safe, f"before {how}"
        assert steps_on_disk(chain.run)[0] == safe + 3
        assert eventually(lambda: not writers(own_sockets)), "a process is left"
    assert chain.told.digest == toy.reference(9)


# -- how a death is noticed --

FORKING = """
import ctypes, os, sys
import ckpt, toy

state, libc = toy.build(), ctypes.CDLL(None)
cp = ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every=1000))
for step in range(1, 6):
    toy.train_step(state)
    cp.step(step).wait_staged(60)
child = libc.fork()  # behind Python's back: the child keeps every descriptor that we have
if child == 0:
    for fd in (0, 1, 2):
        libc.close(fd)
    while True:
        libc.pause()
print("child", child, flush=True)
sys.stdin.read()
"""


def test_death_is_noticed_while_a_child_keeps_the_socket_open(run_dir: str) -> None:
    """The writer drains when the trainer dies, and not before, whoever still holds the other end of the connection."""
    trainer = Trainer(FORKING, run_dir)
    child = psutil.Process(int(trainer.read_until("child").split()[-1]))
    try:
        held = [c for c in child.net_connections("unix") if c.status is not None]
        assert held, "the child must hold the connection, or this shows nothing"
        assert not eventually(lambda: steps_on_disk(run_dir) != [], 0.7), "drained while the trainer lives"
        trainer.kill()
        assert eventually(lambda: 5 in steps_on_disk(run_dir))
        assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    finally:
        child.kill()


# -- the oracles themselves --


def test_every_point_is_listed() -> None:
    """Commands that a person runs (`maintain.prune`, `maintain.copy_run`) mark the same moments again."""
    files = [p for folder in ("ckpt", "backends/ckpt_backends") for p in (REPO / folder).rglob("*.py")]
    sources = [p.read_text() for p in files if p.stem not in ("prune", "copy_run", "repair")]
    marked = [
        name for source in sources for name in re.findall(r'^ +(?:failpoints\.)?point\("([^"]+)"\)', source, re.M)
    ]
    assert sorted({*marked}) == sorted(POINTS)


def test_negative_control_a_lost_commit_is_seen(chain: Chain, own_sockets: Path) -> None:
    """O1 goes red when the newest checkpoint is taken away behind the run's back."""
    assert chain.train(steps=2 * EVERY).returncode == 0
    for path in Path(chain.run, "log").iterdir():
        record = json.loads(path.read_text())
        if str(record["body"].get("checkpoint")).startswith(f"{2 * EVERY:09d}."):
            path.unlink()
    for path in checkpoint_files(chain.run, step=2 * EVERY):
        path.unlink()  # or recovery would make the checkpoint again
    with pytest.raises(AssertionError, match=f"{2 * EVERY} was safe, went on at {EVERY}"):
        chain.train(steps=2 * EVERY)
    assert toy.reference(3) != toy.reference(4), "the digest does not see differences"


def test_negative_control_a_wrong_byte_is_seen(chain: Chain) -> None:
    """O2 goes red when one byte of a live checkpoint changes, and when a file of it is gone."""
    assert chain.train(steps=2 * EVERY).returncode == 0
    assert problems(chain.run) == []
    first, second = data_files(chain.run)
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    second.unlink()
    found = problems(chain.run)
    assert any("damaged" in text for text in found)
    assert any("No such file" in text for text in found)
