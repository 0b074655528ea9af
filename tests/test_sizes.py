"""Nothing grows beyond what can be read at once: files, classes and functions of the library.

What is larger today stands in `LARGER`, which only gets shorter: an entry that is too generous is an error too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from processes import REPO

MOST = {"file": 400, "class": 300, "function": 40}  # lines
PACKAGES = (REPO / "ckpt", REPO / "backends" / "ckpt_backends")
LARGER = {
    "backends/ckpt_backends/local.py": 582,
    "backends/ckpt_backends/local.py:LocalStore": 329,
    "backends/ckpt_backends/s3.py": 443,
    "ckpt/checkpoint/commit.py": 630,
    "ckpt/checkpoint/commit.py:commit": 53,
    "ckpt/checkpoint/commit.py:recover": 46,
    "ckpt/checkpoint/commit.py:settle": 42,
    "ckpt/checkpoint/encode.py": 478,
    "ckpt/checkpoint/encode.py:_Work.run": 53,
    "ckpt/checkpoint/read.py": 610,
    "ckpt/checkpoint/read.py:fetch": 50,
    "ckpt/checkpoint/read.py:verify": 60,
    "ckpt/checkpoint/retention.py:retire": 51,
    "ckpt/checkpoint/write.py:finish_part": 53,
    "ckpt/cli/app.py": 571,
    "ckpt/cli/app.py:_show": 48,
    "ckpt/cli/maintain.py": 475,
    "ckpt/cli/repair.py:_repair": 41,
    "ckpt/cli/report.py:report": 47,
    "ckpt/cli/top_view.py": 410,
    "ckpt/convert/source_redo.py:redone": 50,
    "ckpt/convert/to_safetensors.py:plan": 41,
    "ckpt/dcp/coordinator.py": 472,
    "ckpt/format/codec.py": 429,
    "ckpt/format/merged.py": 471,
    "ckpt/format/merged.py:SavedState": 306,
    "ckpt/format/rank_index.py": 651,
    "ckpt/format/rank_index.py:_checked": 47,
    "ckpt/format/rank_index.py:_divide": 51,
    "ckpt/format/table.py": 456,
    "ckpt/format/table.py:_checked": 59,
    "ckpt/goodput/model.py:predict": 50,
    "ckpt/lightning/callback.py:CheckpointCallback": 305,
    "ckpt/loader.py:Loader.__init__": 41,
    "ckpt/maintain/audit.py": 500,
    "ckpt/ranks/exchange.py": 493,
    "ckpt/ranks/world.py": 409,
    "ckpt/redo/append.py": 560,
    "ckpt/redo/append.py:StepLog.append": 46,
    "ckpt/redo/frame.py": 582,
    "ckpt/restore/redo_source.py": 472,
    "ckpt/restore/resume.py": 603,
    "ckpt/restore/resume.py:_fill": 46,
    "ckpt/restore/resume.py:_restore": 48,
    "ckpt/restore/resume.py:gather": 65,
    "ckpt/restore/resume.py:restore_first": 42,
    "ckpt/runlog/log.py": 572,
    "ckpt/runlog/log.py:RunLog.append": 41,
    "ckpt/runlog/log.py:fold": 50,
    "ckpt/state/adapters.py": 654,
    "ckpt/state/capture.py": 572,
    "ckpt/state/capture.py:Capture": 414,
    "ckpt/state/capture.py:Capture._build": 56,
    "ckpt/state/placement.py": 567,
    "ckpt/telemetry/gauges.py:_values": 43,
    "ckpt/testing.py": 735,
    "ckpt/testing.py:StoreTests": 616,
    "ckpt/trainer/fault_handler.py": 743,
    "ckpt/trainer/fault_handler.py:FaultHandler": 588,
    "ckpt/trainer/stage.py": 608,
    "ckpt/trainer/stage.py:Stager": 558,
    "ckpt/trainer/writer_supervisor.py": 1200,
    "ckpt/trainer/writer_supervisor.py:WriterSupervisor": 1029,
    "ckpt/trainer/writer_supervisor.py:WriterSupervisor.__init__": 71,
    "ckpt/trainer/writer_supervisor.py:WriterSupervisor._join": 44,
    "ckpt/trainer/writer_supervisor.py:WriterSupervisor.take_prepared": 45,
    "ckpt/writer/bookkeeper.py": 441,
    "ckpt/writer/bookkeeper.py:Bookkeeper": 348,
    "ckpt/writer/main.py": 908,
    "ckpt/writer/main.py:Writer": 780,
    "ckpt/writer/persist.py": 874,
    "ckpt/writer/persist.py:Persister": 796,
    "ckpt/writer/persist.py:Persister._encode": 56,
    "ckpt/writer/persist.py:Persister._store_slot": 44,
    "ckpt/writer/status.py:StatusServer.look_now": 42,
}


def sizes(path: Path, text: str) -> Iterator[tuple[str, str, int]]:
    """Of a file and all that is in it: its kind, a name for it, and how many lines it has."""
    name = path.relative_to(REPO).as_posix()
    yield "file", name, len(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield "class", f"{name}:{node.name}", _lines(node)
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield "function", f"{name}:{node.name}.{item.name}", _lines(item)
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "function", f"{name}:{node.name}", _lines(node)


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def larger() -> dict[str, int]:
    files = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    found = [one for path in files for one in sizes(path, path.read_text())]
    return {name: size for kind, name, size in found if size > MOST[kind]}


def test_nothing_grows_beyond_what_can_be_read_at_once() -> None:
    """Divide it by what it is about. If it has become smaller: lower its entry, or take it out."""
    found = larger()
    assert {name: size for name, size in found.items() if size > LARGER.get(name, 0)} == {}
    assert {name: size for name, size in LARGER.items() if size > found.get(name, 0)} == {}


def test_negative_control_a_large_one_is_seen() -> None:
    text = "class A:\n    def f(self):\n" + "        pass\n" * 50
    assert ("function", "x.py:A.f", 51) in list(sizes(REPO / "x.py", text))


TWICE = {"CheckpointCallback"}  # one for each trainer, under the name that users know


def test_no_two_public_classes_have_one_name() -> None:
    """Who reads a name knows what it is."""
    names = [
        node.name
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == TWICE
