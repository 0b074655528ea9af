"""The documents' code blocks, and whether what they name is there: names, arguments, commands, options, files."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import click
from torch.distributed.run import get_args_parser
from torch.utils.data import DataLoader

import ckpt
from ckpt.tools.cli.app import COMMANDS, cli
from processes import REPO

PAGES = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]
LANGUAGES = ("python", "console", "bash", "yaml", "text")  # text: a picture, or what something prints
CALLED = {
    "cp": ckpt.Checkpointer,
    "save": ckpt.Save,
    "loader": ckpt.Loader,
    "weights": ckpt.types.Loaded,
}  # on all pages
SHELL = {".", "cd", "export", "git", "jq", "kill", "sh", "sleep"}  # that need no look
FENCE = re.compile(r"^( *)```(.*)$")
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


@dataclass(frozen=True)
class Block:
    """`line`: of the fence, from 1. `title`: of a file that it is."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def fragment(self) -> bool:
        """Python with `...` for something that a reader has; it cannot be run."""
        return any(isinstance(n, ast.Constant) and n.value is ... for n in ast.walk(ast.parse(self.text)))


def named(page: Path) -> str:
    return str(page.relative_to(REPO))


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks. Raise AssertionError for a block in a language that no test checks."""
    found, opened, lines = [], None, page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            language, _, rest = fence[2].partition(" ")
            assert language in LANGUAGES, f"{named(page)}:{number}: ```{fence[2]} is none of {', '.join(LANGUAGES)}"
            title = re.fullmatch(r'title="([^"]+)"', rest)
            assert title or not rest, f"{named(page)}:{number}: what does {rest} mean?"
            opened = number, language, title[1] if title else "", len(fence[1])
        else:
            start, language, name, indent = opened
            text = "".join(f"{one[indent:]}\n" for one in lines[start : number - 1])
            found.append(Block(page, start, language, name, text))
            opened = None
    assert opened is None, f"{named(page)}: the block of line {opened[0]} has no end"
    return found


# -- Python --


def python_problems(text: str) -> list[str]:
    """Return names of ours in Python code that do not exist, including arguments."""
    tree = ast.parse(text)
    known: dict[str, Any] = {**CALLED, "ckpt": ckpt}
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("ckpt"):
                    _imported(alias.name)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("ckpt"):
            module = _imported(str(node.module))
            for alias in node.names:
                known[alias.asname or alias.name] = getattr(module, alias.name, None)
                if module is not None and not hasattr(module, alias.name):
                    problems.append(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            try:
                _resolve(node, known)
            except AttributeError:
                problems.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            problems += _arguments(node, known)
    return problems


def _imported(name: str) -> Any:
    """A module of ours; None for one whose trainer has an environment of its own: see tests/deepspeed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if "pip install 'everystep[" in str(error):
            return None
        raise


