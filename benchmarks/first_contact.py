"""The first minutes on a GPU: one question after the other, the most important first, one JSON line per answer.

    python benchmarks/first_contact.py --json found.jsonl            # continues where it was interrupted
    python benchmarks/first_contact.py --only capture killed --small # some of them, with a small state

Each question runs in its own process with its own time limit, so a hang or crash affects only its line. `ok` is true
if the answer is as promised; figures have no `ok`. The script needs only torch. With SIMULATED_DEVICE= in the
environment it runs on the device of `tests/device`, where figures have no meaning.

Exit status 1 if any answer is not ok, or is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if "SIMULATED_DEVICE" in os.environ:  # to test the script itself; torch looks for a device during its import
    sys.path.append(str(HERE.parent / "tests/device"))
    import simulated

    simulated.install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import ckpt  # noqa: E402

Json = dict[str, Any]
State = dict[str, Any]

PROBES: dict[str, tuple[Callable[[], Json], float]] = {}
SMALL = bool(os.environ.get("FIRST_CONTACT_SMALL"))
WIDTH = 256 if SMALL else 8192
LAYERS = int(os.environ.get("FIRST_CONTACT_LAYERS", "4" if SMALL else "8"))  # 0.8 GB of state each, at full width
TINY = 256 if SMALL else 1024
STEPS = int(os.environ.get("FIRST_CONTACT_STEPS", "6" if SMALL else "40"))
# No compiler builds kernels for the simulated device, and no collective library supports it.
SIMULATED = "SIMULATED_DEVICE" in os.environ
COMPILER, COLLECTIVES = ("aot_eager", "gloo") if SIMULATED else ("inductor", "nccl")


def probe(limit_s: float) -> Callable[[Callable[[], Json]], Callable[[], Json]]:
    """Register a question; they run in the order of this file."""

    def enter(work: Callable[[], Json]) -> Callable[[], Json]:
        PROBES[work.__name__] = work, limit_s
        return work

    return enter


# -- a training --


def built(width: int = TINY, layers: int = 1, **settings: Any) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, device="cuda") for _ in range(layers)))
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "fused": True, **settings})}


def train(state: State, batch: int = 64) -> None:
    state["optim"].zero_grad()
    first = next(state["model"].parameters())
    state["model"](torch.ones(batch, first.shape[-1], device="cuda")).square().mean().backward()
    state["optim"].step()


def digest(state: State) -> float:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in state["model"].parameters()]
    return float(sum(p.double().sum() + p.double().abs().sum() for p in whole))


@contextlib.contextmanager
def opened(state: State, name: str) -> Iterator[ckpt.Checkpointer]:
    with ckpt.Checkpointer(state, triggers=None, options=ckpt.Options(name=f"contact-{name}-{os.getpid()}")) as cp:
        cp.restore(default=0)
        yield cp


def settled(cp: ckpt.Checkpointer, state: State) -> int:
    """Save until all memory is allocated and page-locked, which is not measured; return the last step."""
    stager, end = cp._run.stager, time.monotonic() + 60
    for step in range(1, 1000):
        train(state)
        with contextlib.suppress(ckpt.errors.SkippedError):
            cp.save(step).wait_staged(120)
        arena = stager.arena
        ready = arena is not None and arena.ready == arena.slots
        if (ready and len(stager.page_locks.held) == arena.slots) or time.monotonic() > end:  # type: ignore[union-attr]
            break
        time.sleep(0.2)
    return step


def spread(seconds: list[float]) -> Json:
    ordered = sorted(seconds)
    at_99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"median_ms": 1e3 * statistics.median(ordered), "p99_ms": 1e3 * at_99, "most_ms": 1e3 * ordered[-1]}


def restored(run: str, step: int, layers: int = 1) -> State:
    """Return the weights of a step in a twin of the state."""
    twin = built(layers=layers)
    twin["model"].load_state_dict(ckpt.load(run, step=step).sub("model").all())
    return twin


def kept(
    state: State, train_once: Callable[[], None], after: Callable[[], None] = lambda: None, steps: int = 10
) -> Json:
    """Train and save each step, with `after` right after its save: does every checkpoint equal its step?"""
    wanted, layers = dict[int, float](), len(state["model"])
    with tempfile.TemporaryDirectory() as folder:
        tiers = [ckpt.Tier(folder, every=1)]
        with ckpt.Checkpointer(state, tiers, triggers=None) as cp:
            cp.restore(default=0)
            for step in range(1, steps + 1):
                train_once()
                wanted[step] = digest(state)
                save = cp.step(step)
                after()
                assert save is not None
                save.wait_durable(60)
        torn = sum(digest(restored(folder, step, layers)) != value for step, value in wanted.items())
    return {"ok": torn == 0, "torn": torn, "of": steps}


# -- the questions --


@probe(60)
def facts() -> Json:
    """Which device is this?"""
    free, total = torch.cuda.mem_get_info(0)
    card = torch.cuda.get_device_properties(0)
    return {
        "card": card.name,
        "card_gb": total / 1e9,
        "free_gb": free / 1e9,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


@probe(300)
def tests() -> Json:
    """Do the tests of the device path pass?"""
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--timeout", "90", "-p", "no:cacheprovider"]
    file = HERE.parent / "tests/promises/test_gpu.py"
    found = subprocess.run([*words, str(file)], capture_output=True, text=True, check=False)
    lines = found.stdout.strip().splitlines()
    red = [line.split(" ")[1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"ok": found.returncode == 0, "said": lines[-1:] or found.stderr[-300:], "red": red[:20]}


@probe(120)
def capture() -> Json:
    """Does a graph captured in torch's usual mode right after step() work, and does the save exist?"""
    state, spoilt, lost = built(), list[str](), 0
    with opened(state, "capture") as cp:
        train(state)
        cp.save(1).wait_staged(60)
        for step in range(2, 22):
            train(state)
            save, graph, x = cp.step(step), torch.cuda.CUDAGraph(), torch.ones(64, device="cuda")
            try:
                with torch.cuda.graph(graph):
                    x.mul_(2)
                    time.sleep(0.005)
            except RuntimeError as error:
                spoilt.append(str(error).splitlines()[0][:200])
            try:
                assert save is not None
                save.wait_staged(60)
            except ckpt.CheckpointError:
                lost += 1
    return {"ok": not spoilt and not lost, "spoilt": len(spoilt), "lost": lost, "said": spoilt[:1], "of": 20}


