"""A pickle is read as plain data: what it says comes back, what it would do is not done, and no input can hurt."""

from __future__ import annotations

import ast
import os
import pickle
import pickletools
import struct
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.convert import safe_pickle
from ckpt.convert.safe_pickle import Name, Outside, PickleNode, load
from ckpt.errors import CorruptError, FormatError

QUICK = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=100_000)
PROTOCOLS = (2, 3, 4, 5)

keys = st.text(max_size=5) | st.integers(-(2**63), 2**63 - 1)
leaves = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text() | st.binary()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(keys, inner, max_size=5)
    ),
    max_leaves=30,
)


def alive(value: Any) -> Any:
    """What is inert for certain, as the value that it stands for."""
    if type(value) is PickleNode and value.name == "_codecs.encode":
        return value.args[0].encode("latin1")
    if type(value) is PickleNode and value.name == "builtins.bytes":
        return b""
    if type(value) in (list, tuple):
        return type(value)(map(alive, value))
    return {k: alive(v) for k, v in value.items()} if type(value) is dict else value


BYTES = {"_codecs.encode", "builtins.bytes"}


@QUICK
@given(values, st.sampled_from(PROTOCOLS))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    """In every protocol, with types, order and NaN as they were; what is shared is read once."""
    data = pickle.dumps([value, value], protocol)
    assert repr(alive(load(data, BYTES))) == repr([value, value])
    assert repr(alive(load(pickletools.optimize(data), BYTES))) == repr([value, value])


class Thing:
    """Something that a pickle would build."""

    def __init__(self, x: int) -> None:
        self.x = x


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_would_be_built_is_said_instead(protocol: int) -> None:
    """Names, calls, states, items and pairs stand as such in the result."""
    thing = f"{Thing.__module__}.Thing"
    found = load(pickle.dumps(Thing(3), protocol), {thing, "copyreg._reconstructor", "builtins.object"})
    assert (type(found), found.name, found.state) == (PickleNode, thing, {"x": 3})
    found = load(pickle.dumps(OrderedDict(a=1, b=2), protocol), {"collections.OrderedDict"})
    assert (found.name, found.pairs) == ("collections.OrderedDict", [("a", 1), ("b", 2)])
    found = load(pickle.dumps(Counter("aab"), protocol), {"collections.Counter"})
    assert (found.name, found.args) == ("collections.Counter", ({"a": 2, "b": 1},))
    assert load(pickle.dumps(Thing, protocol), {thing}) == Name(thing)
    found = load(pickle.dumps({1, 2}, protocol), {"builtins.set"})
    assert found.name == "builtins.set" and sorted(found.items or found.args[0]) == [1, 2]


def test_what_lies_elsewhere_is_said() -> None:
    """As torch writes storages."""
    found = load(b"\x80\x02" + b"X\x01\0\0\0aK\x05\x86Q.", set())
    assert type(found) is Outside and found.key == ("a", 5)


class Shell:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_run(tmp_path: Path, protocol: int) -> None:
    """A shell command is refused by its name and place, and not run; pickle itself runs it."""
    target = tmp_path / "ran"
    data = pickle.dumps({"a": [1, {"b": Shell(target)}]}, protocol)
    with pytest.raises(FormatError, match=r"^x\.a\.1\.b: it would run (posix|nt)\.system .*refused"):
        load(data, {"collections.OrderedDict"}, ("x",))
    assert not target.exists()
    pickle.loads(data)  # negative control
    assert target.exists()


def test_names_are_refused_wherever_they_are() -> None:
    """Also those that are dropped again, called through others, or in a pickle that is damaged behind them."""
    system = b"cos\nsystem\n"
    for body in (
        system + b"0N.",  # dropped
        b"(" + system + b"1N.",
        system + b"\x8c\x02id\x85R.",
        b"\x8c\x02os\x8c\x06system\x93.",
        b"(" + system + b"\x8c\x02ido.",
        system + b")\x81.",
        system + b"garbage",
        b"]" + system + b"a",  # cut off
        b"}" + system + b"Ns.",
        b"]q\0" + system + b"ah\0a.",  # and contains itself
    ):
        with pytest.raises(FormatError, match=r"it would run os\.system"):
            load(b"\x80\x04" + body, {"os.path", "collections.OrderedDict"})


