"""The interpreters for peers and trainers: ours, or one in an environment with their requirements.

Environments are created below `.environments/` on first use. They see the packages of the creating interpreter, so that
all run with the same torch; nothing is installed into that one. All peers share one environment, except those with
`alone`. `apart` creates environments with another Python or torch, which see none of our packages.

    python benchmarks/environments.py NAME     # prints the path of its interpreter
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from peers import MODULES, peer_class

ENVIRONMENTS = Path(__file__).parent / ".environments"
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
TRAINERS: dict[str, tuple[tuple[str, ...], ...]] = {
    # The requirements for pip; packages whose versions in constraints.txt do not apply; and packages to install without
    # their dependencies.
    "composer": (  # requires an older torch
        (
            "torchvision",
            "torch_optimizer",
            "coolname",
            "tabulate",
            "py-cpuinfo",
            "importlib_metadata<9",
            "mosaicml-cli",
        ),
        (),
        ("mosaicml",),
    ),
    "deepspeed": (("deepspeed",),),
    "megatron": (("megatron-core",),),
    "ray": (("ray[train]",),),
    "torchft": (("torchft",),),
    "torchtitan": (("torchtitan", "triton"), ("fsspec",)),  # imports triton, and requires datasets: an older fsspec
}
INSTALLED = (
    "installed.txt"  # the interpreter that created an environment, and the requirements installed since, one per line
)


class NotInstalled(Exception):
    """Raised when the requirements of a peer cannot be installed."""


def python_for(name: str) -> Path:
    """Return the interpreter for a peer, and create its environment if needed.

    Adapters import their library in methods, so that `requires` can be read here without the library.
    Raises NotInstalled with the output of venv or pip.
    """
    peer = peer_class(name)
    if not peer.requires:
        return Path(sys.executable)
    return environment(peer.__name__.lower() if peer.alone else "shared", peer.requires, name)


def python_of(trainer: str) -> Path:
    """Return the interpreter of an environment with one of TRAINERS and our packages. Raises NotInstalled."""
    requires, unpinned, bare, *_ = (*TRAINERS[trainer], (), ())
    return environment(trainer, requires, trainer, unpinned=unpinned, bare=bare)


def apart(name: str, python: Path, *requires: str) -> Path:
    """Return the interpreter of an environment with another Python and none of our packages. Raises NotInstalled."""
    place = ENVIRONMENTS / name
    try:
        _make(place, python, ())
        _install(place, requires, None)
    except subprocess.CalledProcessError as error:
        raise NotInstalled(f"{name} is not installed: {_said(error)}") from error
    return _python(place)


def environment(
    folder: str,
    requires: tuple[str, ...],
    what: str,
    *,
    unpinned: tuple[str, ...] = (),
    bare: tuple[str, ...] = (),
) -> Path:
    """Return the interpreter of an environment with this name and all requirements. Raises NotInstalled, naming `what`.

    `unpinned`: packages whose versions in constraints.txt do not apply. `bare`: further packages, installed without
    their dependencies.
    """
    place = ENVIRONMENTS / folder
    try:
        packages = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
        _make(place, Path(sys.executable), packages)
        _install(place, requires, unpinned)
        _install(place, bare, unpinned, "--no-deps")
    except subprocess.CalledProcessError as error:
        raise NotInstalled(f"{what} is not installed: {_said(error)}") from error
    return _python(place)


def _make(folder: Path, python: Path, packages: Sequence[str]) -> None:
    """Create an environment that sees these packages. Recreate one made by another interpreter."""
    ours = "# " + _run(str(python), "-c", "import sys; print(sys.version.split()[0], sys.prefix)").strip()
    if (folder / INSTALLED).exists() and ours in _lines(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    _run(str(python), "-m", "venv", str(folder))
    where = _run(str(_python(folder)), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(where, "ours.pth").write_text("".join(f"{path}\n" for path in packages))
    (folder / INSTALLED).write_text(ours + "\n")


def _install(folder: Path, requires: tuple[str, ...], unpinned: tuple[str, ...] | None, *more: str) -> None:
    """Install requirements. `unpinned`: packages to which constraints.txt does not apply; None: all."""
    if set(requires) <= set(_lines(folder)):
        return
    constraints = folder / CONSTRAINTS.name
    pins = CONSTRAINTS.read_text().splitlines() if unpinned is not None else []
    constraints.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in (unpinned or ())))
    options = ["-q", "--no-input", "--disable-pip-version-check", "-c", str(constraints)]
    _run(str(_python(folder)), "-m", "pip", "install", *options, *more, *requires)
    with (folder / INSTALLED).open("a") as file:
        file.writelines(f"{one}\n" for one in requires)


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _lines(folder: Path) -> list[str]:
    return (folder / INSTALLED).read_text().splitlines()


def _run(*command: str) -> str:
    """Run a command and return its output. Raises CalledProcessError if it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _said(error: subprocess.CalledProcessError) -> str:
    """Return its errors, or else its last line, shortened since pip may list every existing version."""
    said = [line for line in (error.stderr + error.stdout).splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ")[:200] for line in said if line.startswith("ERROR: ")]
    return " ".join(errors or said[-1:]) or f"exit status {error.returncode}"


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in MODULES:
        sys.exit(f"usage: environments.py NAME, one of: {', '.join(MODULES)}")
    try:
        print(python_for(sys.argv[1]))
    except NotInstalled as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