@probe(120)
def captured_before() -> Json:
    """Does a snapshot equal its step if the optimizer is in a graph captured before?"""
    state = built(lr=torch.tensor(1e-1, device="cuda"), capturable=True)
    train(state)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        state["optim"].step()
    return kept(state, graph.replay, graph.replay)


@probe(120)
def scaler() -> Json:
    """Does step() wait for the device, with a GradScaler in the state?"""
    took: Json = {}
    for name in ("without", "with"):
        state = built()
        if name == "with":
            state["scaler"] = torch.amp.GradScaler("cuda")
            state["scaler"].scale(torch.ones((), device="cuda"))
        with opened(state, name) as cp:
            train(state)
            cp.save(1).wait_staged(60)
            train(state)
            torch.cuda._sleep(200_000_000)  # the device is about 0.1 s behind
            began = time.perf_counter()
            cp.step(2)
            took[name] = 1e3 * (time.perf_counter() - began)
            torch.cuda.synchronize()
    return {"ok": took["with"] < took["without"] + 20, "step_ms": took}


@probe(240)
def locking() -> Json:
    """How fast is memory page-locked, and how long do kernel launches wait during that, by piece size?"""
    runtime: Any = torch.cuda.cudart()
    total = 64 << 20 if SMALL else 8 << 30
    memory, found = torch.empty(total, dtype=torch.uint8), dict[str, Json]()
    memory.fill_(1)
    x = torch.ones(64, device="cuda")
    for piece in (total, 1 << 30, 256 << 20, 64 << 20, 16 << 20):
        waits, ended = [0.0], threading.Event()

        def launch(waits: list[float] = waits, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                began = time.perf_counter()
                x.add_(1)
                waits.append(time.perf_counter() - began)
                time.sleep(0.0005)

        thread = threading.Thread(target=launch)
        thread.start()
        began, starts = time.perf_counter(), range(0, total, piece)
        errors = [int(runtime.cudaHostRegister(memory.data_ptr() + at, min(piece, total - at), 1)) for at in starts]
        took = time.perf_counter() - began
        ended.set()
        thread.join()
        for at, error in zip(starts, errors, strict=True):
            if error == 0:
                runtime.cudaHostUnregister(memory.data_ptr() + at)
        found[f"{piece >> 20} MiB"] = {
            "gb_s": total / took / 1e9,
            "longest_launch_ms": 1e3 * max(waits),
            "refused": sum(map(bool, errors)),
        }
    return {"pieces": found}


TRAINER = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[3])
import first_contact as contact, ckpt
began = time.perf_counter()
state = contact.built(contact.WIDTH, contact.LAYERS)
run, way = sys.argv[1:3]
with ckpt.Checkpointer(state, ckpt.Tier(run, every=1000)) as cp:
    opened = time.perf_counter()
    step = cp.restore(default=0)
    back = time.perf_counter()
    print("START", step, contact.digest(state) if step else 0.0, opened - began, back - opened, flush=True)
    stalls = []
    for step in range(step + 1, step + 9):
        contact.train(state)
        at = time.perf_counter()
        save = cp.step(step)
        stalls.append(time.perf_counter() - at)
        save.wait_staged(120)
    print("DONE", step, contact.digest(state), max(stalls), stalls[-1], flush=True)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "fault":
        import torch
        torch.zeros(4, device="cuda")[torch.tensor([10], device="cuda")]
        torch.cuda.synchronize()
