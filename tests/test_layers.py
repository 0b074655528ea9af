"""Who may import whom. Imports go down only, so that each part can be understood, tested and replaced by itself."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPO

import ckpt

LAYERS = (
    ("errors", "mutex", "geometry"),  # words everyone shares, a lock, boxes
    ("subscribe",),  # who wants to hear what happens
    ("events",),
    ("store", "shuffle", "triggers", "rally"),  # the byte interface of a place; byte planes; when to save out of turn
    ("regular", "identity"),  # files by names that others chose; who a process is
    ("digest", "codec", "values", "link", "world", "testing"),  # bytes, values, the wire, ranks
    ("claim",),  # who trains a run
    ("notices", "pressure", "wakeup", "pulse", "pace", "fault", "findings"),  # what may happen, or is the case
    ("ledger", "meter"),  # what an incarnation did; what saving takes from training
    ("flow", "live", "metrics"),  # what is on its way; one look at a rank; what is told of it, and where
    ("gauges", "devices"),  # a look as metrics; what the driver says of accelerators
    ("exporter",),  # serves and writes them
    ("statement",),  # what accounting says, as values
    ("timeline",),
    ("accounting", "forecast"),  # what all of them cost together; what it would be elsewhere
    ("cadence", "fleet"),  # how often to save; a whole job
    ("chronicle", "charts", "page_look"),  # what came when; pictures of figures
    ("page_words",),
    ("page_saves", "page_tables"),  # parts of a page
    ("page",),  # a report to look at
    ("hang",),  # whether, and who, holds the others up
    ("evidence",),  # what a process does, from outside
    ("manifest",),  # the small files, and the names of all files
    ("plan",),  # where every byte goes
    ("share", "table", "log", "arena", "tensors"),  # what things are
    ("losses",),  # what is lost to damage
    ("trace",),  # names for profilers
    ("predict",),  # what an optimizer will have made of its state
    ("increment", "directory", "frame"),  # what becomes of each blob; who has which piece
    (
        "exchange",
        "sharding",
        "saved",
        "write",
        "rng",
        "hooks",
        "fingerprint",
    ),  # pieces of tensors; files; updates; writes
    ("doctor_folder", "doctor_s3", "doctor_machine", "doctor_link"),  # what one kind of thing is like, before a job
    ("tryout",),  # whether a place can hold a run at all
    ("doctor", "doctor_plan"),  # all about a place; what follows for a job
    ("commit", "restore", "words"),  # files become a checkpoint; tensors again; what a module says of itself
    ("redo_log", "recipe"),  # every step, as what it changed; by which formula
    ("nodes", "read", "packs"),  # what a state is made of; back from a store, and into it
    ("supply", "stream"),  # plain bytes of blobs; from a folder to where they belong
    ("state", "retain", "promote", "mend", "encode", "frozen", "scrub", "damage"),  # a state; how long; elsewhere
    ("job", "aside", "loader"),  # a snapshot on its way, and one that may be; batches that go on
    ("stage", "sources", "tiers", "upkeep", "cures"),  # tensors into memory; where to restore from, and to save to
    ("redo",),  # from a checkpoint to a later step
    ("copying", "repair"),  # a run to another place; damaged files right again
    ("resume", "handle", "loaded", "compare"),  # what all ranks agree to restore; what users hold in their hands
    ("origin", "outfile", "cast", "inert"),  # what is carried to other forms and back, as values
    ("origin_run", "origin_files", "align", "export", "torch_native"),  # where from; how; what torch has for it
    ("parse_values", "to_safetensors", "to_torch", "to_dcp", "to_run"),  # forms
    ("parse_entries", "parse_safetensors"),  # what files of others say
    ("parse_torch",),
    ("parse_dcp",),
    ("origin_dcp", "origin_redo"),  # what torch's distributed checkpoint has saved to a run; a step redone
    ("mirror", "client", "replicas", "relief"),  # a copy on another node; the trainer's end of the process boundary
    ("dcp_busy", "dcp_objects"),  # which saves of torch's DCP are under way; what of its objects can be read inertly
    ("dcp_share",),  # one rank's share of what torch's distributed checkpoint saves
    ("holdings", "places"),  # what a writer has in memory, and open
    ("filing",),  # where the ledger is put
    ("bookkeeper", "holder"),  # keeps it; sees by it whether somebody trains
    ("dcp_source", "dcp_run"),  # what it loads, and who saves
    ("dcp",),
    ("persist", "vigil"),  # from there to durable places; its watch over the trainer
    ("witness", "lookout", "redo_keeper"),  # what it says about a fault, and about what the trainer does now
    ("writer",),  # the other end of the process boundary
    ("guardian",),  # who holds memory and writer
    ("tenure", "sentinel", "tempo", "redo_client"),  # whose run it is; the trainer's own watch; how often it saves
    ("checkpointer", "terminal"),  # what the user holds; how commands show things
    ("cli_page",),  # what is read for it, and written
    ("best",),  # what stays because it is good
    ("lightning_io", "lightning_loops"),  # pieces of the integration
    ("lightning_state",),
    ("lightning",),
    ("cli_upkeep", "cli_doctor", "cli_offline", "cli_report"),  # commands that change a run, or weigh one
    ("top",),  # a run as it is now, in lines
    ("survey",),  # where that comes from
    ("cli_repair", "cli_plan", "cli_top"),  # that show their plan as those do, or read a ledger
    ("hf_loop", "hf_export"),  # the inside of another library's loop; folders as it reads them
    ("transformers",),
    ("cli",),
)
"""Bottom first. A module imports from the rows below its own only, never from its own row."""

BACKENDS_MAY_USE = {"errors", "events", "store"}
NO_TORCH = {
    "subscribe", "chronicle", "charts", "page", "page_look", "page_words", "page_saves", "page_tables", "cli_page",
    "errors", "events", "mutex", "geometry", "share", "saved", "exchange", "mirror",
    "store", "regular", "shuffle", "digest", "codec", "values", "link", "manifest", "plan", "table", "log", "arena",
    "losses", "write", "commit", "read", "retain", "tiers", "handle", "writer", "compare",
    "triggers", "rally", "notices", "pressure", "wakeup", "pulse", "fault", "hang", "holdings", "persist", "vigil",
    "witness", "increment", "supply", "packs", "encode", "pace", "scrub", "promote", "places", "upkeep", "copying",
    "damage", "cures", "stream", "directory", "ledger", "meter", "statement", "timeline", "accounting", "forecast",
    "flow", "live", "metrics", "gauges", "devices", "exporter", "lookout", "top", "survey", "cli_top",
    "fleet", "cadence", "bookkeeper", "filing", "cli_report", "cli_plan",
    "repair", "cli_repair", "cli_upkeep", "cli_offline", "findings",
    "origin", "origin_run", "origin_files", "outfile", "cast", "inert", "align", "export", "parse_safetensors",
    "origin_dcp", "parse_torch", "parse_dcp", "parse_values", "parse_entries", "to_safetensors", "to_run",
    "doctor", "doctor_folder", "doctor_s3", "doctor_machine", "doctor_link", "doctor_plan", "cli_doctor", "best",
    "tryout", "identity", "holder", "claim",
    "predict", "frame", "redo_log", "redo", "redo_keeper", "origin_redo",
}  # fmt: skip
"""What the writer process or a light `import ckpt` needs: none of these imports torch, not even for types."""

RANK = {name: i for i, row in enumerate(LAYERS) for name in row}
PACKAGES = (REPO / "ckpt", REPO / "backends" / "ckpt_backends")


def modules(package: Path) -> list[Path]:
    return [path for path in sorted(package.glob("*.py")) if path.stem != "__init__"]


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere: at the top, inside functions, and for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield str(node.module)
            if node.module in ("ckpt", "ckpt_backends"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(tree: ast.AST, package: str = "ckpt") -> set[str]:
    """The modules of one of our packages among them."""
    names = {name.split(".")[1] for name in imported(tree) if name.startswith(f"{package}.")}
    return names & {path.stem for folder in PACKAGES for path in modules(folder)}


def wrong_way(name: str, tree: ast.AST) -> set[str]:
    return {other for other in own(tree) if RANK[other] >= RANK[name]}


def parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def test_every_module_has_its_layer() -> None:
    """The table above is complete and names nothing twice."""
    names = [name for row in LAYERS for name in row]
    assert len(names) == len(set(names))
    assert {path.stem for path in modules(PACKAGES[0])} <= set(names)


@pytest.mark.parametrize("path", modules(PACKAGES[0]), ids=lambda path: path.stem)
def test_imports_go_down_only(path: Path) -> None:
    """Also inside functions, and those for type checkers."""
    assert wrong_way(path.stem, parse(path)) == set()


def test_negative_control_an_import_upwards_is_seen() -> None:
    """In each of the forms an import can take."""
    for text in (
        "from ckpt.checkpoint.commit import commit",
        "import ckpt.checkpoint.read",
        "from ckpt.checkpoint import read",
        "def f():\n import ckpt.runlog.log",
    ):
        assert wrong_way("plan", ast.parse(text)), text
    assert not wrong_way("plan", ast.parse("from ckpt.store import PAGE"))


@pytest.mark.parametrize("path", modules(PACKAGES[1]), ids=lambda path: path.stem)
def test_stores_know_only_the_contract(path: Path) -> None:
    """A store imports the contract, errors and events, and other stores; so anybody could have written it."""
    assert own(parse(path)) <= BACKENDS_MAY_USE


@pytest.mark.parametrize("path", modules(PACKAGES[0]), ids=lambda path: path.stem)
def test_the_core_knows_no_store(path: Path) -> None:
    """Stores are found by name; only the process that starts the writer needs to know where the package lies."""
    names = {name.split(".")[0] for name in imported(parse(path))}
    assert "ckpt_backends" not in names or path.stem == "client"
    assert ("torch" not in names) or path.stem not in NO_TORCH


def reads_plain(call: ast.Call) -> bool:
    """torch.load that runs no code, as it says itself."""
    said = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return ast.unparse(call.func) == "torch.load" and said.get("weights_only") == "True"


WRITES_TORCH_FILES = {"torch_native": {"torch.save"}}  # of fake tensors: the form that torch.load reads


@pytest.mark.parametrize("path", [p for folder in PACKAGES for p in modules(folder)], ids=lambda path: path.stem)
def test_nothing_that_runs_code_or_forks(path: Path) -> None:
    """No pickle in any guise, no eval, no fork, no named shared memory."""
    tree = parse(path)
    banned = {
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
        "multiprocessing",
        "joblib",
        "runpy",
        "code",
    }
    assert {name.split(".")[0] for name in imported(tree)} & banned == set()
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and not reads_plain(node)}
    bad = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "os.fork",
        "os.forkpty",
        "os.system",
        "torch.load",
        "torch.save",
        "np.load",
    }
    assert called & bad == WRITES_TORCH_FILES.get(path.stem, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            assert ast.unparse(node.value) == "False"


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in memory after a statement, in a process of its own."""
    code = f"import sys; sys.path[:0] = {[str(REPO), str(REPO / 'backends')]!r}; {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return {name.split(".")[0] for name in result.stdout.split()}


