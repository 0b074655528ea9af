"""Forged values, facts and columns with valid digests raise our own errors in bounded time."""

from __future__ import annotations

import copy
import io
import itertools
import json
import logging
import random
import resource
from collections import Counter as Counter_
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
import forgery
import inside
from ckpt.core.format import codec, index
from ckpt.core.format.digest import chunk_digest, file_digest
from ckpt.core.format.manifest import Manifest, index_key, manifest_key
from ckpt.core.format.table import DTYPES, Table
from ckpt.core.log.run_log import record_key
from ckpt.core.state.capture import Capture
from ckpt.errors import CheckpointError, MismatchError
from processes import run_script
from run_files import data_key, step_of
from test_promise_state import WIDTH, Counter, Scaled, State, numbers


def everything(step: int) -> State:
    """Return a state with each kind of entry."""
    torch.manual_seed(step)
    net = nn.Sequential(Counter(), Scaled(), nn.Linear(WIDTH, 2))
    optim = torch.optim.AdamW(net[1].parameters())
    net[1](torch.ones(1, WIDTH)).sum().backward()
    optim.step()
    lr = torch.optim.lr_scheduler
    sched = lr.SequentialLR(optim, [lr.ConstantLR(optim), lr.ExponentialLR(optim, 0.9)], [2])
    return {
        "model": net,
        "optim": optim,
        "sched": sched,
        "scaler": torch.amp.GradScaler("cpu"),
        "loader": ckpt.Loader(range(100), 2),
        "drawn": torch.Generator().manual_seed(step),
        "numpy": np.random.default_rng(step),
        "python": random.Random(step),
        "meta": {"lr": step / 4, "pair": (1, 2), "x": torch.arange(6) + step, "a": np.arange(4.0) * step},
        "rng": ckpt.RNG(),
    }


KINDS_OF_VALUES: list[Any] = [
    None, True, 7, -1.5, 10**40, "x", [], {}, [[]], [{"x": 1}], {"x": []}, {"$": "tuple", "v": [1]}, {"$": "what"},
    {"$": "tensor", "name": "meta.x"}, {"$": "tensor", "name": []}, {"$": "dict", "v": [[1, 2]]},
    {"$": "ndarray", "name": "meta.x", "dtype": "<f8", "shape": [1]}, {"$": "int", "v": "-0x" + "f" * 40},
]  # fmt: skip