"""


def trainer(folder: str, way: str) -> tuple[int, dict[str, list[float]]]:
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, folder, way, str(HERE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("START", "DONE"))]
    if not rows:
        raise RuntimeError(done.stderr[-1000:])
    return done.returncode, {row[0]: [float(x) for x in row[1:]] for row in rows}


@probe(420)
def killed() -> Json:
    """SIGKILL and restore from memory, bit for bit: how long do opening, restoring and the first steps take?"""
    with tempfile.TemporaryDirectory() as folder:
        code, first = trainer(folder, "kill")
        _, second = trainer(folder, "end")
    same = second["START"][:2] == first["DONE"][:2]
    gb, (_, _, open_s, restore_s) = 12e-9 * (WIDTH * WIDTH + WIDTH) * LAYERS, second["START"]
    longest = {"first_longest_step_ms": 1e3 * first["DONE"][2], "longest_step_ms": 1e3 * second["DONE"][2]}
    times = {"open_s": open_s, "restore_s": restore_s, "gb": gb, "gb_s": gb / restore_s}
    return {"ok": same and code == -signal.SIGKILL, **times, **longest}


@probe(420)
def fault() -> Json:
    """After a device-side assertion, does every staged step exist, and does the process end?"""
    with tempfile.TemporaryDirectory() as folder:
        code, first = trainer(folder, "fault")
        _, second = trainer(folder, "end")
    return {"ok": second["START"][:2] == first["DONE"][:2] and code not in (0, None), "code": code}


@probe(300)
def every_step() -> Json:
    """What does saving every step cost, once all memory is allocated?"""
    state = built(WIDTH, LAYERS)
    with opened(state, "every-step") as cp:
        step = settled(cp, state)
        skipped, blocks = cp.stats.skipped, list[float]()
        periods: dict[bool, list[float]] = {True: [], False: []}
        for block in range(8):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                train(state, 4096 if not SMALL else 64)
                step += 1
                if block % 2:
                    at = time.perf_counter()
                    cp.step(step)
                    blocks.append(time.perf_counter() - at)
            torch.cuda.synchronize()
            periods[bool(block % 2)].append((time.perf_counter() - began) / STEPS)
        return {
            "ratio": statistics.median(periods[True]) / statistics.median(periods[False]),
            "step_ms": 1e3 * statistics.median(periods[False]),
            "blocks": spread(blocks),
            "saves": len(blocks),
            "skipped": cp.stats.skipped - skipped,
        }


@probe(240)
def copies() -> Json:
    """How fast does a snapshot leave the device, compared with one pinned buffer, and how fast does it return?"""
    size = (64 << 20) if SMALL else (4 << 30)
    here, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    rates = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - began) / 1e9)
    del here, there
    state, took = built(WIDTH, LAYERS), list[float]()
    with opened(state, "copies") as cp:
        nbytes = 0
        for step in range(1, 12):
            train(state)
            torch.cuda.synchronize()
            began = time.perf_counter()
            save = cp.step(step)
            assert save is not None
            save.wait_staged(120)
            took.append(time.perf_counter() - began)
            time.sleep(0.5)  # memory is being page-locked
        nbytes, back = 12 * (WIDTH * WIDTH + WIDTH) * LAYERS, list[float]()
        for _ in range(4):
            began = time.perf_counter()
            cp.restore()
            torch.cuda.synchronize()
            back.append(time.perf_counter() - began)
    return {
        "raw_gb_s": max(rates),
        "snapshot_gb_s": nbytes / min(took) / 1e9,
        "first_s": took[0],
        "restore_gb_s": nbytes / min(back) / 1e9,
        "restores_s": back,
        "share": nbytes / min(took) / 1e9 / max(rates),
    }


@probe(120)
def orders() -> Json:
    """What do channels-last or transposed weights cost, or copies that end at an odd address?"""
    size = (16 << 20) if SMALL else (1 << 30)
    here = torch.empty(size + 256, dtype=torch.uint8, pin_memory=True)
    plain = torch.zeros(size // 4, device="cuda")
    images = plain.view(-1, 256, 4, 4)
    sources = {
        "contiguous": (0, plain),
        "from_4_bytes_on": (4, plain),
        "channels_last": (0, images.to(memory_format=torch.channels_last)),
        "transposed": (0, plain.view(256, -1).t()),
    }
    found: Json = {}
    for name, (at, source) in sources.items():
        target, rates = here[at : at + size].view(torch.float32).view(source.shape), list[float]()
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(size / (time.perf_counter() - began) / 1e9)
        found[f"{name}_gb_s"] = max(rates)
    return found


@probe(240)
def many() -> Json:
    """What do 2,000 small tensors cost step(), and the staging thread?"""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32, device="cuda") for _ in range(40 if SMALL else 250)]
    state: State = {"model": nn.Sequential(*layers)}
    state["optim"] = torch.optim.AdamW(state["model"].parameters(), capturable=True)
    with opened(state, "many") as cp:
        blocks, staged = list[float](), list[float]()
        for step in range(1, 3 + STEPS):
            train(state)
            torch.cuda.synchronize()
            began = time.perf_counter()
            save = cp.step(step)
            blocks.append(time.perf_counter() - began)
            assert save is not None
            save.wait_staged(60)
            staged.append(time.perf_counter() - began)
    return {"tensors": 2 * len(layers) * 4, "blocks": spread(blocks[2:]), "staged": spread(staged[2:])}


@probe(240)
def mixed() -> Json:
    """With autocast, a GradScaler, and updates queued right after the save: does every snapshot equal its step?"""
    state, scaler = built(), torch.amp.GradScaler("cuda", init_scale=128.0)
    state["scaler"] = scaler

    def train_once() -> None:
        state["optim"].zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = state["model"](torch.ones(64, TINY, device="cuda")).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(state["optim"])
        scaler.update()

    return kept(state, train_once)


@probe(300)
def compiled() -> Json:
    """The same with a compiled model and a compiled update, with the next one queued right after the save."""
    torch._dynamo.config.suppress_errors = False
    state = built(fused=False, foreach=True, lr=torch.tensor(1e-2, device="cuda"), capturable=True)
    state["model"].compile(backend=COMPILER)
    update = torch.compile(state["optim"].step, backend=COMPILER)

    def train_once() -> None:
        state["optim"].zero_grad()
        state["model"](torch.ones(64, TINY, device="cuda")).square().mean().backward()
        update()

    return kept(state, train_once, update)


@probe(240)
def sharded() -> Json:
    """The same with FSDP2 on one rank, and updates queued right after the save."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(COLLECTIVES, init_method=f"file://{folder}/met", rank=0, world_size=1)
        try:
            model = built(layers=2)["model"]
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            state: State = {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)}
            return kept(state, lambda: train(state), state["optim"].step)
        finally:
            dist.destroy_process_group()


