"""A value returns with its type, or the first save refuses it by name."""

from __future__ import annotations

import enum
import itertools
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import datetime, time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ckpt
from ckpt.core.format.values import decode
from ckpt.core.state.capture import Capture
from ckpt.errors import CorruptError, StateError
from inside import Saved
from toy_states import Loader, freeze


class Text(str):
    __slots__ = ()


class Dict(dict):  # type: ignore[type-arg]
    pass


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    A = "a"


class Flag(enum.Flag):
    ON = 1


class Array(np.ndarray):  # type: ignore[type-arg]
    pass


class Scalar(np.float64):
    pass


class Picture(Tensor):
    """A subclass that torch handles by `__torch_function__` alone, like torchvision's."""


Point = namedtuple("Point", "x y")

REFUSED: dict[str, Callable[[], Any]] = {
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], mask=[0, 1]),
    "subclass of ndarray": lambda: np.zeros(3).view(Array),
    "structured": lambda: np.zeros(2, [("a", "<i4"), ("b", "<f4")]),
    "strings of any length": lambda: np.array(["a"], np.dtypes.StringDType()),
    "objects": lambda: np.array([None, 1]),
    "dtype with metadata": lambda: np.zeros(2, np.dtype("<f4", metadata={"unit": "m"})),
    "np.void": lambda: np.void(b"abc"),
    "np.longlong": lambda: np.longlong(1),
    "subclass of a numpy scalar": lambda: Scalar(1.5),
    "subclass of str": lambda: Text("a"),
    "subclass of dict": lambda: Dict(a=1),
    "datetime in a zone": lambda: datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")),
    "time": lambda: time(1),
    "memoryview": lambda: memoryview(b"x"),
    "defaultdict": lambda: defaultdict(list, a=[1]),
    "member of an enum that is local": lambda: enum.Enum("Local", "ONE").ONE,  # type: ignore[attr-defined]
    "key of a subclass": lambda: {Text("a"): 1},
    "subclass of Tensor": lambda: torch.ones(3).as_subclass(Picture),
    "subclass in a Parameter": lambda: nn.Parameter(torch.ones(3).as_subclass(Picture)),
}


