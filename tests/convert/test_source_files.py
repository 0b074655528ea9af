"""Checkpoints of other libraries are read bit for bit, and damaged ones are rejected."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import pickle
import random
import struct
import subprocess
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from ckpt.core.format.layout import Layout
from ckpt.core.format.saved_state import SavedState
from ckpt.core.format.table import SavedShard, Table
from ckpt.core.format.values import decode, show
from ckpt.core.state import tensors
from ckpt.core.state.capture import Capture
from ckpt.core.state.filler import Filler
from ckpt.errors import CheckpointError, CorruptError, FormatError, UsageError
from ckpt.tools.convert import parse_dcp, parse_safetensors, parse_torch
from ckpt.tools.convert.source import Want
from ckpt.tools.convert.source_files import FilesOrigin, Foreign, admit
from parallel import free_port, launch
from processes import run_script

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:TypedStorage is deprecated",
    "ignore:ComplexHalf support is experimental",
    "ignore:.*torch.jit.script:DeprecationWarning",
    "ignore:The given buffer is not writable",
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
PARSERS = {"torch": parse_torch, "safetensors": parse_safetensors, "dcp": parse_dcp}


# -- reading parsed files --


def read(foreign: Foreign) -> dict[str, bytes]:
    """Return the bytes of every tensor, read through the origin that commands use."""
    origin = FilesOrigin(foreign)
    try:
        found = {name: np.zeros(spec.nbytes, np.uint8) for name, spec in origin.tensors.items()}
        wants = [
            Want(name, ((0,) * len(t.shape), t.shape), 0, math.prod(t.shape), found[name])
            for name, t in origin.tensors.items()
        ]
        asyncio.run(origin.read(wants))
    finally:
        asyncio.run(origin.aclose())
    return {name: data.tobytes() for name, data in found.items()}


def tensors_of(foreign: Foreign) -> dict[str, Tensor]:
    """Return all tensors as torch tensors, including aliases."""
    origin = FilesOrigin(foreign)
    asyncio.run(origin.aclose())
    found = {}
    for name, data in read(foreign).items():
        tensor = tensors.empty(origin.tensors[name], "cpu")
        if data:
            tensors.as_bytes(tensor).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        found[name] = tensor
    return found | {alias: found[name] for alias, name in foreign.aliases.items()}


def bits(tensor: Tensor) -> bytes:
    return bytes(tensors.as_bytes(tensor.detach().cpu().contiguous()).numpy().tobytes())


def same(found: Tensor, expected: Tensor) -> bool:
    """Return True if the dtype, the shape and every bit are equal."""
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and bits(found) == bits(expected)


def plain(foreign: Foreign) -> dict[str, Any]:
    """Return the plain values by path, with their tensors and arrays."""
    found = tensors_of(foreign)

    def back(reference: Any) -> object:
        tensor = found[reference["name"]]
        return tensor if reference["$"] == "tensor" else tensors.to_array(tensor, reference)

    return {".".join(map(str, e.path)): decode(e.values, back) for e in foreign.entries}


def kinds(foreign: Foreign) -> dict[str, str]:
    return {".".join(map(str, entry.path)): entry.kind for entry in foreign.entries}


def saved(foreign: Foreign) -> tuple[SavedState, list[bytes]]:
    """Return the state as if one rank had saved it, and the bytes of each chunk."""
    origin = FilesOrigin(foreign)
    asyncio.run(origin.aclose())
    specs, data = list(origin.tensors.values()), read(foreign)
    components = [entry.component for entry in foreign.entries]
    layout = Layout.from_json(Layout(tuple(specs), foreign.aliases, components).to_json())
    chunks = [data[t.name] for t in specs]
    lengths, none = np.array([len(b) for b in chunks], np.int64), np.zeros(len(specs), np.int64)
    hashed = b"".join(hashlib.blake2b(chunk, digest_size=16).digest() for chunk in chunks)
    digests = np.frombuffer(hashed, np.uint8).reshape(-1, 16)
    table = Table(
        tuple(SavedShard(t.name, t.dtype, t.shape, (0,) * len(t.shape), t.shape) for t in specs),
        np.arange(len(specs) + 1),
        *(none, none, lengths, lengths, none, none - 1),
        *(digests, digests),
        files=("file",),
    )
    values = json.loads(json.dumps([e.values for e in foreign.entries], allow_nan=False, sort_keys=True))
    return SavedState([layout], [values], [table]), chunks


def restore(foreign: Foreign, state: dict[str, Any]) -> None:
    """Restore into a live state, strictly, as a Checkpointer does."""
    found, chunks = saved(foreign)
    placement = Capture(state).place(found)
    placement.check()
    filler = Filler(found, placement.fills, placement.whole)
    for number in filler.chunks:
        filler.add(number, memoryview(chunks[number]))
    filler.finish()
    for finish in (*placement.finishers, *placement.last):
        finish()


# -- states --


class Tied(nn.Module):
    """Two linear layers with a shared weight, a norm with buffers, and parameters without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 4, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 4)
        self.out.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.embed(self.norm(x)) + self.out(x)
        return found