# -- running the questions --


def ask(name: str, limit_s: float) -> Json:
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--probe", name], capture_output=True, text=True, check=False, timeout=limit_s
        )
        rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found = (
            json.loads(rows[-1]) if rows else {"ok": False, "error": f"status {done.returncode}: {done.stderr[-1500:]}"}
        )
    except subprocess.TimeoutExpired:
        found = {"ok": False, "error": f"no answer within {limit_s:g} s"}
    return {"question": name, "asks": PROBES[name][0].__doc__, "took_s": round(time.monotonic() - began, 1), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append results there, and skip questions with results")
    parser.add_argument("--only", nargs="*", choices=PROBES, help="these questions")
    parser.add_argument("--small", action="store_true", help="a small state, to test the script itself")
    parser.add_argument("--layers", type=int, help="layers of the large state, 0.8 GB each (default: 8)")
    parser.add_argument("--steps", type=int, help="steps of each timed block (default: 40)")
    parser.add_argument("--probe", choices=PROBES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        print(json.dumps(PROBES[given.probe][0]()), flush=True)
        return 0
    if given.small:
        os.environ["FIRST_CONTACT_SMALL"] = "1"
    for name, value in (("LAYERS", given.layers), ("STEPS", given.steps)):
        if value is not None:
            os.environ[f"FIRST_CONTACT_{name}"] = str(value)
    lines = given.json.read_text().splitlines() if given.json and given.json.exists() else []
    answers = {found["question"]: found for found in map(json.loads, lines)}
    for name, (_, limit_s) in PROBES.items():
        if name in answers or (given.only and name not in given.only):
            continue
        found = answers[name] = ask(name, limit_s)
        print(json.dumps(found), flush=True)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return int(any(found.get("ok") is False for found in answers.values()))


if __name__ == "__main__":
    sys.exit(main())
