"""Size of the library, and the number of its lines that one save and one restore execute.

The limits are today's values, rounded up. Lower them whenever code goes. They may rise only for a new promise.
Run with `-s` to see all numbers.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import reach
from processes import PYTHONPATH, REPO

# Lines and statements of Python for each package. Docstrings and comments count as lines, not as statements.
BUDGETS = {
    "adapters": (1_780, 1_240),
    "backends": (2_810, 1_980),
    "core/": (10, 10),
    "core/cadence": (1_010, 660),
    "core/checkpoint": (4_610, 2_900),
    "core/format": (3_930, 2_560),
    "core/ipc": (1_860, 1_230),
    "core/log": (1_070, 700),
    "core/ranks": (1_050, 690),
    "core/restore": (1_220, 770),
    "core/run": (5_410, 3_820),
    "core/snapshot": (1_760, 1_240),
    "core/state": (4_520, 3_020),
    "core/writer": (3_040, 2_110),
    "dcp": (1_690, 1_140),
    "deepspeed": (480, 310),
    "guard": (2_870, 2_010),
    "lightning": (2_630, 1_830),
    "megatron": (540, 360),
    "plugins": (280, 220),
    "public": (3_390, 1_850),
    "ray": (120, 70),
    "testing": (660, 500),
    "tools/": (210, 150),
    "tools/cli": (4_240, 2_470),
    "tools/convert": (4_730, 3_360),
    "tools/doctor": (1_120, 800),
    "tools/maintain": (1_870, 1_260),
    "tools/observe": (3_370, 2_060),
    "torchtitan": (340, 240),
    "transformers": (1_580, 1_030),
}
TOTAL = (64_060, 42_480)
C_LINES = 150
STEP_FILES, RESTORE_FILES = 66, 53


def sizes() -> dict[str, tuple[int, int]]:
    """Return lines and statements by package; "public" stands for the modules directly in `ckpt/`."""
    found: dict[str, tuple[int, int]] = {}
    for path in [*(REPO / "ckpt").rglob("*.py"), *(REPO / "backends").rglob("*.py")]:
        parts = path.relative_to(REPO).parts
        package = "backends" if parts[0] == "backends" else "public" if len(parts) == 2 else parts[1]
        if package in ("core", "tools"):
            package += "/" + (parts[2] if len(parts) > 3 else "")
        text = path.read_text()
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
        before = found.get(package, (0, 0))
        found[package] = before[0] + text.count("\n"), before[1] + statements
    return found


def test_packages_stay_within_their_budgets() -> None:
    found = sizes()
    print(*(f"{name}: {lines} lines, {statements} statements" for name, (lines, statements) in found.items()), sep="\n")
    too_large = {name: size for name, size in found.items() if not fits(size, BUDGETS.get(name, (0, 0)))}
    assert too_large == {}
    total = sum(lines for lines, _ in found.values()), sum(statements for _, statements in found.values())
    assert fits(total, TOTAL), total
    assert sum(path.read_text().count("\n") for path in (REPO / "ckpt").rglob("*.c")) <= C_LINES


def fits(size: tuple[int, int], budget: tuple[int, int]) -> bool:
    return size[0] <= budget[0] and size[1] <= budget[1]


def test_budget_is_exceeded_by_one_statement() -> None:
    assert fits((10, 5), (10, 5)) and not fits((10, 6), (10, 5)) and not fits((11, 5), (10, 5))


def run(code: str, folder: Path, *, ranks: int = 1, recorded: int = 0) -> int:
    """Run code in one process, or in several ranks of which one records. Return the process id of that rank, if any."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
    started = []
    for rank in range(ranks):
        own = reach.environment(folder, recorded=rank == recorded)
        own["PYTHONPATH"] += f":{PYTHONPATH}"
        words = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        environment = {**common, **own, **words}
        started.append(
            subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        )
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(errors)
    return started[recorded].pid


MODEL = """
import sys, time, torch, ckpt, reach
torch.manual_seed(0); torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
def train():
    model(torch.randn(4, 256)).square().mean().backward(); optim.step(); optim.zero_grad()
"""

STEP = """
optim = torch.optim.AdamW(model.parameters())
state = {{"model": model, "optim": optim, "rng": ckpt.RNG(), "plain": {{"losses": []}}}}
with ckpt.Checkpointer(state, [ckpt.Tier("{a}", every=5), ckpt.Tier("{b}", every=5)]) as cp:
    cp.restore(default=0)
    for step in range(1, 10):
        train(); cp.step(step)
    cp.wait(); train(); time.sleep(0.5)
    with reach.record():
        cp.step(10).wait_durable(); cp.wait(); time.sleep(0.5)
"""

RANKS = """
import os, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://{meet}", rank=rank, world_size=ranks)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optim = torch.optim.AdamW(model.parameters())
state = {{"model": model, "optim": optim, "rng": ckpt.RNG(), "plain": {{"losses": []}}}}
train()
with ckpt.Checkpointer(state, ckpt.Tier("{a}", every=5), memory=ckpt.Memory(linger_s=0)) as cp:
    {what}
dist.destroy_process_group()
"""
SAVE = "cp.restore(default=0); [(train(), cp.step(step)) for step in range(1, 11)]"
RESTORE = """dist.barrier()
    if rank == 1:
        with reach.record():
            assert cp.restore() == 10
    else:
        assert cp.restore() == 10"""


def test_scheduled_step_executes_few_files(tmp_path: Path) -> None:
    """The count covers trainer and writer, from `step()` until memory and two folders are complete."""
    run(MODEL + STEP.format(a=tmp_path / "a", b=tmp_path / "b"), tmp_path)
    found = reach.found(tmp_path)
    print(f"step: {found}")
    assert 10 < len(found.files) <= STEP_FILES
    assert any("/writer/" in file for file in found.files) and any("/run/" in file for file in found.files)


def test_restore_on_three_ranks_executes_few_files(tmp_path: Path) -> None:
    """The count covers one of three trainers that restore a checkpoint of two ranks."""
    run(MODEL + RANKS.format(meet=tmp_path / "m2", a=tmp_path / "run", what=SAVE), tmp_path, ranks=2, recorded=-1)
    code = MODEL + RANKS.format(meet=tmp_path / "m3", a=tmp_path / "run", what=RESTORE)
    found = reach.found(tmp_path, run(code, tmp_path, ranks=3, recorded=1))
    print(f"restore: {found}")
    assert 10 < len(found.files) <= RESTORE_FILES


@pytest.mark.parametrize("name", ["Outer.inner", "_Hidden.method.<locals>.part", "Outer.method.<locals>.Local.run"])
def test_reach_counts_classes_by_their_methods(name: str) -> None:
    found = reach.Reach(frozenset({("a.py", name), ("a.py", "plain"), ("b.py", "_helper.<locals>.inside")}))
    assert len(found.classes) == (2 if "Local" in name else 1) and len(found.files) == 2
