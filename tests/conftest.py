"""Fixtures that all tests share: a run folder, separate sockets, and cleanup of writers."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Test processes share a machine. Threads that wait for each other only slow it down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from botocore.loaders import JSONFileLoader, Loader

import processes
from processes import writers

# Slow files, the slowest first: jobs that are killed and continued, full disks, servers. All others are quick.
SLOW = (
    "test_rank_faults", "test_ray", "test_run_identity", "test_torchtitan", "test_deepspeed", "test_increments",
    "test_transformers", "test_promise_ownership", "test_megatron", "test_forged", "test_torch_dist",
    "test_simulated", "test_object_storage", "test_nodes", "test_power_cut", "test_fault_handler",
    "test_interleavings", "test_further_state", "test_promise_ends", "test_full_disk", "test_promise_handover",
    "test_ladder", "test_lightning_restarts", "test_dcp", "test_unreadable", "test_uneven_ranks", "test_resize",
    "test_lightning", "test_examples", "test_documents", "test_faults_example", "test_lifecycle", "test_kill",
    "test_waits", "test_offline", "test_loader", "test_promise_file_systems", "test_stores", "test_repair",
    "test_composer", "test_best", "test_s3", "test_first_contact", "test_export", "test_torture", "test_budgets",
    "test_stage", "test_forged_values", "test_top", "test_upkeep", "test_unnoticed_damage", "test_hostile",
    "test_created", "test_jobs", "test_damage", "test_ledger", "test_promise_damage", "test_restore",
    "test_promise_moments", "test_drift", "test_machines", "test_home_made_zero", "test_promise_stores",
    "test_promise_trainers", "test_torchft", "test_shards", "test_incremental", "test_resharding", "test_ranks",
    "test_retry", "test_written_before", "test_promise_state", "test_accelerate", "test_protocol", "test_plan",
    "test_stopped", "test_fsdp1", "test_metrics", "test_promise_interrupts", "test_replicate", "test_random_faults",
    "test_fabric", "test_surprises", "test_checkpoint_io", "test_to_lightning", "test_corners", "test_restore_line",
    "test_process_groups", "test_flight_recorder", "test_benchmarks", "test_typing", "test_promise_no_memory",
    "test_rank_state",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("all", "quick", "slow"),
        default="all",
        help="files that take minutes, all others, or both; named files always run",
    )
    parser.addoption(
        "--any-build",
        action="store_true",
        help="tests/test_corners.py takes CUDA builds of torch too: several GB each, for environments that stay",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`: child processes would ignore SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Thousands of writers start in a test run. Without cached bytecode, compilation takes a third of the time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    processes.ZYGOTE = processes.Zygote()
    config.add_cleanup(processes.ZYGOTE.close)
    processes.WRITERS = processes.Writers()
    config.add_cleanup(processes.WRITERS.close)
    subprocess.run = processes.WRITERS.run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select one part of the files, the slowest first, so that all workers end at the same time.

    Quick files that start processes come first. xdist would sort by number of tests: see --no-loadscope-reorder in the
    Makefile."""
    for item in items:
        item.add_marker("process" if _starts_processes(item.path) else "unit")
    part = config.getoption("part")
    named = any(Path(word.partition("::")[0]).is_file() for word in config.args)
    if part != "all" and not named:
        chosen = [item for item in items if (item.path.stem in SLOW) == (part == "slow")]
        config.hook.pytest_deselected(items=[item for item in items if (item.path.stem in SLOW) != (part == "slow")])
        items[:] = chosen
    place = {name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place) + (not _starts_processes(item.path))))


@functools.cache
def _starts_processes(path: Path) -> bool:
    """Return whether tests of a file start processes, as a Checkpointer starts a writer."""
    words = ("Checkpointer(", "processes", "subprocess", "parallel", "kills", "commands", "training(", "open_run")
    return any(word in path.read_text() for word in words)


@pytest.fixture(autouse=True, scope="session")
def parsed_once() -> None:
    """Parse botocore's description of S3 once, since parsing it for each store takes longer than a test."""

    class Parsed(JSONFileLoader):
        load_file = staticmethod(functools.cache(JSONFileLoader().load_file))

    Loader.FILE_LOADER_CLASS = Parsed


def _own_options() -> Iterator[None]:
    """Restore the options of buckets, which hold for a process. The next test may use the same bucket name."""
    before = dict(sys.modules["ckpt.store"]._options) if "ckpt.store" in sys.modules else {}
    yield
    if "ckpt.store" in sys.modules:
        sys.modules["ckpt.store"]._options.clear()
        sys.modules["ckpt.store"]._options.update(before)


options_of_a_file = pytest.fixture(_own_options, autouse=True, scope="module")  # options that fixtures of a module set
options_of_a_test = pytest.fixture(_own_options, autouse=True)


@pytest.fixture(autouse=True)
def own_sockets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Isolate the writers of a test, and kill them at its end."""
    folder = tmp_path_factory.mktemp("xdg")
    folder.chmod(0o700)
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(folder))
    yield folder
    for process in writers(folder) if any(folder.iterdir()) else ():  # a writer keeps its words there
        process.kill()


@pytest.fixture(autouse=True)
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten retries of failed reads, since many tests remove or damage files."""
    if "ckpt.core.checkpoint.chunks" in sys.modules:
        monkeypatch.setattr("ckpt.core.checkpoint.chunks.WINDOW_S", 0.05)


@pytest.fixture(autouse=True)
def as_many_threads() -> Iterator[None]:
    """Restore the number of threads of torch, because sums of floats depend on it."""
    torch = sys.modules.get("torch")
    before = 0 if torch is None else torch.get_num_threads()
    yield
    if torch is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    """Return a folder for one run, which does not exist yet."""
    return str(tmp_path / "run")