def test_import_ckpt_is_light() -> None:
    """`import ckpt` alone pays for nothing heavy."""
    assert loaded_by("import ckpt") & {"torch", "numpy", "click", "rich", "fsspec", "asyncio", "safetensors"} == set()


def test_the_writer_has_no_torch() -> None:
    """Neither at its start nor once it has opened a store: seconds of start-up, and hundreds of MB."""
    statement = "import ckpt.writer.main, ckpt.store; ckpt.store.open_store('file:///tmp'); import ckpt_backends.local"
    loaded = loaded_by(statement)
    assert "numpy" in loaded and loaded & {"torch", "click", "rich", "fsspec"} == set()


def test_every_public_name_is_there() -> None:
    """Each name of `__all__` resolves, to what its home defines, and `__all__` has no other."""
    for name in ckpt.__all__:
        value = getattr(ckpt, name)
        assert value is getattr(importlib.import_module(f"ckpt.{ckpt._HOMES[name]}"), name)
    for part in ckpt._PARTS:
        assert getattr(ckpt, part) is importlib.import_module(f"ckpt.{part}")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ckpt.no_such_name


def test_a_name_that_a_module_has_too_stays_what_it_is() -> None:
    """`ckpt.load` is the function, also after something else of its module was used first."""
    for first in ("ckpt.Loaded", "ckpt.load"):
        loaded_by(f"import ckpt; {first}; assert callable(ckpt.load)")


def test_type_checkers_see_the_same_names() -> None:
    """The imports for type checkers list exactly the names that are resolved lazily."""
    tree = ast.parse((REPO / "ckpt" / "__init__.py").read_text())
    listed = {
        alias.asname: str(node.module)
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"ckpt.{home}" for name, home in ckpt._HOMES.items()}
    assert listed == homes | dict.fromkeys(ckpt._PARTS, "ckpt")