@pytest.mark.parametrize(
    "body", [b"ios\nsystem\n", b"(S'id'\nios\nsystem\n.", b"\x82\x01.", b"I1\n.", b"V a\n.", b"g0\n."]
)
def test_instructions_that_are_not_read(body: bytes) -> None:
    """Those of protocol 0, of registered extensions and of buffers elsewhere."""
    with pytest.raises(FormatError, match="not read"):
        load(b"\x80\x04" + body, set())


def test_the_module_has_no_way_to_run_anything() -> None:
    """It imports nothing that could look up a name, and calls no such function."""
    tree = ast.parse(Path(safe_pickle.__file__).read_text())
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert modules <= {
        "__future__",
        "collections.abc",
        "dataclasses",
        "struct",
        "typing",
        "ckpt.errors",
        "ckpt.format.values",
    }
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"getattr", "eval", "exec", "__import__", "compile", "globals", "vars", "setattr", "open"}


def frame(body: bytes) -> bytes:
    return b"\x80\x04" + body


DAMAGED = {
    "empty": b"",
    "no protocol": b"N.",
    "protocol 1": b"\x80\x01N.",
    "protocol 9": b"\x80\x09N.",
    "no end": frame(b"N"),
    "two values": frame(b"NN."),
    "no value": frame(b"."),
    "open mark": frame(b"(N."),
    "behind": frame(b"N.N"),
    "memo": frame(b"h\x07."),
    "memo of nothing": frame(b"q\0."),
    "no mark": frame(b"t."),
    "items of none": frame(b"NNa."),
    "key without value": frame(b"}(Nu."),
    "pairs of none": frame(b"NNNs."),
    "unhashable": frame(b"}]Ns."),
    "call of text": frame(b"\x8c\x01a)R."),
    "call with a list": frame(b"ccollections\nOrderedDict\n]R."),
    "state of a list": frame(b"]Nb."),
    "cut text": frame(b"X\xff\xff\xff\x7fa."),
    "huge text": frame(b"\x8d" + b"\xff" * 8),
    "negative": frame(b"\x8b\xff\xff\xff\xff."),
    "bad text": frame(b"\x8c\x01\xff."),
    "names of numbers": frame(b"K\1K\1\x93."),
    "list in itself": frame(b"]q\0h\0a."),
    "dict in itself": frame(b"}q\0Nh\0s."),
    "tuples": frame(b"K\1\x86."),
    "through a call": frame(b"ccollections\nOrderedDict\n)Rq\0Nh\0s."),
    "name": frame(b"cos\nsys"),
    "frame": frame(b"\x95\0"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damage_is_an_error_of_ours(what: str) -> None:
    """Each kind of nonsense is refused as damaged, or as not of this kind."""
    with pytest.raises((CorruptError, FormatError)):
        load(DAMAGED[what], {"collections.OrderedDict"})


def sample() -> bytes:
    return pickle.dumps({"a": [1, 2.5, None, True], "b": OrderedDict(x=(1, b"\xff")), "c": "text", 5: -(2**70)}, 2)


ALLOWED = {"collections.OrderedDict", "_codecs.encode"}


@pytest.mark.parametrize("what", ["list in itself", "dict in itself", "through a call"])
def test_what_contains_itself_is_said_to(what: str) -> None:
    """Not merely that it is deep: a reader would never come to its end."""
    with pytest.raises(CorruptError, match="contains itself"):
        load(DAMAGED[what], ALLOWED)


def test_cut_off_anywhere() -> None:
    """Every prefix of a pickle is refused."""
    data = sample()
    assert load(data, ALLOWED), "negative control"
    for i in range(len(data)):
        with pytest.raises((CorruptError, FormatError)):
            load(data[:i], ALLOWED)


def survives(data: bytes) -> str:
    try:
        load(data, ALLOWED)
    except (CorruptError, FormatError) as error:
        assert len(str(error)) < 1000
        return type(error).__name__
    return "read"


def test_every_byte_changed() -> None:
    """Each byte of a pickle as every other byte: read, or one of our errors."""
    data = sample()
    found = Counter(survives(data[:i] + bytes([b]) + data[i + 1 :]) for i in range(len(data)) for b in range(256))
    assert found.keys() == {"read", "CorruptError", "FormatError"}


instructions = st.sampled_from(
    [bytes([code]) for code in safe_pickle._TABLE] + [b"ccollections\nOrderedDict\n", b"K\1", b"h\0", b"q\0"]
)
soup = st.lists(instructions | st.binary(max_size=3), max_size=60).map(lambda parts: frame(b"".join(parts)) + b".")


@QUICK
@given(soup)
def test_nonsense_of_instructions(data: bytes) -> None:
    """Any sequence of instructions: read, or one of our errors."""
    survives(data)


@pytest.mark.long
@LONG
@given(soup)
def test_nonsense_of_instructions_long(data: bytes) -> None:
    """As above, many more."""
    survives(data)


BOMBS = {
    # "twice the one before", forty times: a million million entries for whoever walks through it
    "doubling": (
        r"p + b']q\0000' + b''.join(b'h%ch%c\x86q%c0' % (i, i, i + 1) for i in range(40)) + b'h(.'",
        "come to",
    ),
    "doubled text": (
        r"p + b'X' + pack('<I', 1 << 20) + b'a' * (1 << 20) + b'q\0000](' + b'h\0' * 2000 + b'e.'",
        "come to",
    ),
    "deep": (r"p + b']' * 1000000 + b'a' * 999999 + b'.'", "nested deeper"),
    "deep tuples": (r"p + b'N' + b'\x85' * 1000000 + b'.'", "nested deeper"),
    "deep calls": (r"p + b'ccollections\nOrderedDict\n' * 20000 + b')R' + b'\x85R' * 19999 + b'.'", "nested deeper"),
    "long": (r"p + b'(' + b'}' * 60000000 + b't.'", "more than 8000000"),
    "large": (r"p + b'N' * (257 << 20)", "257 MiB"),
    "number": (r"p + b'\x8b' + pack('<i', 100 << 20) + b'\x7f' * (100 << 20) + b'.'", "a number of more"),
    "promised": (r"p + b'\x8e' + pack('<Q', 2 ** 40) + b'x.'", "in the middle"),
    "marks": (r"p + b'(' * 9000000 + b'.'", "nested deeper"),
    # many keys that Python would take for one another
    "colliding": (
        r"p + b'}(' + b''.join(b'\x8a\x0a' + (i * (2 ** 61 - 1)).to_bytes(10, 'little') + b'N' for i in range(1, 9999))"
        r" + b'u.'",
        "key of the type int",
    ),
}


@pytest.mark.parametrize("what", BOMBS)
def test_bombs_are_cheap(what: str) -> None:
    """Small input that would become much, and large input that is nothing: refused, in seconds, with little memory."""
    made, message = BOMBS[what]
    code = (
        "import re, sys, time\nfrom struct import pack\n"
        "from ckpt.convert import safe_pickle as inert\n"
        "from ckpt.errors import CorruptError, FormatError\n"
        f"p = b'\\x80\\x04'\ndata = {made}\n"
        "start = time.process_time()\n"
        "try:\n    inert.load(data, {'collections.OrderedDict'})\n"
        f"except (CorruptError, FormatError) as error:\n    assert re.search({message!r}, str(error)), error\n"
        "else:\n    sys.exit('read')\n"
        "peak = int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
        "print(time.process_time() - start, peak - len(data) // 1024)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    seconds, peak = map(float, result.stdout.split())
    assert seconds < 60 and peak < 900_000  # far from what is fair to expect, and farther from what a bomb would take


def test_negative_control_a_bomb_counts_when_it_is_walked() -> None:
    """Twice the list before, but only ten times: that is no bomb, and is read."""
    data = b"\x80\x04]q\x000" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(10)) + b"h\n."
    assert len(repr(load(data, set()))) > 2**10


def test_numbers_keep_their_size() -> None:
    """Up to the limit; a number larger than that is refused."""
    for value in (0, -1, 2**31, -(2**63), 2**2000, -(2**300_000)):
        assert load(pickle.dumps(value, 2), set()) == value
    with pytest.raises(FormatError, match="a number of"):
        load(
            b"\x80\x02\x8b" + struct.pack("<i", safe_pickle.MAX_INT + 1) + b"\1" * (safe_pickle.MAX_INT + 1) + b".",
            set(),
        )