def at(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a document with another value at one path."""
    found = copy.deepcopy(document)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = copy.deepcopy(value)
    return found


def forged() -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield changes of paths in values and facts to values of other types, of outer paths to several."""
    reading = Capture(everything(1)).read()
    sources = {
        "values": json.loads(json.dumps(reading.values)),
        "facts": [c["facts"] for c in reading.layout.components],
    }
    turn = itertools.cycle(KINDS_OF_VALUES)
    for kind, document in sources.items():
        for number, place in enumerate(forgery.places(document)):
            outer = len(place) < (3 if kind == "values" else 4)
            if any(type(key) is int and key > 3 for key in place[1:]) or (number % 2 and not outer):
                continue  # only the beginning of long lists, and every second of the inner paths
            many = KINDS_OF_VALUES[::3] if outer else [next(turn)]
            for value in many:

                def change(part: Any, kind: str = kind, place: Any = place, value: Any = value) -> None:
                    if kind == "values":
                        part["values"] = at(part["values"], place, value)
                    else:
                        facts = at([c["facts"] for c in part["layout"]["components"]], place, value)
                        for component, one in zip(part["layout"]["components"], facts, strict=True):
                            component["facts"] = one

                yield f"{kind} {place} = {value!r}", change


def test_values_of_another_type_raise_our_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any resealed value or fact is restored or raises our own error, and a MismatchError leaves the state
    unchanged."""
    caplog.set_level(logging.CRITICAL, "ckpt")
    run = forgery.built(1, everything)
    wrong = []
    ended: Counter_[str] = Counter_()
    live = everything(3)
    for name, change in forged():
        objects = inside.forge(run, manifest=change)
        folder = forgery.put({k: v for k, v in objects.items() if step_of(k) != 10}, tmp_path / "run")
        before = trained(live)
        try:
            forgery.restore_from(forgery.sources(folder)[0], live)
            ended["taken"] += 1
        except CheckpointError as error:
            ended[type(error).__name__] += 1
            if isinstance(error, MismatchError) and trained(live) != before:
                wrong.append(f"{name}: changed before {error}")
        except Exception as error:
            # Errors of user code, here of Counter.set_extra_state, are raised unchanged.
            if not name.startswith("values (0, "):
                wrong.append(f"{name}: {error!r}")
        if trained(live) != before:
            live = everything(3)  # removes all traces of the forged values
    assert not wrong, "\n".join(wrong[:40])
    assert min(ended["taken"], ended["CorruptError"], ended["MismatchError"]) > 20, ended


def trained(state: State) -> list[object]:
    tensors = numbers({"model": state["model"], "optim": state["optim"]})
    return [state["sched"].last_epoch, *(tensor.tolist() for tensor in tensors)]


# -- small files that could keep a reader busy --


def stray(run: forgery.Run) -> forgery.Objects:
    """Return two hundred records with large gaps between their numbers."""
    return run[0] | {record_key(99_000 * i): b"{}" for i in range(1, 200)}


def dotted(run: forgery.Run) -> forgery.Objects:
    """Return a checkpoint in which the name of an optimizer's tensor consists of dots."""

    def change(part: Any) -> None:
        layout, name = part["layout"], "optim.state." + "." * 3_000_000
        layout["aliases"][name] = layout["components"][0]["names"][0]
        layout["components"][1]["names"].append(name)

    return inside.forge(run, manifest=change)


def swollen(run: forgery.Run) -> forgery.Objects:
    """Return a tensor of 256 GiB in which every chunk is the same few hundred bytes."""
    count, size = 4000, 64 << 20
    plain = bytes(size)
    frame, file = codec.encode(1, plain, 4), data_key(run[1])
    digest, stored = (np.frombuffer(chunk_digest(one), np.uint8) for one in (plain, frame))

    def change(columns: Any) -> None:
        first, dims = int(columns["chunk_ends"][0]), int(columns["dim_ends"][0])
        columns["dtypes"][0] = DTYPES.index("U8")
        columns["dims"] = np.concatenate([[count * size, 0, count * size], columns["dims"][dims:]])
        columns["dim_ends"] += 3 - dims
        row = {"file": 0, "offset": len(run[0][file]), "stored": len(frame), "length": size, "codec": 1, "base": -1}
        for name, value in row.items():
            new = np.full(count, value, columns[name].dtype)
            columns[name] = np.concatenate([new, columns[name][first:]])
        columns["digest"] = np.concatenate([np.tile(digest, (count, 1)), columns["digest"][first:]])
        columns["stored_digest"] = np.tile(stored, (count, 1))
        columns["chunk_ends"] += count - first

    def part(document: Any) -> None:
        document["files"][0]["size"] += len(frame)

    objects = inside.forge(run, manifest=part, columns=change)
    return objects | {file: run[0][file] + frame}


def crowded(run: forgery.Run) -> forgery.Objects:
    """Return an index of two ranks with a few compressed bytes for hundreds of megabytes of empty lists."""
    objects, checkpoint = run
    parts = [Manifest.from_bytes(objects[manifest_key(checkpoint, rank)], "a part") for rank in range(2)]
    tables = [Table.from_bytes(part.table, "a table") for part in parts]
    shares = [index.Share(p.rank, p.world, p.layout, p.values, t) for p, t in zip(parts, tables, strict=True)]
    columns = dict(index.build(shares).columns)
    lists = b'{"layouts":[{"aliases":{},"components":[],"instances":{}}],"values":[' + b"[]," * (80 << 20)
    columns["views"] = np.frombuffer(lists + b'0],"views":[[0,0,[]]]}', np.uint8)
    columns["view"] = columns["alike"] = np.zeros(2, np.int32)
    raw = index.Index(columns, (), (), ()).to_bytes()
    last = max(key for key in objects if key.startswith("log/"))
    record = json.loads(objects[last])
    record["body"]["index"] = file_digest(raw)
    return objects | {last: inside.resealed(record), index_key(checkpoint): raw}


def busy(folder: str) -> None:
    """Verify and restore each case with limited CPU time. Without bounds each would take minutes."""
    torch.set_num_threads(1)
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    one, two = (forgery.built(world) for world in (1, 2))
    cases = {"stray": stray(one), "dotted": dotted(one), "swollen": swollen(one), "crowded": crowded(two)}
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    for name, objects in cases.items():
        assert sum(map(len, objects.values())) < 8 << 20
        place = forgery.put(objects, Path(folder) / "run")
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit):
            inside.main(["verify", str(place)])
        with suppress(CheckpointError):
            forgery.restored(place)
        print(name, flush=True)


def test_small_files_cause_bounded_work(tmp_path: Path) -> None:
    """The work for missing records, dots in names, and expanding chunks and columns is bounded."""
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    done = run_script(here + "import test_forged_values as t; t.busy(sys.argv[1])", tmp_path)
    assert done.stdout.split() == ["stray", "dotted", "swollen", "crowded"], (done.returncode, done.stderr[-3000:])
