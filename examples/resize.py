"""Train on four ranks, kill them all, and continue with two, three and one rank: each restore returns the same bits.

    python examples/resize.py
    python examples/resize.py --ranks 2,3,1 --steps-per-round 8 --keep runs/resize

A small GPT under FSDP2, started with torchrun. In each round all ranks are killed with SIGKILL in the middle of a step.
The next round continues with another number of ranks: from memory, or from disk if the writers were killed too. Two
things are then compared, bit for bit:

- Right after each restore, every tensor of model and optimizer, gathered from all ranks, with the note that the killed
  ranks made for that step.
- Every loss, and the tensors at each change and at the end, with a reference without everystep: plain PyTorch trains
  the same steps with the same numbers of ranks, and passes on the whole state with `get_state_dict`, `torch.save` and
  `set_state_dict`. The numbers of ranks must be the same, since another order of summation gives other bits.

Exit code: 0 if everything is equal and no acknowledged step was lost, 1 if not, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import ckpt

CONTEXT, BATCH = 32, 24
WIDTH, HEADS, LAYERS = 100, 4, 2  # 100 divides evenly among 4 ranks, and unevenly among 3
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()  # this file
LINGER_S = 60.0  # if this process is killed, the writers exit after this time
TRAINERS, EVERYTHING = "trainers", "+ writers"

# -- the training program: what torchrun starts --


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [h.unflatten(2, (HEADS, -1)).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, dim=2)]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Maps bytes to logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def build() -> dict[str, Any]:
    """Build the complete training state, sharded across the current ranks."""
    torch.manual_seed(0)
    model = GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 1000)
    return {"model": model, "optim": optim, "sched": sched, "meta": {"losses": []}}


def batch(step: int) -> Tensor:
    """Return this rank's share of a batch. The batch depends only on the step, not on the number of ranks."""
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return TEXT[mine + torch.arange(CONTEXT + 1)]


