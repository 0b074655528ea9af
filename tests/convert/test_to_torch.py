"""Exports for torch equal files that torch itself would write, and torch loads them."""

from __future__ import annotations

import io
import json
import math
import random
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_leaves

import ckpt
import parallel
from ckpt.core.format.layout import BITS, TensorSpec
from ckpt.core.format.manifest import canonical
from ckpt.core.state.capture import Capture
from ckpt.core.state.tensors import TORCH_DTYPE, as_bytes
from ckpt.errors import CorruptError, UsageError
from ckpt.tools.convert import parse_dcp, parse_torch, to_dcp, to_torch
from ckpt.tools.convert.output import Literal, Output, TensorRun
from ckpt.tools.convert.source import DESCRIPTION, OriginEntry, RankView, canonical_names, described


class MemoryOrigin:
    """An origin with tensors in memory, limited to what a plan and its execution need."""

    title = url = identity = "here"

    def __init__(self, live: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> None:
        self.live, self.tensors = live, specs

    def bytes_of(self, run: TensorRun) -> bytes:
        box = tuple(slice(at, at + n) for at, n in zip(*run.box, strict=True))
        part = self.live[run.label][box].contiguous()
        if part.dtype != TORCH_DTYPE[run.dtype]:
            part = part.to(TORCH_DTYPE[run.dtype])
        return as_bytes(part).numpy().tobytes()


def of_state(state: dict[str, Any]) -> tuple[MemoryOrigin, RankView, dict[str, str]]:
    """Return a live state as an origin and a view, through the stored text, and its dtypes."""
    reading = Capture(state).read()
    layout = reading.layout
    tensors = {t.name: tensor.detach().clone() for t, tensor in zip(layout.tensors, reading.tensors, strict=True)}
    values = json.loads(canonical(reading.values))
    entries = tuple(
        OriginEntry(tuple(c["path"]), c["kind"], json.loads(canonical(c["facts"])), tuple(c["names"]), v)
        for c, v in zip(layout.components, values, strict=True)
    )
    labels = {n: f"{n}#0" for n in canonical_names(entries, layout.aliases)}
    origin = MemoryOrigin({labels[n]: t for n, t in tensors.items()}, {labels[n]: t for n, t in layout.by_name.items()})
    return origin, RankView(entries, labels, layout.aliases), {labels[t.name]: t.dtype for t in layout.tensors}


def execute(output: Output, origin: MemoryOrigin, target: Path) -> Path:
    """Write the files of a plan like the export engine."""
    assert output.staged
    if not output.single:
        target.mkdir()
    for file in output.files:
        file.check()
        path = output.staged_path(target, file)
        path.parent.mkdir(exist_ok=True)
        data = (part.data if isinstance(part, Literal) else origin.bytes_of(part) for part in file.parts)
        path.write_bytes(b"".join(data))
    output.finish(target, {})
    return target


def torch_file(state: dict[str, Any], target: Path) -> dict[Any, Any]:
    """Export a state, load it with torch in all ways that must agree, and return it."""
    origin, view, dtypes = of_state(state)
    path = execute(to_torch.plan(origin, view, dtypes), origin, target)
    found: dict[Any, Any] = torch.load(path, weights_only=True)
    assert_equal(torch.load(path, weights_only=True, mmap=True), found)
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
    description = described(found.pop(DESCRIPTION))
    entries, aliases, places = description.entries, description.aliases, description.places
    assert entries == view.entries and aliases == view.aliases and places.keys() == set(view.tensors)
    for name, place in places.items():
        value: Any = found
        for key in place:
            value = value[key]
        assert same_bytes(value, origin.live[view.tensors[name]]), name
    return found


def dcp_folder(state: dict[str, Any], target: Path) -> Path:
    origin, view, dtypes = of_state(state)
    return execute(to_dcp.plan(origin, view, dtypes), origin, target)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))


def assert_equal(found: Any, expected: Any, at: str = "") -> None:
    """Check that all types, values and bits are equal, recursively."""
    assert type(found) is type(expected), (at, type(found), type(expected))
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert same_bytes(found.detach(), expected.detach()), at
    elif isinstance(expected, dict):
        assert list(found) == list(expected) or (found.keys() == expected.keys()), at
        for key in expected:
            assert_equal(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), at
        for i, one in enumerate(expected):
            assert_equal(found[i], one, f"{at}.{i}")
    elif isinstance(expected, float):
        assert struct.pack("<d", found) == struct.pack("<d", expected), at
    else:
        assert found == expected, at


