"""Run a training on file systems that lack a capability, and next to another user's sockets.

A small C library, preloaded into trainer and writer, makes single system calls fail as such file systems do.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import inside
from processes import PYTHONPATH, REPO, eventually

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = REPO / "tests" / "lib" / "lacking.c"

TRAIN = """
import logging, os, signal, sys, torch, ckpt
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
run, steps, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
state = {"w": torch.zeros(700_000), "n": torch.zeros(1)}
with ckpt.Checkpointer(state, ckpt.Tier(run, every=2, keep=2), memory=ckpt.Memory(linger_s=0)) as cp:
    start = cp.restore(default=0)
    whole = bool((state["w"] == start).all()) and int(state["n"]) == start
    print("start", start, whole, flush=True)
    for step in range(start, start + steps):
        state["w"].fill_(step + 1), state["n"].fill_(step + 1)
        save = cp.step(step + 1)
    save.wait_durable(60)
    if end == "kill": os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    target = tmp_path_factory.mktemp("lacking") / "lacking.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", target, SOURCE, "-ldl"], check=True)
    return str(target)


def train(
    library: str, run: Path, capability: str, number: int, *, steps: int = 4, end: str = "kill"
) -> subprocess.CompletedProcess[str]:
    """Train on a file system that lacks a capability and returns an errno."""
    lacking = {"LACKING": capability, "LACKING_ERRNO": str(number), "LACKING_ROOT": str(run)}
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "LD_PRELOAD": library, **lacking}
    words = [sys.executable, "-c", TRAIN, str(run), str(steps), end]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("capability", "number"),
    [
        ("link", errno.EACCES),
        ("sync_folder link reserve direct", errno.EOPNOTSUPP),
        pytest.param("sync_folder", errno.EINVAL, marks=pytest.mark.long),
        pytest.param("direct", errno.EACCES, marks=pytest.mark.long),
    ],
)
def test_run_survives_kill_on_file_system_without(library: str, tmp_path: Path, capability: str, number: int) -> None:
    """The library finds another way, and warns if that way promises less."""
    run = tmp_path / "run"
    killed = train(library, run, capability, number)
    assert killed.stdout.split() == ["start", "0", "True"], killed.stderr
    assert ("does not guarantee fsync of folders" in killed.stderr) == ("sync_folder" in capability)
    again = train(library, run, capability, number, end="return")
    assert again.stdout.split() == ["start", "4", "True"], again.stderr
    assert again.returncode == 0


EXPORT = """
import os, sys, torch, ckpt
run, forms = sys.argv[1], sys.argv[2:]
with ckpt.Checkpointer({"w": torch.ones(700_000)}, [ckpt.Tier(run, every=1)], memory=None) as cp: cp.step(1)
from inside import main
for form in forms:
    out, back = run + "." + form, run + ".from." + form
    codes = main(["restore", run, "--to", out, "--format", form, "--only", "w"]), main(["import", out, back])
    assert codes == (0, 0), (form, codes)
    assert torch.equal(next(iter(ckpt.load(back).all().values())), torch.ones(700_000)), form
"""


@pytest.mark.parametrize(
    ("capability", "number", "forms"),
    [
        ("sync_folder reserve flock", errno.ENOSYS, ("safetensors",)),
        ("mmap", errno.ENODEV, ("safetensors", "torch", "dcp")),
    ],
)
def test_export_and_import_succeed_on_file_system_without(
    library: str, tmp_path: Path, capability: str, number: int, forms: tuple[str, ...]
) -> None:
    lacking = {"LACKING": capability, "LACKING_ERRNO": str(number), "LACKING_ROOT": str(tmp_path)}
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "LD_PRELOAD": library, **lacking}
    words = [sys.executable, "-c", EXPORT, str(tmp_path / "run"), *forms]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_file_system_without_exclusive_create_is_refused(library: str, tmp_path: Path) -> None:
    refused = train(library, tmp_path / "run", "noreplace", errno.ENOSYS)
    assert refused.returncode == 1
    assert "does not guarantee create if absent: it has neither hard links nor renameat2" in refused.stderr


def test_negative_control_io_error_of_folder_fsync_fails_the_save(library: str, tmp_path: Path) -> None:
    """An errno that does not mean "not supported" stays an error."""
    failed = train(library, tmp_path / "run", "sync_folder", errno.EIO)
    assert failed.returncode == 1
    assert "start" not in failed.stdout


@pytest.fixture
def intruder(run_dir: str, own_sockets: Path) -> Iterator[str]:
    """Have another user's process take every socket name of a run's writer."""
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    inside.begin_folder(run_dir)  # its socket names depend on its id
    names = inside.addresses_of(inside.name_of_writer_in(run_dir))
    code = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        f"sockets = [socket.socket(socket.AF_UNIX) for _ in {names!r}]\n"
        f"for one, name in zip(sockets, {names!r}): one.bind(name), one.listen(8)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield run_dir
        process.kill()


def test_socket_names_taken_by_another_user_are_named(intruder: str) -> None:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    words = [sys.executable, "-c", TRAIN, intruder, "2", "return"]
    refused = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert "another user of this machine (uid 65534) uses the socket names of this run" in refused.stderr
    assert inside.VARIABLE_OF_NAMES in refused.stderr


STOPPED = """
import logging, os, signal, sys, threading, torch, ckpt, inside
logging.basicConfig(level=logging.WARNING, format="%(message)s")
model = torch.nn.Linear(300, 300); optim = torch.optim.AdamW(model.parameters())
tiers = [ckpt.Tier(sys.argv[1], every=1)]
with ckpt.Checkpointer({"m": model, "o": optim}, tiers, memory=ckpt.Memory(linger_s=0, keep=2)) as cp:
    writer, warned = [], threading.Event()
    class Seen(logging.Handler):
        def emit(self, record):
            if "is stopped" in record.getMessage(): warned.set()
    logging.getLogger("ckpt").addHandler(Seen())
    for step in range(200):
        model(torch.ones(2, 300)).sum().backward(); optim.step(); optim.zero_grad()
        save = cp.step(step + 1)
        if step == 3:
            save.wait_durable(60)
            writer = inside.writers_in(sys.argv[1])
            def wake():
                warned.wait(40); os.kill(writer[0], signal.SIGCONT)
            threading.Thread(target=wake).start()
            os.kill(writer[0], signal.SIGSTOP)
        if warned.is_set(): break
print("warned", warned.is_set(), "writer", *writer)
"""


def test_stopped_writer_is_named_while_training_waits(run_dir: str) -> None:
    """Training waits for memory that only the writer hands out. It continues when the writer does."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    ended = subprocess.run([sys.executable, "-c", STOPPED, run_dir], env=environment, capture_output=True, text=True)
    words = ended.stdout.split()
    assert words[:2] == ["warned", "True"], ended.stdout + ended.stderr
    assert f"the writer process {words[3]} is stopped" in ended.stderr
    assert ended.stderr.count("is stopped") == 1
    assert eventually(lambda: not inside.writers_in(run_dir))
