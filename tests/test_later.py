"""Modules that are imported when they are used first: for a writer, which a trainer waits for."""

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
    """The file of a module `slow_one`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "slow_one.py"
    sys.modules.pop("slow_one", None)


def imported() -> Any:
    later("slow_one")
    return importlib.import_module("slow_one")


def test_the_first_use_imports_it_once(module: Path) -> None:
    """Whichever thread comes first, all have all of it; and whoever imports it from then on has the module itself."""
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


def test_what_cannot_be_imported_is_tried_again(module: Path) -> None:
    """Whoever uses it has the error, and the next one what has become of it since."""
    module.write_text("raise OSError('no disk')\n")
    one = imported()
    for _ in range(2):
        with pytest.raises(OSError, match="no disk"):
            _ = one.value
    module.write_text("value = 'from a disk that is back'\n")
    importlib.invalidate_caches()
    assert one.value == "from a disk that is back"


def test_a_writer_begins_without_numpy() -> None:
    """Nothing that a writer imports uses numpy while it is imported."""
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


def test_a_writer_saves_before_and_after_numpy_is_there(run_dir: str) -> None:
    """By writers that are started as they are, not forked."""
    done = run_script(TRAINED, run_dir, fresh=True)
    assert done.stdout.split() == ["2", "2", "True"], done.stderr
