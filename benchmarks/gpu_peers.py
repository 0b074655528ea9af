"""Cost of one save for a training on a GPU, with each library: the same model, GPU and disk, one process each.

    make bench-gpu-peers       or: python benchmarks/gpu_peers.py [--json FILE] [--only NAME ...] [--state-gib N]
    python benchmarks/gpu_peers.py --device cpu --only everystep torch.save     tests the script without a GPU

The model is that of `gpu.py`: a GPT in bfloat16 by autocast with fused AdamW. Each of several cycles has some steps
without a save and then one with a save; training continues until two steps after the checkpoint is complete.

- `call`: how long the call blocks. `lost`: the extra time of the save and all steps until then, compared with as many
  steps without a save.
- `complete`: from the call until the library reports a complete checkpoint. `peers/` defines what that means.
- `restore`: in the saving process, from the newest checkpoint, or from memory if the library supports it.
- `equal`: True if every bit of all tensors is restored. They are overwritten before each restore.

A library that is missing or fails gets a line with the error. Exit status 1 if a restored tensor differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu import Autocast, Device, chosen, holds, step_s
from peers import MODULES, Peer, peer_class
from workload import SMALL

WANTED = ("everystep", "torch.save", "DCP", "DCP async, thread", "torch_checkpointing", "DLRover")
LEAST_STEP_S = 0.15
CYCLES, QUIET = 4, 6
LIMIT_S = 120


def trained(device: Device, state_gib: float) -> Autocast:
    """Return a training with this much state, and a batch that makes a step long enough to hide the copy."""
    if not device.is_gpu:
        return Autocast.of(SMALL, "cpu")
    training = Autocast.of(chosen(state_gib * 2**30), "cuda")
    while step_s(device, training) < LEAST_STEP_S and holds(device, training, 2 * training.size.batch):
        pass
    return training


def cycle(device: Device, training: Autocast, peer: Peer, step: int) -> dict[str, float]:
    """Measure one save, and the steps until two after its end, in seconds."""
    usual = step_s(device, training, QUIET, each=True)
    device.settle()
    ended, done = threading.Event(), [0.0]
    began = time.perf_counter()
    wait = peer.save(step)
    call = time.perf_counter() - began

    def watch() -> None:
        wait()
        done[0] = time.perf_counter() - began
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    steps = after = 0
    while after < 2 and time.perf_counter() - began < LIMIT_S:
        after += ended.is_set()
        training.step()
        device.wait()
        steps += 1
    took = time.perf_counter() - began
    if not ended.is_set():
        raise TimeoutError(f"the checkpoint was not complete within {LIMIT_S} s")
    peer.tidy()
    return {"call_s": call, "lost_s": took - steps * usual, "complete_s": done[0], "step_s": usual}


def restored(device: Device, training: Autocast, restore: Any) -> dict[str, Any]:
    wanted = [tensor.detach().clone() for tensor in training.tensors()]
    training.spoil()
    device.settle()
    began = time.perf_counter()
    restore()
    device.settle()
    took = time.perf_counter() - began
    equal = all(map(torch.equal, wanted, training.tensors()))
    return {"seconds": took, "equal": equal}


def measured(name: str, kind: str, state_gib: float, folder: Path) -> dict[str, Any]:
    """Measure one library, in this process."""
    device = Device(kind)
    training = trained(device, state_gib)
    peer = peer_class(name)(training, folder)
    try:
        cycles = [cycle(device, training, peer, step) for step in range(1, CYCLES + 2)][
            1:
        ]  # the first cycle is the setup
        training.optim.zero_grad()
        peer.save(CYCLES + 2)()
        found = {"disk": restored(device, training, peer.restore)}
        if peer.memory:
            found["memory"] = restored(device, training, peer.restore_memory)
    finally:
        peer.close()
    middle = {key: statistics.median(one[key] for one in cycles) for key in cycles[0]}
    return {"state_gb": training.nbytes / 1e9, **middle, "cycles": cycles, "restore": found}


def ask(name: str, words: list[str]) -> dict[str, Any]:
    """Measure one library in its own process."""
    command = [sys.executable, __file__, "--peer", name, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"library": name, "error": f"no result within {LIMIT_S} s"}
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        return {"library": name, "error": (done.stderr or done.stdout)[-1500:]}
    return {"library": name, **json.loads(rows[-1])}


def row(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['library']:<22} failed: {found['error'].strip().splitlines()[-1][:90]}"
    restores = ", ".join(
        f"{source} {one['seconds']:.2f} s {'equal' if one['equal'] else 'DIFFERS'}"
        for source, one in found["restore"].items()
    )
    times = f"{1e3 * found['call_s']:>9.1f} {1e3 * found['lost_s']:>9.1f} {found['complete_s']:>9.2f}"
    return f"{found['library']:<22} {times}   {restores}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="*", choices=MODULES, default=list(WANTED), help="these libraries")
    parser.add_argument("--state-gib", type=float, default=3.0, help="weights and moments (default: 3)")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="append results there, one library per line")
    parser.add_argument("--peer", choices=MODULES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("This measures a CUDA device, and torch finds none here. `--device cpu` tests the script")
    if given.peer:
        with tempfile.TemporaryDirectory(dir=given.folder, ignore_cleanup_errors=True) as folder:
            print(json.dumps(measured(given.peer, given.device, given.state_gib, Path(folder))), flush=True)
        return 0
    words = ["--device", given.device, "--state-gib", str(given.state_gib)]
    words += ["--folder", str(given.folder)] if given.folder else []
    card = Device(given.device).facts()
    print(
        f"{card['device']}, torch {card['torch']}\n{'':<22} {'call ms':>9} {'lost ms':>9} {'complete':>9}", flush=True
    )
    differs = False
    for name in given.only:
        found = ask(name, words) | {"machine": card}
        print(row(found), flush=True)
        differs |= any(not one["equal"] for one in found.get("restore", {}).values())
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