class Extra(nn.Module):
    """A module with any value as its extra state."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def optimizer_with(values: dict[str, Any], settings: dict[str, Any], weight: Tensor | None = None) -> Any:
    """Return an optimizer with values in the state of its one parameter and in its group."""
    param = nn.Parameter(torch.ones(3)) if weight is None else weight
    found: Any = torch.optim.SGD([param], 0.1)
    found.state[param] = values
    found.param_groups[0].update(settings)
    return found


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda value: {"v": [value]},
    "object": lambda value: Loader({"v": [value]}),
    "extra state": lambda value: Extra([value]),
    "state of an optimizer": lambda value: optimizer_with({"v": value}, {}),
    "in a list of an optimizer": lambda value: optimizer_with({"v": [value]}, {}),
    "settings of an optimizer": lambda value: optimizer_with({}, {"v": value}),
}


OF_THE_SCRIPT = {("time", "settings of an optimizer"), ("memoryview", "settings of an optimizer")}  # stay its own


@pytest.mark.parametrize(("kind", "where"), sorted({*itertools.product(REFUSED, HOLDERS)} - OF_THE_SCRIPT))
def test_value_whose_type_would_be_lost_is_refused_by_name(kind: str, where: str) -> None:
    with pytest.raises(StateError, match=r"^meta\..*(v|_extra_state)"):
        Capture({"meta": HOLDERS[where](REFUSED[kind]())}).read()


def test_memory_mapped_array_is_refused(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(4,))
    with pytest.raises(StateError, match=r"meta\.v: a numpy.*memmap"):
        Capture({"meta": {"v": mapped}}).read()
    Capture({"meta": {"v": np.asarray(mapped)}}).read()


RETURNED: dict[str, Callable[[], Any]] = {
    "big-endian": lambda: np.arange(6, dtype=">i4").reshape(2, 3),
    "in Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed": lambda: np.arange(6)[::-2],
    "empty": lambda: np.zeros((0, 3), np.float16),
    "read-only": lambda: np.frombuffer(b"abcd", np.uint8),
    "broadcast": lambda: np.broadcast_to(np.float32(1.5), (2, 3)),
    "datetimes": lambda: np.array(["2020-01-01", "NaT"], "<M8[25s]"),
    "long doubles": lambda: np.array([1, 2], np.longdouble) / 3,
    "texts": lambda: np.array(["a", "bc\0"]),
    "void": lambda: np.array([b"abc"], "V3"),
    "longdouble": lambda: np.longdouble(1) / 3,
    "datetime64": lambda: np.datetime64("2020-01-01", "h"),
    "np.float64": lambda: np.float64(-0.0),
    "bool, not int": lambda: [True, 1, 1.0, False, 0, -0.0],
    "float of a full list": lambda: [-0.0, *map(float, range(100))],
    "nan": lambda: [float("nan"), -float("nan"), float("inf")] * 40,
    "ordered": lambda: OrderedDict(b=1, a=[OrderedDict()]),
    "counter": lambda: Counter({"a": -1, "b": 0}),
    "IntEnum": lambda: Level.LOW,
    "StrEnum": lambda: Word.A,
    "Flag": lambda: Flag.ON,
    "namedtuple": lambda: Point(1, 2),
    "deque": lambda: deque([1], 3),
    "torch.Size": lambda: torch.Size([1, 2]),
    "complex": lambda: 1j,
    "frozenset": lambda: frozenset({1, (2, "a")}),
    "torch.device": lambda: torch.device("cuda:1"),
    "bytearray": lambda: bytearray(b"a\0"),
    "range": lambda: [range(3), range(10**20, 0, -7)],
    "slice": lambda: [slice(None, 5), slice(0, 4, 2), slice("a", (1, 2.5))],
    "Fraction": lambda: [Fraction(-1, 3), Fraction(10**30, 7)],
    "Decimal": lambda: [Decimal("1.50"), Decimal("-0"), Decimal("sNaN12"), Decimal("-Infinity"), Decimal("1E+999999")],
    "paths": lambda: [Path("/a/b"), Path("\udc80"), PurePosixPath("a"), PureWindowsPath("c:/a")],
    "keys of other types": lambda: {(1, None): 2, 1.5: {Word.A: 1}, torch.float32: 0},
}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kind", RETURNED)
def test_value_returns_with_its_type_and_bits(kind: str, fresh: bool) -> None:
    """The target is empty, or has a similar value."""
    value = RETURNED[kind]()
    saved = Saved(Capture({"meta": {"v": value}}).read())
    state = {"meta": {"v": None if fresh else RETURNED[kind]()}}
    saved.restore(state)
    assert repr(freeze(state["meta"]["v"])) == repr(freeze(value))


RESULT = "result that requires gradients"
KINDS: dict[str, Callable[[], Tensor]] = {
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "frozen parameter": lambda: nn.Parameter(torch.randn(3), requires_grad=False),
    "parameter of integers": lambda: nn.Parameter(torch.arange(3), requires_grad=False),
    "buffer": lambda: nn.Buffer(torch.randn(3)),  # type: ignore[no-untyped-call]
    "buffer that is not persistent": lambda: nn.Buffer(torch.randn(3), persistent=False),  # type: ignore[no-untyped-call]
    "buffer that requires gradients": lambda: nn.Buffer(torch.randn(3).requires_grad_()),  # type: ignore[no-untyped-call]
    "leaf that requires gradients": lambda: torch.randn(3, requires_grad=True),
    RESULT: lambda: torch.randn(3, requires_grad=True) * 2,
    "plain": lambda: torch.randn(3),
}


def test_recreated_tensors_have_their_original_kind(tmp_path: Path) -> None:
    values = {kind: make() for kind, make in KINDS.items()}
    loader = Loader({"x": dict(values), "again": [values["parameter"]]})
    with ckpt.Checkpointer({"meta": {"v": dict(values)}, "o": loader}, tmp_path / "run", every=1) as cp:
        cp.step(1)
    loader = Loader({})
    state: Any = {"meta": {"v": None}, "o": loader}
    with ckpt.Checkpointer(state, tmp_path / "run") as cp:
        cp.restore()
    for back in (state["meta"]["v"], loader.state["x"], ckpt.load(tmp_path / "run").plain("meta")["v"]):
        for kind, value in values.items():
            found = back[kind]
            assert type(found) is type(value) and torch.equal(found, value), kind
            assert found.requires_grad is (value.requires_grad and value.is_leaf), kind
            assert is_buffer(found) == is_buffer(value), kind
    assert loader.state["again"][0] is loader.state["x"]["parameter"]


def is_buffer(tensor: Tensor) -> tuple[bool, bool | None]:
    return isinstance(tensor, nn.Buffer), getattr(tensor, "persistent", None)


@pytest.mark.parametrize("here", ["nothing", "the same", "plain tensors"])
def test_tensors_of_optimizer_and_extra_state_return_with_their_kind(here: str) -> None:
    """The target state is fresh, or has values of the same kind or another."""

    def make(values: dict[str, Tensor]) -> dict[str, Any]:
        inside = {"list": list(values.values()), **values}
        return {"opt": optimizer_with(dict(inside), dict(values)), "net": Extra(dict(values))}

    values = {kind: kind_of() for kind, kind_of in KINDS.items()}
    saved = Saved(Capture(make(values)).read())
    others = {"nothing": {}, "the same": {kind: kind_of() for kind, kind_of in KINDS.items() if kind != RESULT}}
    live = others.get(here, {kind: torch.zeros_like(value).detach() for kind, value in values.items()})
    twin = make(live)
    held = dict(twin["opt"].state[twin["opt"].param_groups[0]["params"][0]])
    saved.restore(twin)
    state = twin["opt"].state[twin["opt"].param_groups[0]["params"][0]]
    in_list = dict(zip(values, state["list"], strict=True))
    for back in (state, in_list, twin["opt"].param_groups[0], twin["net"].value):
        for kind, value in values.items():
            found = back[kind]
            assert type(found) is type(value) and torch.equal(found, value), kind
            assert found.requires_grad is (value.requires_grad and value.is_leaf), kind
            assert found.is_leaf and is_buffer(found) == is_buffer(value), kind
    if here == "the same":
        assert all(state[kind] is held[kind] for kind in values if kind != RESULT)


def test_moment_of_the_class_of_its_parameter_returns_as_that_class() -> None:
    """A subclass of Tensor is accepted if the parameter has it, and refused otherwise."""
    weight = nn.Parameter(torch.ones(3).as_subclass(Picture))
    assert type(weight) is Picture
    opt = optimizer_with({"m": torch.zeros_like(weight) + 2}, {}, weight)
    saved = Saved(Capture({"opt": opt}).read())
    fresh: Any = torch.optim.SGD([nn.Parameter(torch.zeros(3).as_subclass(Picture))], 0.1)
    saved.restore({"opt": fresh})
    (state,) = fresh.state.values()
    assert type(state["m"]) is Picture and state["m"].tolist() == [2.0] * 3


def test_module_with_its_own_state_dict_gets_tensors() -> None:
    """As with torch.load: a module's own parameters are filled by its load_state_dict()."""

    class Own(nn.Linear):
        def state_dict(self, *args: Any, **settings: Any) -> Any:
            return {**super().state_dict(*args, **settings), "n": 1}

        def load_state_dict(self, state: Any, *args: Any, **settings: Any) -> Any:
            assert type(state["weight"]) is Tensor and state.pop("n") == 1
            return super().load_state_dict(state, *args, **settings)

    saved, fresh = Own(2, 2), Own(2, 2)
    Saved(Capture({"m": saved}).read()).restore({"m": fresh})
    assert torch.equal(saved.weight, fresh.weight)


@pytest.mark.parametrize(
    "damaged",
    [
        {"$": "fraction", "v": [1, 0]},
        {"$": "decimal", "v": "1 + 1"},
        {"$": "decimal", "v": [0, [1], 1]},
        {"$": "path", "v": "a", "class": "Popen"},
        {"$": "path", "v": 3},
        {"$": "range", "v": [1, 2, 0]},
        {"$": "slice", "v": [1]},
    ],
)
def test_damaged_value_is_an_error(damaged: Any) -> None:
    with pytest.raises(CorruptError):
        decode(damaged)
