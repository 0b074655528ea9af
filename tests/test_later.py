"""Modules are imported on first use, so that a writer starts sooner."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.later import bring, later
from processes import run_script


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the file of a module `slow_one`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "slow_one.py"
    sys.modules.pop("slow_one", None)


def imported() -> Any:
    later("slow_one")
    return importlib.import_module("slow_one")


def test_first_use_imports_module_once(module: Path) -> None:
    """All threads get the complete module, and later imports return the module itself."""
    module.write_text("import sys, time\nsys.counted = getattr(sys, 'counted', 0) + 1\ntime.sleep(0.2)\nvalue = [1]\n")
    found: list[Any] = []
    one = imported()
    assert not hasattr(sys, "counted")
    threads = [threading.Thread(target=lambda: found.append(one.value)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    again = importlib.import_module("slow_one")
    assert found == [[1]] * 8 and vars(sys).pop("counted") == 1
    assert again.value is one.value and again.__file__ == str(module)
    bring("slow_one")
    assert importlib.import_module("slow_one") is again
    with pytest.raises(AttributeError):
        _ = one.no_such_thing


def test_writer_starts_without_numpy() -> None:
    code = (
        "import sys; from ckpt.later import later; later('numpy'); import ckpt.writer_process, ckpt_backends.local; "
        "print(sorted(name for name in sys.modules if name.startswith('numpy')))"
    )
    assert run_script(code, fresh=True).stdout.split() == ["['numpy']"]


TRAINED = """
import sys, time, torch, ckpt

def opened():
    state = {"w": torch.zeros(50_000), "step": 0}
    return state, ckpt.Checkpointer(state, ckpt.Tier(sys.argv[1], every=1))

state, cp = opened()
with cp:
    cp.restore(default=0)
    for step in (1, 2):
        state["w"] += torch.arange(50_000)
        state["step"] = step
        cp.save(step).wait_durable(60)
        time.sleep(0.7 * (step == 1))  # before numpy is there, and after it
state, cp = opened()
with cp:
    print(cp.restore(), state["step"], torch.equal(state["w"], 2.0 * torch.arange(50_000)))
"""


def test_writer_saves_before_and_after_import_of_numpy(run_dir: str) -> None:
    """The writers are started normally, not forked."""
    done = run_script(TRAINED, run_dir, fresh=True)
    assert done.stdout.split() == ["2", "2", "True"], done.stderr
