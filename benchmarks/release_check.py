"""Check what a release would give to users: build it, install it, run the demo from it, and do without a compiler.

    make release-check        or: python benchmarks/release_check.py [--folder DIR]

Each step prints one line, and the first that fails ends the check with exit code 1:

- sdist and wheel are built.
- The wheel is installed in a fresh virtual environment, with the versions of constraints.txt and no extras. There
  `examples/demo.py` runs, outside the checkout.
- The sdist is made into a wheel and installed in another one, with CC set to a program that fails and no compiler on
  the PATH. That wheel is for any machine, and the demo runs from it too.

It takes some minutes and about 2 GB, for two environments with torch, in a temporary folder that is removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
CONSTRAINTS = REPO / "constraints.txt"
LIMIT_S = 1800


def run(*command: str | Path, cwd: Path, without_compiler: bool = False) -> str:
    """Return what a command prints. It sees nothing of this checkout. Exits with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if without_compiler:
        environment |= {"CC": "/bin/false", "PATH": str(Path(command[0]).parent)}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def fresh(folder: Path) -> Path:
    """Return the interpreter of a new virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def the_only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"failed: {folder} has {[path.name for path in found]} for {pattern}, one is expected")
    return found[0]


def installed(python: Path, package: Path, cwd: Path, *, without_compiler: bool = False) -> str:
    """Install a package, and return "with kernels.c" or "without kernels.c"."""
    run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, package, cwd=cwd, without_compiler=without_compiler)
    code = "import ckpt; from ckpt.core.format import kernels; print(ckpt.__file__, kernels.find() is not None)"
    place, compiled = run(python, "-c", code, cwd=cwd).split()
    if not Path(place).is_relative_to(python.parent.parent):
        sys.exit(f"failed: ckpt was imported from {place}, which is not in {python.parent.parent}")
    return "with kernels.c" if compiled == "True" else "without kernels.c"


def demo(python: Path, folder: Path) -> str:
    """Run the demo and return the last line that it prints. `folder`: a new one for a copy of the examples."""
    shutil.copytree(REPO / "examples", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return run(python, folder / "demo.py", cwd=folder).strip().splitlines()[-1].strip()


def check(folder: Path) -> None:
    began = time.monotonic()

    def say(step: str, result: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {step}: {result}", flush=True)

    run(sys.executable, "-m", "hatchling", "build", "-d", folder / "dist", cwd=REPO)
    wheel, sdist = the_only(folder / "dist", "*.whl"), the_only(folder / "dist", "*.tar.gz")
    say("built", f"{wheel.name}, {sdist.name}")
    python = fresh(folder / "from-wheel")
    say("wheel installed", installed(python, wheel, folder))
    say("demo from the wheel", demo(python, folder / "demo-wheel"))
    shutil.rmtree(folder / "from-wheel")

    python = fresh(folder / "from-sdist")
    command = (python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "pure", sdist)
    run(*command, cwd=folder, without_compiler=True)
    pure = the_only(folder / "pure", "*.whl")
    if not pure.name.endswith("-py3-none-any.whl"):
        sys.exit(f"failed: without a compiler, pip made {pure.name}")
    say("sdist made into a wheel without a compiler", pure.name)
    result = installed(python, sdist, folder, without_compiler=True)
    if result != "without kernels.c":
        sys.exit(f"failed: the sdist was installed {result}, though there was no compiler")
    say("sdist installed without a compiler", result)
    say("demo from the sdist", demo(python, folder / "demo-sdist"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the environments are made; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-", dir=arguments.folder) as folder:
        check(Path(folder))


if __name__ == "__main__":
    main()
