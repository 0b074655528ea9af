"""The training that `chaos.py` disturbs: one process that trains and saves in one way. Started only by `chaos.py`.

    python benchmarks/chaos_job.py calibrate|train|reference JSON

It reports its events as lines of JSON in a pipe, each in one write(2), so that a kill splits none. Times are of the
monotonic clock, which is the same in all processes. Batches depend only on the step number, so after the same number
of steps all processes have the same weights, bit for bit.

Peers are used as in `peers/`, by a careful user: an incomplete checkpoint is never restored, and two checkpoints are
kept. Before a new save, the previous one must have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import Tensor

from contest import AFTER, Watch, cycle
from peers import Peer, nothing, peer_class
from workload import Size, Training

Json = dict[str, Any]

SIZES = {
    "full": Size(layers=10, width=576, heads=9, vocabulary=8192, context=128, batch=1),
    "tiny": Size(layers=4, width=256, heads=4, vocabulary=2048, context=64, batch=1),
}
KEEP = 2  # checkpoints of each peer
LINGER_S = 60.0  # of everystep's writer, if the measuring process is killed
HEAD, CYCLES = 30, 6  # of a calibration: quiet steps, and timed saves
TAIL = 28  # quiet steps after the end
NEVER = 10**9
LIMIT_S = 120.0  # for one save


class Teller:
    """Writes events to the pipe of the measuring process."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY)

    def __call__(self, what: str, **facts: Any) -> None:
        line = {"what": what, "at": time.monotonic(), **facts}
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def born() -> float:
    """Return the start time of this process by the monotonic clock; the kernel counts in hundredths of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK") + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


class Batches(Iterator[Tensor]):
    """Generates a batch for each step number."""

    def __init__(self, size: Size) -> None:
        self._size, self.step = size, 0

    def __next__(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.step)
        return torch.randint(self._size.vocabulary, (self._size.batch, self._size.context + 1), generator=generator)


def build(size: str) -> tuple[Training, Batches]:
    training = Training.build(SIZES[size])
    batches = Batches(SIZES[size])
    training.batches = batches
    return training, batches


def timed_steps(training: Training, batches: Batches, first: int, count: int) -> list[float]:
    found = []
    for batches.step in range(first, first + count):
        began = time.monotonic()
        training.step()
        found.append(round(time.monotonic() - began, 6))
    return found


# -- peers, as careful users use them --


class Careful(Peer):
    """Adds what `peers/` lacks, since no process is killed during a save there.
    Mixed into the classes there, which are imported when needed: importing all of them takes a second."""

    incarnation = ""  # separates the names of different job attempts

    def path(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step:06d}-{self.incarnation}{suffix}"

    def complete(self) -> list[Path]:
        """Oldest first."""
        return self.checkpoints()

    def newest(self) -> Path:
        return self.complete()[-1]

    def clean_up(self, *, start: bool = False) -> None:
        """Keep the newest checkpoints; at a start, delete incomplete ones too."""
        keep = self.complete()[-KEEP:]
        unfinished = [] if start else [path for path in self.checkpoints() if path not in self.complete()]
        for path in self.folder.iterdir():
            if path not in keep and path not in unfinished and (start or path.name.startswith("step-")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class CarefulTorchSave(Careful):
    """Writes under another name until the checkpoint is complete."""

    def path(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"part-{step:06d}-{self.incarnation}{suffix}"

    def save(self, step: int) -> Callable[[], None]:
        super().save(step)
        path = self.path(step, ".pt")
        path.rename(path.with_name(path.name.replace("part-", "step-")))
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return nothing


class CarefulDCP(Careful):
    """Treats a checkpoint as complete once it has `.metadata`, which is written last."""

    def complete(self) -> list[Path]:
        return [path for path in self.checkpoints() if (path / ".metadata").exists()]


class CarefulTorchCheckpointing(Careful):
    """Renames complete checkpoints in a callback, as it recommends for one process."""

    def __init__(self, training: Training, folder: Path) -> None:
        Peer.__init__(self, training, folder)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(storage_config=storage, finalize_callback=publish))
        self.guard: Any = None
        training.optim.register_step_pre_hook(self._before_update)
        training.optim.register_step_post_hook(self._after_update)

    def save(self, step: int) -> Callable[[], None]:
        path = str(self.path(step)).replace("step-", "part-")
        future = self.manager.save(path, self.training.state_dict())
        return lambda: future.result() and None


def publish(written: Any) -> None:
    path = Path(written.path)
    path.rename(path.with_name(path.name.replace("part-", "step-")))


CAREFUL: dict[str, type[Careful]] = {
    "torch.save": CarefulTorchSave,
    "DCP async, thread": CarefulDCP,
    "DCP async, process": CarefulDCP,
    "torch_checkpointing": CarefulTorchCheckpointing,
}


def careful(name: str, training: Training, folder: Path) -> Careful:
    kind: type[Careful] = type(name, (CAREFUL[name], peer_class(name)), {})
    return kind(training, folder)


# -- the ways of saving --


class Saver:
    """One way of saving, for the training loop. As a context manager, it closes after the last step."""

    def __init__(self) -> None:
        self.flying: list[Callable[[], bool]] = []  # saves in progress: whether each has ended
        self.calm = NEVER  # steps since the last save in progress

    def restore(self) -> tuple[int, str]:
        """Return the restored step, 0 for none, and its source."""
        raise NotImplementedError

    def due(self, step: int) -> bool:
        raise NotImplementedError

    def save(self, step: int) -> None:
        raise NotImplementedError

    def load(self, number: int) -> str:
        """Return the load during step n: "busy" with a save, "after" one, "warm" (too early to compare) or "quiet"."""
        self.flying = [ended for ended in self.flying if not ended()]
        self.calm = 0 if self.flying else self.calm + 1
        if self.calm <= AFTER:
            return "after" if self.calm else "busy"
        return "warm" if number <= AFTER + 1 else "quiet"

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *error: Any) -> None: ...


class WithPeer(Saver):
    """Saves to a folder every N steps."""

    def __init__(self, asked: Json, training: Training) -> None:
        super().__init__()
        folder = Path(asked["folder"], "checkpoints")
        folder.mkdir(exist_ok=True)
        self.peer, self.every = careful(asked["peer"], training, folder), asked["every"]
        self.peer.incarnation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0").zfill(3)
        self.peer.clean_up(start=True)
        self.watch: Watch | None = None

    def restore(self) -> tuple[int, str]:
        if not self.peer.complete():
            return 0, ""
        self.peer.restore()
        return int(self.peer.newest().name.split("-")[1]), "folder"

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def save(self, step: int) -> None:
        if self.watch is not None:
            self.watch.join()
        self.peer.clean_up()
        began = time.perf_counter()
        wait = self.peer.save(step)
        self.watch = watch = Watch(wait, began)
        self.flying.append(lambda: watch.ended)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            if self.watch is not None:
                self.watch.join()
            self.peer.close()


class WithUs(Saver):
    """Saves to memory and a folder, at default or measured save intervals."""

    def __init__(self, asked: Json, training: Training) -> None:
        super().__init__()
        import ckpt

        cadence: Json = {"every": "auto"} if asked["auto"] else {}
        triggers = [
            ckpt.triggers.on_signal(), ckpt.triggers.on_preemption(), ckpt.triggers.on_deadline(),
            ckpt.triggers.on_exception(), ckpt.triggers.on_oom(),
            ckpt.triggers.on_hang(action="exit", min_s=asked["min_s"]), ckpt.triggers.on_memory_pressure(),
        ]  # fmt: skip
        tiers = [ckpt.Tier(f"{asked['folder']}/run", keep=3, **cadence)]
        state = {"model": training.model, "optim": training.optim}
        self.checkpointer = ckpt.Checkpointer(
            state, tiers, triggers=triggers, memory=ckpt.Memory(linger_s=LINGER_S, **cadence)
        )
        self.flying.append(lambda: self.checkpointer.stats.saves > 0)  # until then memory is being prepared

    def restore(self) -> tuple[int, str]:
        step = self.checkpointer.restore(default=0)
        last = self.checkpointer.last_restore
        return step, "" if not step or last is None else "memory" if last.tier == "memory" else "folder"

    def due(self, step: int) -> bool:
        return True  # the Checkpointer decides itself

    def save(self, step: int) -> None:
        handle = self.checkpointer.step(step)
        if handle is not None:
            self.flying.append(lambda: not handle._unfinished())

    def __enter__(self) -> Saver:
        self.checkpointer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpointer.__exit__(*error)


def saver_of(asked: Json, training: Training) -> Saver:
    return WithPeer(asked, training) if asked["peer"] in CAREFUL else WithUs(asked, training)


class Strike:
    """Checks in the middle of each step whether to inject a fault into this process, and which."""

    def __init__(self, path: str, tell: Teller) -> None:
        self._path, self._tell = path, tell

    def __call__(self, *_: Any) -> None:
        if not os.path.exists(self._path):
            return
        kind = Path(self._path).read_text()
        os.unlink(self._path)
        self._tell("struck", kind=kind)
        if kind == "oom":
            torch.empty(1 << 50)
        while kind == "hang":
            time.sleep(3600.0)


# -- the tasks of the process --


def train(asked: Json) -> None:
    """Train from the restored step until the stop file appears."""
    tell = Teller(asked["pipe"])
    tell("born", pid=os.getpid(), born=born())
    training, batches = build(asked["size"])
    tell("built")
    with saver_of(asked, training) as saver:
        began = time.monotonic()
        step, source = saver.restore()
        tell("restored", began=began, step=step, source=source)
        training.model.register_forward_hook(Strike(asked["strike"], tell))
        number = 0
        while not os.path.exists(asked["stop"]):
            step, number = step + 1, number + 1
            batches.step = step
            load = saver.load(number)
            began = time.monotonic()
            training.step()
            done, due = time.monotonic(), saver.due(step)
            tell("step", step=step, begin=began, done=done, load=load, due=due)
            if due:
                saver.save(step)
                tell("called", step=step)
        tell("end", step=step)
    tell("digest", step=step, digest=training.digest(), tail=timed_steps(training, batches, step + 1, TAIL))


def calibrate(asked: Json) -> None:
    """Measure quiet steps, and then the training time that a save takes, as `contest.py` does."""
    tell = Teller(asked["pipe"])
    training, batches = build(asked["size"])
    head = timed_steps(training, batches, 1, HEAD)[AFTER:]
    tell("calibrated", quiet=head, nbytes=training.nbytes)
    folder = Path(asked["folder"], "calibration")
    folder.mkdir()
    ways: dict[str, Peer]
    if asked["peer"] in CAREFUL:
        ways = {"save": careful(asked["peer"], training, folder)}
    else:
        ours = ByUs(training, folder)
        ways = {"memory": ours.to_memory(), "save": ours}
    for name, way in ways.items():
        way.save(1 if name == "memory" else CYCLES + 2)()
        for number in range(CYCLES):
            found = cycle(way, training, number + (2 if name == "memory" else CYCLES + 3))
            tell("cycle", way=name, **{key: found[key] for key in ("lost_s", "durable_s", "blocks_s", "quiet_step_s")})
            if isinstance(way, Careful):
                way.clean_up()
    ways["save"].close()
    shutil.rmtree(folder)
    tell("over")


class ByUs(Peer):
    """Saves with everystep to memory and to the folder, for the calibration."""

    def __init__(self, training: Training, folder: Path) -> None:
        import ckpt

        super().__init__(training, folder)
        tiers = [ckpt.Tier(str(folder / "run"), every=NEVER, keep=3)]
        self.checkpointer = ckpt.Checkpointer(
            {"model": training.model, "optim": training.optim}, tiers, memory=ckpt.Memory(linger_s=0.0)
        )
        self.checkpointer.restore(default=0)

    def save(self, step: int) -> Callable[[], None]:
        handle = self.checkpointer.save(step)
        return lambda: handle.wait_durable(LIMIT_S) and None

    def restore(self) -> None:
        self.checkpointer.restore()

    def to_memory(self) -> Peer:
        return _ToMemory(self)

    def close(self) -> None:
        self.checkpointer.close()


class _ToMemory(Peer):
    def __init__(self, ours: ByUs) -> None:
        super().__init__(ours.training, ours.folder)
        self._ours = ours

    def save(self, step: int) -> Callable[[], None]:
        from ckpt.errors import SkippedError

        handle = self._ours.checkpointer.step(step)
        assert handle is not None

        def wait() -> None:
            with contextlib.suppress(SkippedError):  # the first saves, while memory is being prepared
                handle.wait_staged(LIMIT_S)

        return wait

    def restore(self) -> None:
        self._ours.restore()


def reference(asked: Json) -> None:
    """Train without disturbance or saving, and report the weights after each of these step counts."""
    tell = Teller(asked["pipe"])
    training, batches = build(asked["size"])
    step = 0
    for until in asked["steps"]:
        took = timed_steps(training, batches, step + 1, until - step)
        step = until
        tell("digest", step=step, digest=training.digest())
        for first in range(0, len(took), 100):  # a line must fit into one write
            tell("took", quiet=took[first : first + 100])
    tell("over")


if __name__ == "__main__":
    {"train": train, "calibrate": calibrate, "reference": reference}[sys.argv[1]](json.loads(sys.argv[2]))