def train_step(state: dict[str, Any], step: int) -> None:
    """Run one update, and record the mean loss over the ranks in the state."""
    window = batch(step)
    logits = state["model"](window[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    state["optim"].zero_grad()
    loss.backward()
    state["optim"].step()
    state["sched"].step()
    total = loss.detach()
    dist.all_reduce(total)
    state["meta"]["losses"].append(total.item() / dist.get_world_size())


def train(folder: str, number: str, steps: str, every: str) -> None:
    """Train one round. Users need only the lines with `cp`, which do not mention ranks; the rest compares."""
    prepare_torch()
    dist.init_process_group("gloo")
    state, saves = build(), list[ckpt.Save]()
    notes = Path(folder) / f"round-{number}"
    tiers = [ckpt.Tier(f"{folder}/run", every=int(every), keep=3)]
    with ckpt.Checkpointer(state, tiers, memory=ckpt.Memory(linger_s=LINGER_S)) as cp:
        began = time.perf_counter()
        start = cp.restore(default=0)
        report("restored", step=start, tier=cp.last_restore.tier, seconds=time.perf_counter() - began)
        note(notes / "restored.json", state)
        for step in range(start, int(steps)):
            train_step(state, step)
            note(
                notes / f"step-{step + 1}.json", state
            )  # before it can be saved, so that every restored step has a note
            save = cp.step(step + 1)
            saves = [*saves[-50:], *([save] if save is not None else [])]
            report("trained", step=step + 1, staged=newest(saves, "staged"), committed=newest(saves, "durable"))
    dist.destroy_process_group()


def newest(saves: list[ckpt.Save], status: str) -> int:
    """Return the newest step with this status, or 0 if there is none."""
    statuses = ("staged", "durable") if status == "staged" else ("durable",)
    return max((save.step for save in saves if save.status in statuses), default=0)


def refer(folder: str) -> None:
    """Train the same segments with plain PyTorch, each with its number of ranks, as the reference."""
    prepare_torch()
    home, rank = Path(folder) / "reference", int(os.environ["RANK"])
    for number, (ranks, start, stop) in enumerate(json.loads((home / "segments.json").read_text())):
        if rank >= ranks:
            continue
        meeting = dist.FileStore(str(home / f"meeting-{number}"), ranks)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
        state = build()
        if start:
            take_over(state, home / "whole.pt")
        for step in range(start, stop):
            train_step(state, step)
        note(home / f"step-{stop}.json", state)
        hand_over(state, home / "whole.pt")
        dist.barrier()
        dist.destroy_process_group()


def hand_over(state: dict[str, Any], path: Path) -> None:
    """Save the whole state to one file with PyTorch alone."""
    model, optim = get_state_dict(state["model"], state["optim"], options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save({"model": model, "optim": optim, "sched": state["sched"].state_dict(), "meta": state["meta"]}, path)


def take_over(state: dict[str, Any], path: Path) -> None:
    whole = torch.load(path, weights_only=True)
    parts = {"model_state_dict": whole["model"], "optim_state_dict": whole["optim"]}
    set_state_dict(state["model"], state["optim"], **parts, options=StateDictOptions(full_state_dict=True))
    state["sched"].load_state_dict(whole["sched"])
    state["meta"] = whole["meta"]


def prepare_torch() -> None:
    torch.set_num_threads(1)  # torchrun sets one thread for several ranks, and leaves all cores for one
    torch.use_deterministic_algorithms(True)


def note(path: Path, state: dict[str, Any]) -> None:
    """Write the losses and a digest of every whole tensor to a file. All ranks take part, and rank 0 writes."""
    names = {param: name for name, param in state["model"].named_parameters()}
    tensors = {f"model.{name}": param for name, param in state["model"].state_dict().items()}
    for param, values in state["optim"].state.items():
        tensors |= {f"optim.{names[param]}.{key}": value for key, value in values.items()}
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, {"losses": state["meta"]["losses"], "tensors": {name: digest(t) for name, t in whole.items()}})


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bits."""
    about = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(about + tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def write(path: Path, content: object) -> None:
    """Write a file atomically, so that SIGKILL leaves all of it or nothing."""
    path.with_suffix(".new").write_text(json.dumps(content))
    os.replace(path.with_suffix(".new"), path)


def report(event: str, **facts: Any) -> None:
    """Write an event to stdout in one write, so that ranks do not mix their lines."""
    line = json.dumps({"event": event, "rank": dist.get_rank(), **facts})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


# -- the results --


class ResizeError(Exception):
    """Raised when training did not do what the example needs."""


@dataclass
class Round:
    """One round, from the start of all ranks to their end."""

    number: int
    ranks: int
    killed: str = ""  # the processes killed, "" if the round ended by itself
    start: int = 0  # the step that was restored
    reached: int = 0  # the last step that a rank finished
    acknowledged: int = 0  # the newest step that surviving processes had acknowledged
    tier: str | None = None
    seconds: float = 0.0  # in restore(), the slowest rank

    @property
    def place(self) -> str:
        return {None: "nothing", "memory": "memory"}.get(self.tier, "disk")


def segments(rounds: list[Round]) -> list[tuple[Round, int, int]]:
    """Return the parts of the final state: round, steps before, last step. Steps beyond a restored step are dropped."""
    found: list[tuple[Round, int, int]] = []
    for one in rounds:
        found = [(earlier, start, min(stop, one.start)) for earlier, start, stop in found if start < one.start]
        found.append((one, one.start, one.reached))
    return found


def verdict(console: Console, folder: Path) -> int:
    """Compare all notes in a folder, print the result, and return the exit code."""
    rounds = [Round(**one) for one in json.loads((folder / "rounds.json").read_text())]
    table = Table("ranks", "steps", "killed", "restored", "from", "restore()", "losses", "tensors", box=None)
    problems: list[str] = []
    for one in rounds:
        wrong = examine(folder, rounds, one)
        problems += wrong
        restored = (f"step {one.start}", one.place, f"{one.seconds:.2f} s") if one.number > 1 else ("", "", "")
        equal = ["differ" if any(w.startswith(kind) for w in wrong) else "equal" for kind in ("loss", "tensor")]
        table.add_row(str(one.ranks), f"{one.start + 1} to {one.reached}", one.killed, *restored, *equal)
    console.print(table)
    for problem in problems[:10]:
        console.print(f"wrong: {problem}", style="red", highlight=False, soft_wrap=True)
    if problems:
        console.print(f"FAILED: {len(problems)} differences.", style="bold red", highlight=False)
        return 1
    final = json.loads((folder / f"round-{rounds[-1].number}/step-{rounds[-1].reached}.json").read_text())
    text = f"All {len(final['losses'])} losses and all {len(final['tensors'])} tensors are equal, bit for bit."
    console.print(text, style="bold green", highlight=False)
    return 0


def examine(folder: Path, rounds: list[Round], one: Round) -> list[str]:
    """Return the errors of a round, in its restore and in its part of the final state."""
    here = folder / f"round-{one.number}"
    problems: list[str] = []
    if one.number > 1:
        before = rounds[one.number - 2]
        if one.start < before.acknowledged:
            problems.append(f"step {before.acknowledged} was acknowledged, and step {one.start} restored")
        if one.place != (place := "memory" if before.killed == TRAINERS else "disk"):
            problems.append(f"step {one.start} came from {one.place}, not from {place}")
        expected = noted(folder, rounds[: one.number - 1], one.start)
        found = differences(expected, here / "restored.json")
        problems += [f"{each}, restored at step {one.start} by {one.ranks} ranks" for each in found]
    for _, _, stop in (segment for segment in segments(rounds) if segment[0] is one):
        found = differences(folder / f"reference/step-{stop}.json", here / f"step-{stop}.json")
        problems += [f"{each}, at step {stop} of the reference" for each in found]
    return problems


def noted(folder: Path, earlier: list[Round], step: int) -> Path:
    """Return the note about a step from the last round that trained it."""
    for one in reversed(earlier):
        if one.start < step <= one.reached:
            return folder / f"round-{one.number}/step-{step}.json"
    raise ResizeError(f"step {step} was restored, and never trained")


def differences(expected: Path, found: Path) -> list[str]:
    """Return the losses and tensors in which two notes differ; empty if they are equal."""
    mine, theirs = (json.loads(path.read_text()) for path in (expected, found))
    problems = []
    if len(mine["losses"]) != len(theirs["losses"]):
        problems.append(f"losses: {len(theirs['losses'])}, not {len(mine['losses'])}")
    pairs = enumerate(zip(mine["losses"], theirs["losses"], strict=False), start=1)
    problems += [f"loss of step {step}: {y!r}, not {x!r}" for step, (x, y) in pairs if x != y]
    names = sorted(mine["tensors"].keys() | theirs["tensors"].keys())
    return problems + [f"tensor {name}" for name in names if mine["tensors"].get(name) != theirs["tensors"].get(name)]


# -- the rounds --


class Resize:
    """Starts jobs, one at a time, watches them and kills them.

    `home`: the folder for sockets and temporary files; `folder`: for checkpoints and notes; `steps`: per round.
    """

    def __init__(self, console: Console, home: Path, folder: Path, ranks: list[int], steps: int) -> None:
        self.console, self.home, self.folder, self.steps = console, home, folder, steps
        self.rounds = [Round(number, count) for number, count in enumerate(ranks, start=1)]
        for one in self.rounds[:-1]:
            one.killed = TRAINERS if one.number % 2 else EVERYTHING
        self._job: subprocess.Popen[bytes] | None = None
        self._log = folder / "job.log"  # stderr of the last job

    def play(self) -> None:
        """Run all rounds and the reference. Raise ResizeError if a job ends in an unexpected way."""
        goal = 0
        for one in self.rounds:
            goal += self.steps
            self._play(one, goal)
            goal = one.reached
        self.say("The reference: the same steps by the same numbers of ranks, without everystep.")
        (self.folder / "reference").mkdir()
        write(self.folder / "rounds.json", [asdict(one) for one in self.rounds])
        plan = [(one.ranks, start, stop) for one, start, stop in segments(self.rounds)]
        write(self.folder / "reference/segments.json", plan)
        list(self._lines(max(one.ranks for one in self.rounds), "refer", self.folder))
        self._expect(0)

    def _play(self, one: Round, goal: int) -> None:
        """Train until the ranks have reached the goal, and kill them. The last round ends by itself."""
        self.say(f"Round {one.number}: {one.ranks} rank{'s' * (one.ranks > 1)} ...")
        every, steps = max(2, self.steps // 3), goal + 500 if one.killed else goal
        newest: dict[int, dict[str, Any]] = {}
        struck = False
        for line in self._lines(one.ranks, "train", self.folder, one.number, steps, every):
            if line["event"] == "restored":
                one.start, one.tier, one.seconds = line["step"], line["tier"], max(one.seconds, line["seconds"])
                continue
            newest[line["rank"]] = line
            self._note_progress(one, list(newest.values()))
            if one.killed and not struck and one.reached >= goal and one.acknowledged > one.start:
                self._kill(one.killed)
                struck = True
        self._expect(-signal.SIGKILL if one.killed else 0)
        began = f"restored step {one.start} from {one.place}, " if one.number > 1 else ""
        ended = f", killed with SIGKILL: trainers{' and writers' * (one.killed == EVERYTHING)}" if one.killed else ""
        self.say(f"  {began}trained to step {one.reached}{ended}")

    def _note_progress(self, one: Round, newest: list[dict[str, Any]]) -> None:
        """Update the round from the last events of its ranks. Memory has a step once all ranks have staged it."""
        one.reached = max(line["step"] for line in newest)
        one.acknowledged = max(line["committed"] for line in newest)
        if one.killed == TRAINERS and len(newest) == one.ranks:
            one.acknowledged = max(one.acknowledged, min(line["staged"] for line in newest))

    def _kill(self, killed: str) -> None:
        """Kill torchrun first, then the ranks (so that it ignores them), and the writers last if requested."""
        if self._job is not None:
            self._job.kill()
        end = time.monotonic() + 10.0
        while victims := [p for p in self.processes() if killed == EVERYTHING or not is_writer(p)]:
            for process in sorted(victims, key=is_writer):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if time.monotonic() > end:
                raise ResizeError("cannot kill a process")
            time.sleep(0.01)

    def _lines(self, ranks: int, part: str, *arguments: object) -> Iterator[dict[str, Any]]:
        """Start a job, and yield the events of its ranks until it ends."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        with self._log.open("wb") as errors:
            self._job = subprocess.Popen(
                [*torchrun, __file__, part, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches only this process, which cleans up
                env={
                    **os.environ,
                    "CKPT_RUNTIME_DIR": str(self.home),  # so that only this job finds its writers
                    "TMPDIR": str(self.home),
                    "OMP_NUM_THREADS": "1",
                    "OMP_WAIT_POLICY": "passive",
                },
            )
        assert self._job.stdout is not None
        with self._job.stdout as stdout:
            yield from map(json.loads, stdout)
        self._job.wait()

    def _expect(self, code: int) -> None:
        assert self._job is not None
        if self._job.returncode != code:
            shown = self._log.read_text()[:4000]  # the first error comes first
            raise ResizeError(f"a job ended with exit code {self._job.returncode}:\n{shown}")

    def processes(self) -> list[psutil.Process]:
        """Return all processes started here, whoever their parents are now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("CKPT_RUNTIME_DIR") == str(self.home):
                    found.append(process)
        return found

    def stop(self) -> None:
        """Leave no process behind."""
        self._kill(EVERYTHING)
        if self._job is not None:
            self._job.wait()

    def say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, highlight=False, soft_wrap=True)


def is_writer(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name() in ("ckpt-writer", "ckpt-leaving")
    return False


def leave() -> None:
    """Exit without ending the interpreter: a thread of gloo that releases a tensor during that aborts the process.

    Seen sometimes with torch 2.13 and Python 3.11: "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,2,3,1", help="number of ranks in each round (%(default)s)")
    parser.add_argument("--steps-per-round", type=int, default=12, metavar="STEPS", help="at least 4 (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep checkpoints and notes in this new folder")
    options = parser.parse_args()
    try:
        options.ranks = [int(word) for word in options.ranks.split(",")]
    except ValueError:
        parser.error("--ranks must be numbers separated by commas")
    if len(options.ranks) < 2 or not all(1 <= ranks <= 8 for ranks in options.ranks):
        parser.error("--ranks must be two numbers or more, each from 1 to 8")
    if options.steps_per_round < 4:
        parser.error("--steps-per-round must be at least 4")
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep {options.keep} exists already: name a new folder")
    return options


def main() -> int:
    options = parse()
    console = Console()
    # Clean up on every signal except SIGKILL.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    home = Path(tempfile.mkdtemp(prefix="everystep-resize-"))
    folder: Path = home / "kept" if options.keep is None else options.keep.absolute()
    folder.mkdir(parents=True)
    resize = Resize(console, home, folder, options.ranks, options.steps_per_round)
    try:
        resize.play()
        return verdict(console, folder)
    except ResizeError as error:
        console.print(f"FAILED: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # cleanup is quick, and must not be interrupted
        resize.stop()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
        leave()
    elif sys.argv[1:2] == ["refer"]:
        refer(*sys.argv[2:])
        leave()
    else:
        sys.exit(main())