def _resolve(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return the object of a dotted name of ours, None for others. Raise AttributeError if it does not exist."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Call):
        return _returned(_resolve(node.func, known))
    if not isinstance(node, ast.Attribute):
        return None
    owner = _resolve(node.value, known)
    if isinstance(owner, (property, dict, list)) or owner is None or not (inspect.ismodule(owner) or callable(owner)):
        return None
    if inspect.isclass(owner) and node.attr in _set_by_init(owner):
        return None
    try:
        return getattr(owner, node.attr)
    except ImportError:  # one that has an environment of its own: see tests/deepspeed
        return None


def _returned(called: Any) -> Any:
    """The class of what a call gives, if that is one of ours."""
    if inspect.isclass(called) or called is None:
        return called
    found = get_type_hints(called).get("return") if inspect.isroutine(called) else None
    found = get_args(found)[0] if isinstance(found, UnionType) else found  # overloads: the first
    return found if inspect.isclass(found) and found.__module__.startswith("ckpt") else None


def _set_by_init(owner: type) -> set[str]:
    """Attributes that objects have and their class has not."""
    return set(re.findall(r"self\.(\w+)(?:, self\.\w+)* =", inspect.getsource(owner))) | set(
        re.findall(r", self\.(\w+)", inspect.getsource(owner))
    )


def _arguments(call: ast.Call, known: dict[str, Any]) -> Iterator[str]:
    try:
        target = _resolve(call.func, known)
    except AttributeError:
        return
    if not callable(target):
        return
    names = dict(inspect.signature(target).parameters)
    if any(one.kind is one.VAR_KEYWORD for one in names.values()):  # it passes its arguments on
        names |= inspect.signature(DataLoader if target is ckpt.Loader else ckpt.Checkpointer).parameters
    for given in call.keywords:
        if given.arg is not None and given.arg not in names:
            yield f"{ast.unparse(call.func)}({given.arg}=)"


# -- shells --


def shell_lines(block: Block) -> Iterator[str]:
    """Return the lines of a script, or those after `$` of a console. Continued lines are joined."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language == "bash":
            yield line
        elif line.startswith("$ "):
            yield line[2:]


def shell_problems(block: Block) -> list[str]:
    problems = []
    if block.language == "bash":
        parsed = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        problems += [parsed.stderr] if parsed.returncode else []
        for line in shell_lines(block):
            inner = re.findall(r"\b(?:ckpt|torchrun) [^|;)]*", line.replace("$(hostname)", "host"))
            problems += [problem for one in inner for problem in command_problems(shlex.split(one), block)]
        return problems
    assert any(shell_lines(block)), f"{named(block.page)}:{block.line}: no line begins with $"
    for line in shell_lines(block):
        for words in commands_of(line):
            problems += command_problems(words, block)
    return problems


def commands_of(line: str) -> list[list[str]]:
    """Words of each command of a line, without comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&|;"):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def command_problems(words: list[str], block: Block) -> list[str]:
    """Why one command cannot be meant as it stands; nothing is run."""
    name, *rest = words
    if name == "ckpt":
        return _ckpt(rest)
    if name == "torchrun":
        return _torchrun(rest)
    if name == "make":
        return _make(rest)
    if name == "pip":
        return _pip(rest)
    if name == "python":
        return _python(rest, block)
    return [] if name in SHELL else [f"{name}: what is that?"]


def _ckpt(words: list[str]) -> list[str]:
    name = words[0] if words else ""
    if name not in COMMANDS:
        return [f"ckpt {name}"]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return _clicked(command, words[1:])


def _clicked(command: click.Command, words: list[str]) -> list[str]:
    try:
        command.make_context(command.name, list(words))
    except click.ClickException as error:
        return [f"{command.name} {' '.join(words)}: {error.format_message()}"]
    return []


def _torchrun(words: list[str]) -> list[str]:
    try:
        get_args_parser().parse_args(words)
    except SystemExit:
        return [f"torchrun {' '.join(words)}"]
    return []


def _make(words: list[str]) -> list[str]:
    makefile = (REPO / "Makefile").read_text()
    unknown = [word for word in words if "=" not in word and word not in TARGETS]
    return unknown + [word for word in words if "=" in word and f"$({word.partition('=')[0]})" not in makefile]


def _pip(words: list[str]) -> list[str]:
    assert words[0] == "install", words
    problems = []
    for word in words[1:]:
        package, _, extras = word.rstrip("]").partition("[")
        if package in (PROJECT["name"], "."):
            problems += [e for e in extras.split(",") if e and e not in PROJECT["optional-dependencies"]]
        elif f"\n{package}==" not in (REPO / "constraints.txt").read_text():
            problems.append(f"pip install {word}: what is that to the tests?")
    return problems


def _python(words: list[str], block: Block) -> list[str]:
    if words[0] == "-c":
        return python_problems(words[1])
    if words[0] == "-m":
        main = importlib.import_module(f"{words[1]}.__main__")
        return _clicked(main.command, words[2:])
    if words[0] in {one.title for one in blocks(block.page)}:
        return []
    path = REPO / words[0]
    if not path.is_file():
        return [words[0]]
    source = path.read_text()
    options = [w.partition("=")[0] for w in words[1:] if w.startswith("--") and w != "--help"]
    return [f"{words[0]} {option}" for option in options if f'"{option}"' not in source]


# -- between the blocks --


def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def prose_problems(page: Path) -> list[str]:
    """Return commands, targets, options and files in sentences that do not exist."""
    text, problems = prose(page), []
    for span in re.findall(r"`([^`]+)`", text):
        words = span.split()
        if words[0] == "ckpt" and len(words) > 1:
            command = cli.get_command(click.Context(cli), words[1])
            options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} if command else set()
            if command is None or any(word.startswith("--") and word not in options for word in words[2:]):
                problems.append(span)
        elif words[0] == "make" and len(words) > 1 and words[1] not in TARGETS:
            problems.append(span)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
        if "://" not in target and not (page.parent / target).exists():
            problems.append(f"a link to {target}")
    return problems
