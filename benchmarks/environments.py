"""The interpreters that the peers are run with: ours, or one in an environment that has what a peer requires.

Environments are made below `.environments/` on first use. They see the packages of the interpreter that makes them, so
that all run with the same torch, and nothing is installed beside those. One is for all peers, but for those that say
`alone`.

    python benchmarks/environments.py NAME     # prints the path of its interpreter
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from peers import MODULES, peer_class

ENVIRONMENTS = Path(__file__).parent / ".environments"
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
INSTALLED = "installed.txt"  # what an environment was made from, and what has been installed since, by line


class NotInstalled(Exception):
    """What a peer requires could not be installed."""


def python_for(name: str) -> Path:
    """The interpreter to run that peer with. Makes its environment if it is not there.

    Adapters import their library in methods, so that `requires` can be read here, where the library may be absent.
    Raises NotInstalled with what venv or pip said.
    """
    peer = peer_class(name)
    if not peer.requires:
        return Path(sys.executable)
    return environment(peer.__name__.lower() if peer.alone else "shared", peer.requires, name)


def environment(folder: str, requires: tuple[str, ...], what: str, *, unpinned: tuple[str, ...] = ()) -> Path:
    """The interpreter of an environment of this name that has all that is required. NotInstalled, of `what`.

    `unpinned`: packages of which it wants other versions than constraints.txt says.
    """
    place = ENVIRONMENTS / folder
    try:
        _make(place)
        _install(place, requires, unpinned)
    except subprocess.CalledProcessError as error:
        raise NotInstalled(f"{what} is not installed: {_said(error)}") from error
    return _python(place)


def _make(folder: Path) -> None:
    """An environment that sees our packages. One that another interpreter made is made anew."""
    ours = f"# {sys.version.split()[0]} {sys.prefix}"
    if (folder / INSTALLED).exists() and ours in _lines(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    packages = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    where = _run(str(_python(folder)), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(where, "ours.pth").write_text("".join(f"{path}\n" for path in packages))
    (folder / INSTALLED).write_text(ours + "\n")


def _install(folder: Path, requires: tuple[str, ...], unpinned: tuple[str, ...]) -> None:
    if set(requires) <= set(_lines(folder)):
        return
    constraints = folder / CONSTRAINTS.name
    pins = (line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] not in unpinned)
    constraints.write_text("\n".join(pins))
    options = ["-q", "--no-input", "--disable-pip-version-check", "-c", str(constraints)]
    _run(str(_python(folder)), "-m", "pip", "install", *options, *requires)
    with (folder / INSTALLED).open("a") as file:
        file.writelines(f"{one}\n" for one in requires)


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _lines(folder: Path) -> list[str]:
    return (folder / INSTALLED).read_text().splitlines()


def _run(*command: str) -> str:
    """What it printed. CalledProcessError if it failed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _said(error: subprocess.CalledProcessError) -> str:
    """Its errors, or else its last line. Cut, since pip may list every version that there is."""
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