def trained(kind: Callable[..., torch.optim.Optimizer], steps: int = 3, **options: Any) -> dict[str, Any]:
    """Return a model, its optimizer and its schedule after a few steps."""
    torch.manual_seed(1)
    model = Tied()
    decay = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    rest = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
    optimizer = kind([{"params": decay}, {"params": rest, "lr": 0.5}], lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = {"model": model, "optim": optimizer, "sched": schedule}
    train(state, steps)
    return state


def untied(kind: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """Return a model without shared tensors, after one step, and its optimizer."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    weights = [p for p in model.parameters() if p.dim() > 1]
    optimizer = kind([{"params": weights}, {"params": [p for p in model.parameters() if p.dim() == 1]}], lr=0.1)
    model(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def groups_of(state: dict[str, Any]) -> list[list[str]]:
    """Return the parameter names of each group."""
    names = {id(p): f"model.{n}" for n, p in state["model"].named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in state["optim"].param_groups]


def train(state: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        state["optim"].zero_grad()
        generator = torch.Generator().manual_seed(step)
        state["model"](torch.randn(5, 6, generator=generator)).square().sum().backward()
        state["optim"].step()
        state["sched"].step()


def every_bit(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of a live state."""
    reading = Capture(state).read()
    return {spec.name: tensor.clone() for spec, tensor in zip(reading.layout.tensors, reading.tensors, strict=True)}


def check_restored(foreign: Foreign, source: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Check that `fresh` becomes equal to `source` in every bit, and stays equal when both train on."""
    assert any(not same(b, every_bit(source)[a]) for a, b in every_bit(fresh).items()), "negative control"
    restore(foreign, fresh)
    for _ in range(2):
        expected, found = every_bit(source), every_bit(fresh)
        assert found.keys() == expected.keys()
        assert all(same(found[name], expected[name]) for name in expected)
        assert fresh["sched"].state_dict() == source["sched"].state_dict()
        train(source, 2)
        train(fresh, 2)


def dtypes() -> list[torch.dtype]:
    return [dtype for dtype in tensors.DTYPE_NAME if dtype.itemsize]


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return random bits. For bool, return only 0 and 1."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def zoo() -> dict[str, Tensor]:
    """Return tensors of every dtype: scalar, empty, transposed, sliced, and a parameter."""
    base = torch.randn(6, 8)
    found = {f"{dtype}.x".replace("torch.", ""): of_dtype(dtype, 3, 4) for dtype in dtypes()}
    found |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "hollow": torch.zeros(3, 0, 2)}
    found |= {"base": base, "t": base.t(), "rows": base[2:4], "columns": base[:, 1:4], "steps": base[::2, ::3]}
    found |= {"again": base, "param": nn.Parameter(torch.randn(2, 2)), "one": torch.randn(1, 1, 5).transpose(0, 2)}
    return found


# -- torch.save --


def test_torch_file_tensors_are_restored_bit_exact(tmp_path: Path) -> None:
    """Each dtype and form is restored in every bit. Views of one storage keep their values."""
    path, state = tmp_path / "x.pt", zoo()
    torch.save(state, path)
    assert parse_torch.sniff(path) and not parse_safetensors.sniff(path) and not parse_dcp.sniff(path)
    foreign = parse_torch.parse(path)
    assert kinds(foreign) == {"model": "module"}
    found = tensors_of(foreign)
    assert found.keys() == {f"model.{name}" for name in state}
    for name, tensor in state.items():
        assert same(found[f"model.{name}"], tensor), name
    assert foreign.aliases == {"model.again": "model.base"}  # the same view; others are separate tensors


def test_negative_control_flipped_bit_is_detected(tmp_path: Path) -> None:
    """A flipped bit in the file gives a different tensor."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(4)}, path)
    piece = parse_torch.parse(path).pieces[0]
    data = bytearray(path.read_bytes())
    data[piece.at] ^= 1
    path.write_bytes(data)
    assert not same(tensors_of(parse_torch.parse(path))["model.w"], torch.ones(4))


def test_torch_file_plain_values_are_restored(tmp_path: Path) -> None:
    """Plain values, including numpy's, keep their types and values."""
    path = tmp_path / "x.pt"
    arrays = {
        "c": np.arange(12.0).reshape(3, 4), "f": np.asfortranarray(np.arange(6).reshape(2, 3)), "b": np.array([True]),
        "u": np.array(["ab", "c"]), "m": np.array(["2020-01-01"], "M8[ns]"), "e": np.zeros((0, 2), np.int8),
        "big": np.arange(3, dtype=">i4"), "zero": np.array(7, np.uint16),
    }  # fmt: skip
    values = {
        "term": 3, "big": -(2**100), "name": "é", "raw": b"\0\xff", "none": b"", "nan": float("nan"), "t": (1, (2,)),
        "counter": Counter({1: 2}), "ordered": OrderedDict(b=1, a=2), "nested": {"x": [1, {"y": None}], 3: True},
        "complex": 1 - 2j, "bytearray": bytearray(b"x"), "set": {1, "a", (2j,)},
        "np": [np.float32(1.25), np.int64(-1), np.bool_(True)], "arrays": arrays,
    }  # fmt: skip
    torch.save({"values": values, "rng": torch.get_rng_state()}, path)
    foreign = parse_torch.parse(path)
    assert kinds(foreign) == {"values": "stateful", "rng": "plain"}
    found = plain(foreign)["values"]
    assert list(found) == list(values)
    for key in values.keys() - {"nan", "arrays", "np"}:
        assert (type(found[key]), found[key]) == (type(values[key]), values[key]), key
    assert math.isnan(found["nan"]) and [type(v) for v in found["np"]] == [type(v) for v in values["np"]]
    assert found["np"] == values["np"]
    for key, array in arrays.items():
        got = found["arrays"][key]
        array = array.astype(array.dtype.newbyteorder("="))  # as numpy's own pickles do
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), key
    assert same(plain(foreign)["rng"], torch.get_rng_state())


KINDS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize(("kind", "named"), [("adamw", True), ("momentum", False), ("adagrad", False)])
def test_training_state_restores_into_live_objects(tmp_path: Path, kind: str, named: bool) -> None:
    """A torch.save of state_dicts restores into live objects, and training continues bit-exact.

    The optimizer has two groups with numbered parameters. Their names are inferred from shapes, or stored.
    """
    make, options = KINDS[kind]
    path = tmp_path / "x.ckpt"
    source, fresh = trained(make, **options), trained(make, 1, **options)
    state = {name: one.state_dict() for name, one in source.items()}
    if named:
        called = {id(p): name for name, p in source["model"].named_parameters()}
        for group, live in zip(state["optim"]["param_groups"], source["optim"].param_groups, strict=True):
            group["param_names"] = [called[id(p)] for p in live["params"]]
    torch.save(state, path)
    foreign = parse_torch.parse(path)
    assert kinds(foreign) == {"model": "module", "optim": "optimizer", "sched": "stateful"}
    assert foreign.aliases == {"model.out.weight": "model.embed.weight"}
    assert any("order and shapes determined their names" in note for note in foreign.notes) is not named
    check_restored(foreign, source, fresh)


def test_ambiguous_parameter_names_are_not_guessed(tmp_path: Path) -> None:
    """If order and shapes are ambiguous, parameters are named by position, and a note is added."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.AdamW([model[0].weight, model[2].weight])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = tmp_path / "x.pt"
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, path)
    foreign = parse_torch.parse(path)
    assert foreign.entries[1].facts["params"] == [["0.0", "0.1"]] and "ambiguous" in foreign.notes[0]
    twice = tmp_path / "y.pt"  # two modules that fit
    torch.save({"a": nn.Linear(2, 2).state_dict(), "b": nn.Linear(2, 2).state_dict(),
                "optim": torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict()}, twice)  # fmt: skip
    assert parse_torch.parse(twice).entries[2].facts["params"] == [["0.0", "0.1"]]


@pytest.mark.parametrize("named", [False, True], ids=["numbered", "named"])
def test_average_next_to_the_model_is_not_chosen(tmp_path: Path, named: bool) -> None:
    """Both modules fit the optimizer: the model's names are used, and a note explains the choice."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.named_parameters() if named else model.parameters())
    path = tmp_path / "x.pt"
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({"ema": average, "model": model.state_dict(), "optim": optimizer.state_dict()}, path)
    foreign = parse_torch.parse(path)
    assert foreign.entries[2].facts["params"] == [[f"model.{name}" for name in average]]
    assert any("several modules" in note for note in foreign.notes)
    torch.save({"a": average, "b": model.state_dict(), "optim": optimizer.state_dict()}, path)
    expected = list(average) if named else ["0.0", "0.1", "0.2", "0.3"]
    assert parse_torch.parse(path).entries[2].facts["params"] == [expected]


def test_containers_of_states_are_searched(tmp_path: Path) -> None:
    """Lists and dicts that contain states are searched, as in Lightning's files. Others are values."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    path = tmp_path / "last.ckpt"
    torch.save(
        {
            "state_dict": OrderedDict(model.state_dict()), "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [schedule.state_dict()], "term": 1, "global_step": 5,
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(1.0), "k": {}}},
            "loops": {"fit_loop": {"state_dict": {}, "done": [1, 2]}}, "hyper_parameters": {"lr": 0.1},
        },
        path,
    )  # fmt: skip
    assert kinds(parse_torch.parse(path)) == {
        "state_dict": "module", "optimizer_states.0": "optimizer", "lr_schedulers.0": "stateful", "term": "plain",
        "global_step": "plain", "callbacks": "stateful", "loops": "stateful", "hyper_parameters": "stateful",
    }  # fmt: skip


class Mine:
    """A user-defined class."""


def refused_values() -> dict[str, tuple[Any, str]]:
    expanded = torch.zeros(1).expand(5)
    with warnings.catch_warnings(action="ignore"):
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    return {
        "object": (Mine(), r"a\.b .an object of .*\.Mine"),
        "namespace": (__import__("argparse").Namespace(x=1), r"a\.b .an object of argparse\.Namespace.*--skip-o"),
        "sparse": (torch.eye(3).to_sparse(), r"a\.b.*to_dense"),
        "quantized": (quantized, "quantized"),
        "expanded": (expanded, r"a\.b.*contiguous"),
        "conjugate": (torch.ones(2, dtype=torch.complex64).conj(), r"a\.b.*resolve_conj"),
        "storage": (torch.ones(2).untyped_storage(), r"a\.b.*storage"),
        "objects": (np.array([None]), r"a\.b.*objects or fields"),
        "key": ({(1, 2): 3}, r"a\.b.*a key that is neither"),
    }  # fmt: skip


@pytest.mark.parametrize("case", refused_values())
def test_unsupported_value_is_rejected_with_its_path(tmp_path: Path, case: str) -> None:
    """An unsupported value raises an error with its path. It is never lost or changed."""
    value, message = refused_values()[case]
    torch.save({"a": {"b": value}}, tmp_path / "x.pt")
    with pytest.raises((UsageError, FormatError), match=message):
        admit(parse_torch.parse(tmp_path / "x.pt"))


def test_objects_are_skipped_or_not_selected(tmp_path: Path) -> None:
    """With `skip`, or if `only` selects other entries, the rest is loaded and no object is created."""
    model = nn.Linear(2, 2)
    state = {
        "model": model.state_dict(),
        "args": {"mine": Mine(), "lr": 0.1},
        "seen": [Mine(), 2],
        "rate": np.float64(2),
    }
    torch.save(state, tmp_path / "x.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    for foreign in (parse_torch.parse(tmp_path / "x.pt"), parse_dcp.parse(tmp_path / "dcp")):
        assert set(foreign.objects) == {("args", "mine"), ("seen", 0)}
        assert same(tensors_of(foreign)["model.weight"], model.weight)
        values = {show(entry.path): decode(entry.values) for entry in foreign.entries if entry.kind != "module"}
        assert values == {"args": {"lr": 0.1}, "seen": [None, 2], "rate": 2.0}
        assert not admit(foreign, ["model"]).notes
        assert [note for note in admit(foreign, skip=True).notes if "Mine" in note and "skipped" in note]
        for only in ((), ["args"], ["args.mine"], ["see?"], ["*"]):
            with pytest.raises(UsageError, match="Mine"):
                admit(foreign, only)


class Armed:
    """Creates a file if it is really unpickled."""

    def __init__(self, path: Path, run: Callable[[str], Any] = subprocess.getoutput) -> None:
        self.path, self.run = path, run

    def __reduce__(self) -> Any:
        return self.run, (f"touch {self.path}",)


def test_code_of_an_object_is_not_run(tmp_path: Path) -> None:
    """A stand-in replaces the object's constructor. A file with only such an object is rejected."""
    torch.save({"w": torch.ones(2), "armed": Armed(tmp_path / "was-run")}, tmp_path / "x.pt")
    assert list(parse_torch.parse(tmp_path / "x.pt").objects) == [("armed",)]
    torch.save(Armed(tmp_path / "was-run"), tmp_path / "x.pt")
    with pytest.raises(FormatError, match="contains only"):
        parse_torch.parse(tmp_path / "x.pt")
    assert not (tmp_path / "was-run").exists()
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "was-run").exists()  # the object does run code


def test_other_file_formats_are_rejected_with_advice(tmp_path: Path) -> None:
    """Covers files from before torch 1.6, TorchScript, big-endian, compressed and other files."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UsageError, match=r"before 1\.6.*torch\.save"):
        parse_torch.parse(path)
    assert parse_torch.sniff(path)
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    with pytest.raises(UsageError, match="TorchScript"):
        parse_torch.parse(path)
    torch.save({"w": torch.ones(2)}, path)
    rewrite(path, lambda name, data: b"big" if name.endswith("byteorder") else data)
    with pytest.raises(UsageError, match="big-endian"):
        parse_torch.parse(path)
    torch.save({"w": torch.ones(2)}, path)
    rewrite(path, lambda name, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="compressed"):
        parse_torch.parse(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.txt", "x")
    with pytest.raises(FormatError, match=r"data\.pkl"):
        parse_torch.parse(path)
    path.write_bytes(b"hello")
    assert not parse_torch.sniff(path)
    with pytest.raises(FormatError, match=r"not a torch\.save file"):
        parse_torch.parse(path)
    with pytest.raises(UsageError, match="cannot read"):
        parse_torch.parse(tmp_path / "none.pt")


def rewrite(path: Path, change: Callable[[str, bytes], bytes], how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in found.items():
            archive.writestr(name, change(name, data))


def test_overlapping_records_are_rejected(tmp_path: Path) -> None:
    """A forged directory maps two storages to the same bytes, so one would be read as the other."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(64), "b": torch.zeros(64)}, path)
    assert parse_torch.parse(path).pieces, "negative control"
    with zipfile.ZipFile(path) as archive:
        offsets = {i.filename: i.header_offset for i in archive.infolist()}
    data = path.read_bytes()
    one, other = (struct.pack("<I", offsets[f"x/data/{i}"]) for i in (0, 1))
    start = data.index(b"PK\1\2")
    assert data.count(other, start) == 1
    path.write_bytes(data[:start] + data[start:].replace(other, one))
    with pytest.raises(CorruptError, match="overlap"):
        parse_torch.parse(path)


def test_wrapper_prefixes_are_removed_from_names(tmp_path: Path) -> None:
    """The state_dict of a compiled module, saved with its optimizer's names, loads into the module."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    compiled: Any = torch.compile(model)
    optimizer = torch.optim.SGD(compiled.named_parameters(), lr=0.1, momentum=0.9)
    compiled.state_dict()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": compiled.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "x.pt")
    foreign = parse_torch.parse(tmp_path / "x.pt")
    assert any("torch.compile" in note for note in foreign.notes)
    fresh = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    state = {"model": fresh, "optim": torch.optim.SGD(fresh.parameters(), lr=0.5, momentum=0.9)}
    restore(foreign, state)
    found, expected = every_bit(state), every_bit({"model": model, "optim": optimizer})
    assert found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in found)


def test_wrapper_like_names_are_kept_in_mixed_modules(tmp_path: Path) -> None:
    """A file stores no classes: a prefix counts as a wrapper's only if all tensors of a module have it."""
    saved = {"_orig_mod.weight": torch.ones(2), "gain": torch.ones(1), "a._orig_mod.0": torch.ones(3)}
    torch.save(saved, tmp_path / "x.pt")
    entry = parse_torch.parse(tmp_path / "x.pt").entries[0]
    assert {name.removeprefix("model.") for name in entry.names} == {"_orig_mod.weight", "gain", "a.0"}


@pytest.mark.parametrize("state", [{"step": 7, "w": 1.5}, {"global_step": 7, "step": 1}, {"step": "x", "w": {}}])
def test_training_step_is_found(tmp_path: Path, state: dict[str, Any]) -> None:
    """The step is found in the entries that trainers usually write."""
    torch.save(state, tmp_path / "x.pt")
    assert parse_torch.parse(tmp_path / "x.pt").step == (7 if 7 in state.values() else None)


def test_offsets_beyond_four_gigabytes_are_correct(tmp_path: Path) -> None:
    """In a sparse 5 GB file, torch reads the bytes written at the parsed offsets."""
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():
        torch.save({"large": torch.empty(5 << 30, dtype=torch.uint8), "w": torch.zeros(4)}, path)
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("no sparse files here")
    pieces = {piece.name: piece for piece in parse_torch.parse(path).pieces}
    assert pieces["model.w"].at > 5 << 30
    with path.open("r+b") as file:
        file.seek(pieces["model.w"].at)
        file.write(bits(torch.arange(4.0)))
        file.seek(pieces["model.large"].at + (5 << 30) - 1)
        file.write(b"\x07")
    found = torch.load(path, mmap=True, weights_only=True)
    assert same(found["w"], torch.arange(4.0)) and found["large"][-1] == 7 and found["large"][-2] == 0


@pytest.mark.parametrize("change", [b"1234", b"0" * 64])
def test_storage_of_wrong_size_is_damage(tmp_path: Path, change: bytes) -> None:
    """A storage with fewer or more bytes than the pickle declares is damage, even if the tensor fits."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(4)[:1]}, path)
    rewrite(path, lambda name, data: change if name.endswith("/data/0") else data)
    with pytest.raises(CorruptError, match="its 16 bytes are missing"):
        parse_torch.parse(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", PARSERS)
def test_non_files_are_rejected(tmp_path: Path, kind: str) -> None:
    """Folders, pipes and missing files are rejected, and no parser blocks on a pipe."""
    parser = PARSERS[kind]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / ".metadata")
    for path in (tmp_path / "pipe", tmp_path / "run", tmp_path / "none"):
        with pytest.raises((UsageError, FormatError, CorruptError)):
            parser.parse(path)  # type: ignore[attr-defined]
        assert not any(one.sniff(path) for one in PARSERS.values())  # type: ignore[attr-defined]


# -- distributed checkpoints --


def state_dicts(state: dict[str, Any], flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(state["model"]),
        "optim": get_optimizer_state_dict(state["model"], state["optim"], options=options),
        "sched": state["sched"].state_dict(),
        "term": 3,
    }


@pytest.mark.parametrize("flat", [False, True], ids=["lists", "flat"])
def test_distributed_checkpoint_restores_into_live_objects(tmp_path: Path, flat: bool) -> None:
    """torch's own dcp.save writes both optimizer formats. Training continues with equal bits."""
    source, fresh = trained(torch.optim.AdamW), trained(torch.optim.AdamW, 1)
    dcp.save(state_dicts(source, flat), checkpoint_id=tmp_path / "step-3")
    assert parse_dcp.sniff(tmp_path / "step-3") and not parse_safetensors.sniff(tmp_path / "step-3")
    foreign = parse_dcp.parse(tmp_path / "step-3")
    assert kinds(foreign) == {"model": "module", "optim": "optimizer", "sched": "stateful", "term": "plain"}
    assert not foreign.aliases  # torch wrote the tied tensor twice: only digests show that both are equal
    fresh["term"] = 0
    check_restored(foreign, {**source, "term": 3}, fresh)
    assert fresh["term"] == 3


def test_distributed_checkpoint_tensors_are_restored(tmp_path: Path) -> None:
    """Every dtype and form that torch can write this way is read, and all types of plain values."""
    tensors_in = zoo()
    state = {"z": tensors_in, "l": [1, {"a": (1, 2)}], "n": {"x": torch.ones(2), "s": "t", "arr": np.arange(3)}, "e": 7}
    dcp.save(state, checkpoint_id=tmp_path)
    foreign = parse_dcp.parse(tmp_path)
    found = tensors_of(foreign)
    for name, tensor in tensors_in.items():
        assert same(found[f"z.{name}"], tensor), name
    values = plain(foreign)
    assert values["l"] == [1, {"a": (1, 2)}] and values["e"] == 7 and values["n"]["s"] == "t"
    assert (values["n"]["arr"] == np.arange(3)).all()


def test_optimizer_state_dict_is_recognized(tmp_path: Path) -> None:
    """torch turns parameter numbers into text. Without optimizer state nothing is written."""
    state = untied(torch.optim.AdamW)
    dcp.save({"optim": state["optim"].state_dict(), "model": state["model"].state_dict()}, checkpoint_id=tmp_path / "a")
    foreign = parse_dcp.parse(tmp_path / "a")
    optimizer = next(e for e in foreign.entries if e.kind == "optimizer")
    assert optimizer.facts["with_state"] == [name for group in groups_of(state) for name in group]
    bare = trained(torch.optim.SGD)
    dcp.save(state_dicts(bare, False), checkpoint_id=tmp_path / "b")
    optimizer = next(e for e in parse_dcp.parse(tmp_path / "b").entries if e.path == ("optim",))
    facts = optimizer.facts
    assert (optimizer.kind, facts["params"], facts["with_state"]) == ("optimizer", groups_of(bare), [])


def _old(metadata: Any) -> None:
    """Make metadata as older versions of torch wrote it."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    metadata.planner_data, metadata.storage_meta = None, None
    for one in metadata.state_dict_metadata.values():
        if hasattr(one, "properties"):
            one.properties = TensorProperties(dtype=one.properties.dtype)


def test_metadata_without_planner_is_recognized(tmp_path: Path) -> None:
    """Without nesting information, optimizers are recognized by their names, also with old metadata classes."""
    state = trained(torch.optim.AdamW)
    found = state_dicts(state, True)
    flat = {**found["model"], **{f"optim.{name}": value for name, value in found["optim"].items()}}
    dcp.save(flat, checkpoint_id=tmp_path)
    forged(tmp_path, _old)
    assert b"sharded_tensor" in (tmp_path / ".metadata").read_bytes()
    foreign = parse_dcp.parse(tmp_path)
    assert kinds(foreign) == {"model": "module", "optim": "optimizer"}
    assert foreign.entries[1].facts["params"] == groups_of(state)


RANKS = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import *
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 36), nn.Linear(36, 7))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optim = torch.optim.AdamW(model.parameters(), lr=0.1)
for i in range(2):
    model(torch.randn(3, 20)).square().sum().backward()
    optim.step()
state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)}
dcp.save(state, checkpoint_id=sys.argv[1])
if sys.argv[2] == "hf":
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    dcp.save(state["model"], storage_writer=HuggingFaceStorageWriter(sys.argv[1] + ".hf", save_distributed=True))
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
out = {"model": get_model_state_dict(model, options=whole)}
out["optim"] = get_optimizer_state_dict(model, optim, options=whole)
if dist.get_rank() == 0:
    torch.save(out, sys.argv[1] + ".pt")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that ends
"""


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageWriter"), reason="torch before 2.8 has no such pieces")
def test_pieces_of_four_ranks_are_merged(tmp_path: Path) -> None:
    """Four ranks with FSDP2 save uneven pieces: the result equals torch's gathered state, also for safetensors."""
    target = tmp_path / "step-2"
    done = launch(4, RANKS, target, "hf", port=free_port())
    assert all(process.returncode == 0 for process in done), done[0].stderr[-3000:]
    gathered = torch.load(f"{target}.pt", weights_only=True)
    foreign = parse_dcp.parse(target)
    assert max(Counter(piece.name for piece in foreign.pieces).values()) == 4
    found = tensors_of(foreign)
    for name, tensor in gathered["model"].items():
        assert same(found[f"model.{name}"], tensor)
        assert same(found[f"optim.state.model.{name}.exp_avg"], gathered["optim"]["state"][name]["exp_avg"])
    whole = tensors_of(parse_torch.parse(Path(f"{target}.pt")))
    assert whole.keys() == found.keys() and all(same(whole[name], found[name]) for name in found)
    pieces = tensors_of(parse_safetensors.parse(Path(f"{target}.hf")))
    assert all(same(pieces[f"model.{name}"], tensor) for name, tensor in gathered["model"].items())
    (target / "__2_0.distcp").unlink()
    with pytest.raises(CorruptError, match=r"__2_0\.distcp is missing"):
        parse_dcp.parse(target)


def forged(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the `.metadata` file of a checkpoint."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def _first_chunk(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for key, value in fields.items():
            setattr(metadata.state_dict_metadata["w"].chunks[0], key, torch.Size(value))

    return change


def _all_places(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            for key, value in fields.items():
                setattr(info, key, value)

    return change


FORGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "above": (_all_places(relative_path="../x.distcp"), "outside"),
    "missing": (_all_places(relative_path="none.distcp"), "missing"),
    "behind": (_all_places(offset=2**50), "truncated"),
    "short": (_all_places(length=40), "damaged|truncated"),
    "box": (_first_chunk(sizes=(2, 3)), "of shape"),
    "no place": (lambda m: m.storage_data.clear(), "has no location for"),
    "no state": (lambda m: setattr(m, "state_dict_metadata", None), "not written by torch"),
    "huge list": (lambda m: m.planner_data.update(w=("a", 2**60)), "impossibly long lists"),
    "size": (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size((9, 4))), "missing"),
    "dtype": (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", torch.quint8), "quint8"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_dcp_metadata_is_rejected(tmp_path: Path, case: str) -> None:
    """Files outside the folder, invalid locations and wrong shapes are rejected with the reason."""
    (tmp_path / "x.distcp").write_bytes(b"x")
    folder = tmp_path / "run"
    dcp.save({"w": torch.ones(4, 4), "e": 1}, checkpoint_id=folder)
    FilesOrigin(parse_dcp.parse(folder))
    change, message = FORGED[case]
    forged(folder, change)
    with pytest.raises((CorruptError, UsageError), match=message):
        asyncio.run(FilesOrigin(parse_dcp.parse(folder)).aclose())


# -- safetensors --


def test_safetensors_file_tensors_are_restored(tmp_path: Path) -> None:
    """Every dtype of the library is read from one file, from a folder, and through an index."""
    state = {name: tensor.detach().contiguous().clone() for name, tensor in zoo().items()}
    state = {n: t for n, t in state.items() if t.dtype not in (torch.complex128, torch.complex32)}
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, path)
    assert parse_safetensors.sniff(path) and parse_safetensors.sniff(tmp_path) and not parse_torch.sniff(path)
    foreign = parse_safetensors.parse(path)
    found = tensors_of(foreign)
    assert kinds(foreign) == {"model": "module"} and found.keys() == {f"model.{name}" for name in state}
    assert all(same(found[f"model.{name}"], tensor) for name, tensor in state.items())
    assert parse_safetensors.parse(tmp_path).pieces == foreign.pieces
    names = sorted(state)
    for i in (0, 1):
        safetensors.torch.save_file({n: state[n] for n in names[i::2]}, tmp_path / f"model-{i}.safetensors")
    path.unlink()
    whole = tensors_of(parse_safetensors.parse(tmp_path))
    index = {n: f"model-{i}.safetensors" for i in (0, 1) for n in names[i::2]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    indexed = tensors_of(parse_safetensors.parse(tmp_path, ("net", 1)))
    for name, tensor in state.items():
        assert same(whole[f"model.{name}"], tensor) and same(indexed[f"net.1.{name}"], tensor)


def test_tied_safetensors_model_restores(tmp_path: Path) -> None:
    """Names that the library omitted and noted become aliases of the stored tensors."""
    model, fresh = trained(torch.optim.SGD)["model"], Tied()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"), metadata={"format": "pt", "x": "y"})
    foreign = parse_safetensors.parse(tmp_path)
    assert len(foreign.aliases) == 1
    restore(foreign, {"model": fresh})
    assert all(same(tensor, model.state_dict()[name]) for name, tensor in fresh.state_dict().items())


def header(data: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def one(dtype: Any = "F32", shape: Any = (2,), at: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


BAD_HEADERS: dict[str, tuple[bytes, type[CheckpointError], str]] = {
    "huge": (header({"a": one()}, b"0" * 8, 2**60), CorruptError, "not a safetensors file"),
    "longer than the file": (header({"a": one()}, b"", 90_000_000), CorruptError, "header"),
    "dtype": (header({"a": one("F7")}, b"0" * 8), CorruptError, "unknown variant `F7`"),
    "more behind": (header({"a": one()}, b"0" * 9), CorruptError, "not fully covered"),
    "other bytes": (header({"a": one(shape=(3,))}, b"0" * 8), CorruptError, "damaged"),
    "deep": (header(b'{"a":' + b"[" * 90000), CorruptError, "damaged"),
    "metadata": (header({"__metadata__": {"a": 1}}), CorruptError, "damaged"),
    "sharding": (header({"__metadata__": {"DCP_SHARDING_INFO": "[1]"}}), CorruptError, "damaged"),
    "empty": (b"", CorruptError, "not a safetensors file"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_safetensors_headers_are_rejected(tmp_path: Path, case: str) -> None:
    """Each is rejected with its reason, also by the library itself, except for what only we check."""
    data, error, message = BAD_HEADERS[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(error, match=message):
        parse_safetensors.parse(path)
    if case != "sharding":
        with pytest.raises(Exception):
            safetensors.torch.load_file(path)


def test_index_must_stay_in_its_folder(tmp_path: Path) -> None:
    """The index must list existing tensors. With two indexes, one must have the usual name."""
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    safetensors.torch.save_file({"a": torch.ones(2), "more": torch.ones(1)}, folder / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    for file in ("../x.safetensors", str(tmp_path / "x.safetensors"), "", "x\0"):
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(CorruptError, match="outside"):
            parse_safetensors.parse(folder)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    with pytest.raises(CorruptError, match="lists b in"):
        parse_safetensors.parse(folder)
    for text in ("[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 90000):
        index.write_text(text)
        with pytest.raises(CorruptError, match="damaged"):
            parse_safetensors.parse(folder)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    foreign = parse_safetensors.parse(folder)
    assert [piece.name for piece in foreign.pieces] == ["model.a"] and "more" in foreign.notes[0]
    (folder / "other.safetensors.index.json").write_text("{}")
    assert parse_safetensors.parse(folder).pieces == foreign.pieces
    index.rename(folder / "third.safetensors.index.json")
    with pytest.raises(UsageError, match="several indexes"):
        parse_safetensors.parse(folder)


def test_name_in_two_files_requires_an_index(tmp_path: Path) -> None:
    for i in (0, 1):
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / f"{i}.safetensors")
    with pytest.raises(CorruptError, match="several files"):
        parse_safetensors.parse(tmp_path)


# -- damage --


def made(kind: str, folder: Path) -> tuple[Path, list[Path]]:
    """Return the path of a small checkpoint of a format, and its files."""
    state = {"model": {"w": torch.randn(3, 4), "b": torch.randn(3)}, "term": 3, "np": np.arange(40.0)}
    if kind == "torch":
        torch.save(state, folder / "x.pt")
        return folder / "x.pt", [folder / "x.pt"]
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder / "d")
        return folder / "d", sorted((folder / "d").iterdir())
    safetensors.torch.save_file(state["model"], folder / "model.safetensors")
    return folder / "model.safetensors", [folder / "model.safetensors"]


def checkpoint(kind: str, path: Path) -> str:
    """Return "read" or the name of our own error. Other errors propagate."""
    try:
        read(PARSERS[kind].parse(path))  # type: ignore[attr-defined]
    except CheckpointError as error:
        assert str(error) and len(str(error)) < 2000
        return type(error).__name__
    return "read"


@pytest.mark.parametrize("kind", PARSERS)
def test_truncated_files_raise_our_errors(tmp_path: Path, kind: str) -> None:
    """Each file is truncated at 20 positions: the read raises our error and never returns an incomplete tensor."""
    path, files = made(kind, tmp_path)
    assert checkpoint(kind, path) == "read", "negative control"
    for file in files:
        data = file.read_bytes()
        for i in range(20):
            file.write_bytes(data[: len(data) * i // 20])
            assert checkpoint(kind, path) in ("CorruptError", "FormatError"), (file.name, i)
        file.write_bytes(data)


@pytest.mark.parametrize("kind", PARSERS)
def test_flipped_bytes_raise_our_errors_or_read(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    """After any change the file is read with its new content, or raises one of our own errors."""
    folder = tmp_path_factory.mktemp("flipped")
    path, files = made(kind, folder)
    whole = {file: file.read_bytes() for file in files}
    outcomes: Counter[str] = Counter()

    @QUICK
    @given(st.sampled_from(files), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
    def flip(file: Path, changes: list[tuple[float, int]]) -> None:
        data = bytearray(whole[file])
        for where, value in changes:
            data[min(int(where * len(data)), len(data) - 1)] = value
        file.write_bytes(data)
        outcomes[checkpoint(kind, path)] += 1
        file.write_bytes(whole[file])

    if kind == "dcp":  # the tensor is now an object
        flip = example(next(file for file in files if file.suffix == ".distcp"), [(0.501953125, 0)])(flip)
    flip()
    assert len(outcomes) > 1  # both outcomes occur


def test_changed_pickle_bytes_raise_our_errors(tmp_path: Path) -> None:
    """Every fourth byte of data.pkl is changed in several ways inside an intact archive."""
    path = tmp_path / "x.pt"
    torch.save({"model": {"w": torch.randn(3, 4)}, "n": np.float32(2)}, path)
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    raw = found["x/data.pkl"]
    draw = random.Random(5)
    outcomes: Counter[str] = Counter()
    for at in range(0, len(raw), 4):
        for value in (0, 0xFF, draw.randrange(256)):
            data = bytearray(raw)
            data[at] = value
            with zipfile.ZipFile(path, "w") as archive:
                for name, one_of in found.items():
                    archive.writestr(name, bytes(data) if name == "x/data.pkl" else one_of)
            outcomes[checkpoint("torch", path)] += 1
    assert outcomes["CorruptError"] and outcomes["FormatError"]


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    """A shell command in a torch file, in `.metadata` or in an object of a checkpoint is rejected and not run."""
    target = tmp_path / "ran"
    torch.save({"a": [Armed(target, os.system)]}, tmp_path / "x.pt")
    dcp.save({"w": torch.ones(2), "e": 1}, checkpoint_id=tmp_path / "meta")
    forged(tmp_path / "meta", lambda m: setattr(m, "storage_meta", Armed(target, os.system)))
    dcp.save({"w": torch.ones(2), "bad": Armed(target, os.system)}, checkpoint_id=tmp_path / "object")
    with pytest.raises(FormatError, match=r"x\.pt.*references \w+\.system, .*not run"):
        parse_torch.parse(tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"\.metadata.*references \w+\.system, .*no code was run"):
        parse_dcp.parse(tmp_path / "meta")
    with pytest.raises(FormatError, match=r"bad.*references \w+\.system, .*not run"):
        parse_dcp.parse(tmp_path / "object")
    assert not target.exists()
    with (tmp_path / "meta" / ".metadata").open("rb") as file:
        pickle.load(file)  # negative control: other loaders run it
    assert target.exists()
    target.unlink()
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert target.exists()


# -- resource usage --


def test_large_memo_number_uses_little_memory(tmp_path: Path) -> None:
    """An opcode can give a value any 32-bit number. It uses no more memory than the value."""
    path, _ = made("dcp", tmp_path)
    whole = (path / ".metadata").read_bytes()
    assert whole.endswith(b".")
    (path / ".metadata").write_bytes(whole[:-1] + b"r" + (1 << 28).to_bytes(4, "little") + b".")
    needed = run_script(NEEDED, path, fresh=True)
    assert needed.returncode == 0, needed.stderr
    assert int(needed.stdout) < 1 << 20


NEEDED = """
import re, sys
from pathlib import Path
from ckpt.tools.convert import parse_dcp
parse_dcp.parse(Path(sys.argv[1]))
print(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1])
"""