class Net(nn.Module):
    """Tied weights, buffers, and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        found: Tensor = self.head(self.norm(self.embed(x)))
        return found


def train(net: nn.Module, optim: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
        optim.zero_grad()
        nn.functional.cross_entropy(net(x), x).backward()
        optim.step()


def trained(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net = Net()
    optim: torch.optim.Optimizer
    if kind == "adamw":
        decayed = [p for p in net.parameters() if p.dim() > 1]
        others = [p for p in net.parameters() if p.dim() == 1]
        optim = torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=1e-2, amsgrad=True)
    elif kind == "named":
        optim = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    elif kind == "tensor lr":
        optim = torch.optim.Adam(net.parameters(), lr=torch.tensor(1e-2), foreach=False)
    else:
        optim = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9 if kind == "momentum" else 0.0)
    train(net, optim, 3)
    return net, optim


OPTIMIZERS = ("adamw", "named", "tensor lr", "sgd")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_exported_file_equals_torch_save(kind: str, tmp_path: Path) -> None:
    """Module, optimizer and scheduler equal their own `state_dict`, plus the names of parameters. Tied weights share
    memory. A fresh model and optimizer load it, and five more steps are bit-equal."""
    net, optim = trained(kind)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 100) if kind != "tensor lr" else None
    state = {"model": net, "optim": optim, "step": 3} | ({"sched": sched} if sched else {})
    found = torch_file(state, tmp_path / "state.pt")
    assert found["step"] == 3 and found.keys() == state.keys()
    assert_equal(found["model"], OrderedDict(net.state_dict()))
    assert found["model"]["embed.weight"].data_ptr() == found["model"]["head.weight"].data_ptr()
    if sched:
        assert_equal(found["sched"], sched.state_dict())
    names = {id(p): name for name, p in net.named_parameters()}
    expected = optim.state_dict()
    for live, group in zip(optim.param_groups, expected["param_groups"], strict=True):
        group["param_names"] = [names[id(p)] for p in live["params"]]
    assert_equal(found["optim"], expected)
    torch.manual_seed(99)
    other, fresh = trained(kind)
    other.load_state_dict(found["model"])
    fresh.load_state_dict(found["optim"])
    train(net, optim, 5, first=3)
    train(other, fresh, 5, first=3)
    assert_equal(other.state_dict(), net.state_dict())
    assert_equal(list(fresh.state.values()), list(optim.state.values()))


def test_random_generators_continue(tmp_path: Path) -> None:
    """The state of `ckpt.RNG` survives the file and gives the same numbers."""
    rng = ckpt.RNG()
    found = torch_file({"rng": rng}, tmp_path / "state.pt")
    expected = random.random(), np.random.rand(), torch.rand(3)
    found["rng"]["python"] = tuple(found["rng"]["python"])
    found["rng"]["numpy"] = tuple(v.numpy() if isinstance(v, Tensor) else v for v in found["rng"]["numpy"])
    rng.load_state_dict(found["rng"])
    assert_equal((random.random(), np.random.rand(), torch.rand(3)), expected)


PLAIN: dict[str, Any] = {
    "none": None,
    "tuples": ((), (1,), (1, (2.5, "x")), [(), []], (1, 2, 3, 4)),
    "bytes": b"\x00\xff\n",
    "floats": [math.nan, -math.inf, -0.0, 1e-320, struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf8\xff")[0]],
    "ints": [2**53 + 1, -(2**200), 2**2031, True],
    "text": ["", "\ud800", "ü\0", "x" * 70000],
    "keys": {1: "one", "1": "text", -5: {}, "$": 0},
    "ordered": OrderedDict(z=1, a=2),
    "counter": Counter("abca"),
    "tensors": [torch.arange(6).reshape(2, 3), (torch.tensor(1.5), {"deep": torch.ones(2, dtype=torch.bool)})],
    "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.bfloat16), {}],
}


def test_plain_values_are_preserved(tmp_path: Path) -> None:
    """All types and bits of plain values are preserved, also of tensors inside them."""
    found = torch_file({"cfg": PLAIN, "term": 7, "list": [1, torch.ones(2)]}, tmp_path / "state.pt")
    assert_equal(found, {"cfg": PLAIN, "term": 7, "list": [1, torch.ones(2)]})


def test_unsupported_values_are_changed_with_notes(tmp_path: Path) -> None:
    """Numpy scalars become numbers and numpy arrays tensors. Other values that torch cannot load are replaced by
    similar ones. Notes list all changes."""
    arrays = {
        "f": np.arange(6, dtype=np.float32).reshape(2, 3),
        "c": np.array([1 + 2j]),
        "b": np.array([True, False]),
        "bytes": np.arange(6, dtype=np.uint8).reshape(3, 2),
        "zero": np.array(3.0),
        "none": np.empty((0, 2), np.int16),
        "swapped": np.arange(3, dtype=">i4"),
        "days": np.array(["2024-01-01"], "M8[D]"),
    }
    values = {
        "s": np.float64(2.5), "i": np.int8(-3), "t": np.bool_(True), "c": np.complex64(1 - 1j),
        "long": np.longdouble(1.5), "when": np.datetime64("2024-01-01"), "nothing": b"", "huge": -(2**3000),
    }  # fmt: skip
    state = {"arrays": arrays, "values": values}
    origin, view, dtypes = of_state(state)
    plan = to_torch.plan(origin, view, dtypes)
    found = torch.load(execute(plan, origin, tmp_path / "state.pt"), weights_only=True)
    expected: dict[str, Any] = {k: torch.from_numpy(v) for k, v in arrays.items() if k not in ("swapped", "days")}
    raw = {k: torch.from_numpy(arrays[k].view(np.uint8).copy()) for k in ("swapped", "days")}
    assert_equal(found["arrays"], expected | raw)
    changed = {"long": 1.5, "when": "2024-01-01", "nothing": bytearray(), "huge": hex(-(2**3000))}
    assert_equal(found["values"], {"s": 2.5, "i": -3, "t": True, "c": 1 - 1j} | changed)
    notes = " ".join(plan.notes)
    for word in ("numpy arrays became tensors (6)", ">i4", "scalars", "times", "empty bytes", "hexadecimal"):
        assert word in notes
    assert described(found[DESCRIPTION]).entries == view.entries  # the description is unchanged
    assert to_torch.plan(*of_state({"n": 1})).notes == ()


def every_dtype() -> dict[str, Tensor]:
    raw = torch.arange(1, 97, dtype=torch.uint8)
    return {name: raw.clone().view(dtype).reshape(2, -1) for name, dtype in TORCH_DTYPE.items() if name != "BOOL"} | {
        "BOOL": raw.reshape(2, -1) % 3 == 0
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_exported(tmp_path: Path) -> None:
    """Every dtype works in both formats."""
    tensors = every_dtype()
    assert tensors.keys() == BITS.keys()
    assert_equal(torch_file({"t": tensors}, tmp_path / "state.pt"), {"t": tensors})
    folder = dcp_folder({"t": tensors}, tmp_path / "dcp")
    for name, expected in loaded_whole(folder)["t"].items():
        assert expected.dtype == tensors[name].dtype and same_bytes(expected, tensors[name]), name


def loaded_whole(folder: Path) -> dict[str, Any]:
    """Return the state of a DCP folder, converted by torch."""
    target = folder.with_suffix(".converted")
    dcp_to_torch_save(folder, target)
    found: dict[str, Any] = torch.load(target, weights_only=False)
    return found


def test_tensors_are_cast_to_other_dtypes(tmp_path: Path) -> None:
    """torch finds the requested dtype in both formats."""
    net = nn.Linear(5, 3)
    origin, view, _ = of_state({"model": net})
    dtypes = dict.fromkeys(origin.tensors, "BF16")
    found = torch.load(execute(to_torch.plan(origin, view, dtypes), origin, tmp_path / "a.pt"), weights_only=True)
    other = loaded_whole(execute(to_dcp.plan(origin, view, dtypes), origin, tmp_path / "b"))
    for each in (found, other):
        assert_equal(dict(each["model"]), {k: v.bfloat16() for k, v in net.state_dict().items()})


def test_states_in_dicts_and_lists_are_exported(tmp_path: Path) -> None:
    """Entries are stored at their paths. For an optimizer of two modules with the same names, parameter names include
    the path."""
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optim = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    one = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    state = {"nets": nets, "sub": {"optim": optim, "one": one, 5: {"ema": nn.Linear(1, 1)}}, "n": 1}
    found = torch_file(state, tmp_path / "state.pt")
    assert type(found["nets"]) is list and set(found["sub"]) == {"optim", "one", 5}
    assert_equal(found["nets"][1], OrderedDict(nets[1].state_dict()))
    assert found["sub"]["optim"]["param_groups"][0]["param_names"][2] == "nets.1.weight"
    assert found["sub"]["one"]["param_groups"][0]["param_names"] == ["weight", "bias"]
    assert_equal(found["sub"][5]["ema"], OrderedDict(state["sub"][5]["ema"].state_dict()))


def test_tensors_of_one_size_are_not_swapped(tmp_path: Path) -> None:
    """Bytes are stored where torch looks for them, with any nesting. All of these tensors could be confused."""
    rng = random.Random(1)
    made = 0

    def build(depth: int) -> Any:
        nonlocal made
        made += 1
        if depth == 0 or rng.random() < 0.3:
            return torch.full((3,), made)
        inner = [build(depth - 1) for _ in range(rng.randrange(1, 5))]
        keys = rng.sample(["z", "a", "m", 7, 3, "q"], len(inner))
        kinds = (lambda: inner, lambda: tuple(inner), lambda: dict(zip(keys, inner, strict=True)))
        return rng.choice([*kinds, lambda: OrderedDict(zip(keys, inner, strict=True))])()

    state = {str(i): build(4) for i in range(30)}
    assert made > 300
    assert_equal(torch_file(state, tmp_path / "state.pt"), state)
    got = loaded_whole(dcp_folder(state, tmp_path / "dcp"))
    numbers = [{int(t[0]) for t in tree_leaves(one)} for one in ({k: got[k] for k in state}, state)]
    assert numbers[0] == numbers[1]


def test_negative_control_flipped_byte_is_detected(tmp_path: Path) -> None:
    """Negative control: the checksums cover the stored bytes."""
    state = {"w": torch.arange(1000)}
    torch_file(state, tmp_path / "state.pt")
    data = bytearray((tmp_path / "state.pt").read_bytes())
    at = data.index(torch.arange(1000).numpy().tobytes())
    data[at + 5] ^= 1
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert (file.testzip() or "").endswith("data/0")
    assert not torch.equal(torch.load(io.BytesIO(data), weights_only=True)["w"], state["w"])
    with pytest.raises(AssertionError):
        assert_equal(torch.load(io.BytesIO(data), weights_only=True)["w"], state["w"])


def test_impossible_exports_raise_clear_errors() -> None:
    """A reserved name, values that need an excluded tensor, and state without parameters raise clear errors."""
    with pytest.raises(UsageError, match="reserved"):
        to_torch.plan(*of_state({DESCRIPTION: 1}))
    origin, view, dtypes = of_state({"cfg": {"w": torch.ones(1)}})
    with pytest.raises(UsageError, match=r"cfg\.w is excluded"):
        to_torch.plan(origin, RankView(view.entries, {}, {}), dtypes)
    with pytest.raises(UsageError, match=r"same name.*a\.b"):
        to_dcp.plan(*of_state({"a.b": 1, "a": {"b": 2}}))
    net, optim = trained("adamw")
    origin, view, dtypes = of_state({"model": net, "optim": optim})
    view.entries[1].facts["with_state"].clear()
    with pytest.raises(CorruptError, match="no parameter"):
        to_torch.plan(origin, view, dtypes)
    origin, view, dtypes = of_state({"model": net, "optim": optim})
    view.entries[1].facts["params"].pop()
    with pytest.raises(CorruptError, match="optim: not the state of an optimizer"):
        to_dcp.plan(origin, view, dtypes)


# -- folders of distributed checkpoints --


def saved_by_torch(net: nn.Module, optim: torch.optim.Optimizer, folder: Path, *, flat: bool) -> Any:
    """Return the metadata that torch's own DCP writes for the same state."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(net),
        "optim": get_optimizer_state_dict(net, optim, options=options),
        "cfg": {"a": [1, (2, 3), {"b": None}], "t": (torch.ones(2), 1), "l": [1, 2], 5: {"x": 1}},
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return dcp.FileSystemReader(folder).read_metadata()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ("adamw", "sgd"))
def test_metadata_equals_that_of_torch(kind: str, tmp_path: Path) -> None:
    """Every name, form and position of torch's own `dcp.save` exists, in list form and in flattened form. The only
    additions are the description and the names of parameters."""
    net, optim = trained(kind)
    state = {"model": net, "optim": optim}
    state["cfg"] = {"a": [1, (2, 3), {"b": None}], "t": (torch.ones(2), 1), "l": [1, 2], 5: {"x": 1}}  # type: ignore[assignment]
    folder = dcp_folder(state, tmp_path / "ours")
    ours = dcp.FileSystemReader(folder).read_metadata()
    theirs = saved_by_torch(net, optim, tmp_path / "theirs", flat=False)
    flat = saved_by_torch(net, optim, tmp_path / "flat", flat=True)
    for name, expected in theirs.state_dict_metadata.items():
        assert ours.state_dict_metadata[name] == expected, name
        assert ours.planner_data[name] == theirs.planner_data[name], name
    assert flat.state_dict_metadata.keys() <= ours.state_dict_metadata.keys()
    known = theirs.state_dict_metadata.keys() | flat.state_dict_metadata.keys()
    more = {name for name in ours.state_dict_metadata.keys() - known if not name.endswith(".param_names")}
    assert more == {DESCRIPTION}
    assert ours.version == theirs.version and ours.planner_data.keys() == ours.state_dict_metadata.keys()
    assert "/" not in repr(ours.storage_meta)  # no path of this machine


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flat", (False, True))
@pytest.mark.parametrize("kind", ("momentum", "tensor lr"))
def test_dcp_load_is_bit_exact(kind: str, flat: bool, tmp_path: Path) -> None:
    """`dcp.load` into the state dicts of a fresh model and optimizer is bit-exact in both forms, and
    training goes on bit-equal."""
    net, optim = trained(kind)
    folder = dcp_folder({"model": net, "optim": optim, "n": 5}, tmp_path / "dcp")
    torch.manual_seed(99)
    other, fresh = trained(kind)
    for group in fresh.param_groups:
        group["lr"] = torch.tensor(0.5) if kind == "tensor lr" else 0.5
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(other),
        "optim": get_optimizer_state_dict(other, fresh, options=options),
        "n": 0,
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert_equal(state["optim"], get_optimizer_state_dict(net, optim, options=options))
    assert state["n"] == 5
    other.load_state_dict(state["model"])
    options.strict = False  # otherwise torch requires state of parameters that were never stepped
    set_optimizer_state_dict(other, fresh, state["optim"], options=options)
    train(net, optim, 3, first=3)
    train(other, fresh, 3, first=3)
    assert_equal(other.state_dict(), net.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_dcp_folder_converts_to_torch_save(tmp_path: Path) -> None:
    """torch's own converter turns the folder into a correct file. Byte objects load with `weights_only`. The
    description has the entries and the paths of all tensors."""
    net, optim = trained("adamw")
    state = {"model": net, "optim": optim, "rng": ckpt.RNG(), "cfg": PLAIN | {"keys": {1: 2, "a": {}}}}
    origin, view, dtypes = of_state(state)
    folder = execute(to_dcp.plan(origin, view, dtypes), origin, tmp_path / "dcp")
    found = loaded_whole(folder)
    assert_equal(found["model"], dict(net.state_dict()))
    assert_equal(found["cfg"]["tuples"], PLAIN["tuples"])
    assert_equal(found["cfg"]["tensors"], PLAIN["tensors"])
    assert found["cfg"]["counter"] == dict(PLAIN["counter"]) and found["cfg"]["keys"] == {"1": 2}
    assert_equal(found["optim"]["param_groups"], [
        g | {"param_names": g["params"]} for g in get_optimizer_state_dict(net, optim)["param_groups"]
    ])  # fmt: skip
    description = described(found[DESCRIPTION])
    entries, aliases, places = description.entries, description.aliases, description.places
    assert entries == view.entries and aliases == view.aliases and places.keys() == set(view.tensors)
    for name, place in places.items():
        value: Any = found
        for key in place:
            value = value[key]
        assert same_bytes(value, origin.live[view.tensors[name]]), name
    read = 0
    for index, info in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
        data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        torch.load(io.BytesIO(data), weights_only=True)
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            assert file.testzip() is None, index
        read += 1
    assert read > 50


RARE: dict[str, Any] = {
    "dtype": torch.bfloat16, "device": torch.device("cpu"), "layout": torch.strided, "order": torch.channels_last,
    "size": torch.Size([1, 2]), "complex": 1j, "bytearray": bytearray(b"x"), "set": {3, "a", 1j, torch.int8},
    "frozenset": frozenset({3, "a"}), "nested": [{"a": (torch.int8, {2j})}, [torch.float16]],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [to_dcp, to_torch])
def test_exports_with_rare_plain_values_are_imported_unless_changed(form: Any, tmp_path: Path) -> None:
    origin, view, dtypes = of_state({"model": nn.Linear(2, 2), "cfg": RARE})
    path = execute(form.plan(origin, view, dtypes), origin, tmp_path / "x.pt")
    parse = parse_dcp.parse if form is to_dcp else parse_torch.parse
    assert parse(path).entries == view.entries
    if form is to_torch:
        for key, value in {"dtype": torch.float16, "complex": 2j, "set": {3}}.items():
            state = torch.load(path, weights_only=True)
            state["cfg"][key] = value
            torch.save(state, tmp_path / "changed.pt")
            with pytest.raises(UsageError, match="it was changed after its export"):
                parse(tmp_path / "changed.pt")


@pytest.mark.filterwarnings("ignore")
def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    """Both names are in the folder and refer to the same bytes."""
    net, _ = trained("sgd")
    where = dcp.FileSystemReader(dcp_folder({"model": net}, tmp_path / "dcp")).read_metadata().storage_data
    found = {index.fqn: (info.relative_path, info.offset) for index, info in where.items()}
    assert found["model.embed.weight"] == found["model.head.weight"] != found["model.norm.weight"]


@pytest.mark.filterwarnings("ignore")
def test_conflicting_names_are_stored_as_lists(tmp_path: Path) -> None:
    """A parameter named 0 would conflict with group 0. The optimizer settings are then stored only as lists, with a
    note."""
    net = nn.ParameterList([torch.ones(2)])
    optim = torch.optim.SGD(net.parameters(), lr=0.5)
    origin, view, dtypes = of_state({"model": net, "optim": optim})
    plan = to_dcp.plan(origin, view, dtypes)
    assert any("by parameter" in note for note in plan.notes)
    found = loaded_whole(execute(plan, origin, tmp_path / "dcp"))
    assert found["optim"].keys() == {"param_groups"} and found["optim"]["param_groups"][0]["params"] == ["0"]


@pytest.mark.filterwarnings("ignore")
def test_negative_control_wrong_byte_in_dcp_is_detected(tmp_path: Path) -> None:
    """Negative control: the comparisons above detect the change."""
    net, optim = trained("adamw")
    folder = dcp_folder({"model": net, "optim": optim}, tmp_path / "dcp")
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[data.index(as_bytes(net.embed.weight.detach()).numpy().tobytes()) + 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    state = {"model": get_model_state_dict(Net())}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    with pytest.raises(AssertionError):
        assert_equal(dict(state["model"]), dict(net.state_dict()))


SHARDED = """
import json, os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import parallel
from torch.distributed.checkpoint.state_dict import *

torch.set_num_threads(1)
dist.init_process_group("gloo")
expected = torch.load(sys.argv[1], weights_only=True)
for folder in sys.argv[2:]:
    for flat in (False, True):
        live = parallel.build("fsdp")
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        net, optim = live["model"], live["optim"]
        state = {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optim, options=options)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(net, state["model"])
        set_optimizer_state_dict(net, optim, state["optim"], options=options)
        found = parallel.gathered(live)
        wrong = [name for name in expected if name not in found or not torch.equal(found[name], expected[name])]
        print(json.dumps({"mode": folder, "wrong": wrong, "names": len(found), "lr": optim.param_groups[0]["lr"]}))
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort an interpreter that ends
"""


def test_two_ranks_load_their_shards(tmp_path: Path) -> None:
    """Weights and optimizer state of a whole model are bit-exact on two ranks in both forms. Negative control: damaged
    ones are not."""
    net = parallel.whole()
    optim = torch.optim.AdamW(net.parameters(), lr=3e-3)
    torch.optim.lr_scheduler.CosineAnnealingLR(optim, 1000)
    for step in range(2):
        optim.zero_grad()
        x = torch.randn(12, parallel.WIDTH, generator=torch.Generator().manual_seed(step))
        (net(x) - x).pow(2).mean().backward()
        optim.step()
    state, name = {"model": net, "optim": optim}, "layers.1.up.weight"
    folder, damaged = (dcp_folder(state, tmp_path / one) for one in ("dcp", "damaged"))
    expected = parallel.gathered(state)
    torch.save(expected, tmp_path / "expected.pt")
    row = as_bytes(net.get_parameter(name).detach()[:1]).numpy().tobytes()
    for file in damaged.glob("*.distcp"):
        file.write_bytes(file.read_bytes().replace(row, bytes(len(row))))
    done = parallel.launch(2, SHARDED, tmp_path / "expected.pt", folder, damaged, port=parallel.free_port())
    found = parallel.reports(done)
    for place, wrong in ((folder, []), (damaged, [name])):
        assert len(found[str(place)]) == 4  # two ranks, two forms
        for one in found[str(place)]:
            assert (one["wrong"], one["names"], one["lr"]) == (wrong, len(expected), 3e-3)
