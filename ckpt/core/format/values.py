"""Encodes plain values as JSON, decodes them with all types preserved, and joins entries that several ranks saved.

JSON alone would turn tuples into lists and int keys into strings, and has no NaN. Such values are tagged: `{"$": tag,
"v": ...}`. Decoding never evaluates or imports anything; an unknown tag is an error. Tensors and arrays are not stored
as JSON. `encode` passes them to its caller, which stores their bytes and returns a tagged reference to them.

The second half is about `SavedNode`, one entry of a saved state. `joined` joins its versions from several ranks, and
`check_node` checks that it can be restored.
"""

from __future__ import annotations

import base64
import json
import math
import operator
import re
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path as FilePath
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.core.format.columns import ODD
from ckpt.core.format.layout import TensorSpec
from ckpt.errors import CorruptError, StateError

if TYPE_CHECKING:
    import numpy as np


Json = Any
Path = tuple[str | int, ...]
MAX_DEPTH = 100
MANY = 64  # a longer list is checked for numbers in one pass
_DTYPE = re.compile(r"[<>|=][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,7}\])?")


def show(path: Path) -> str:
    """Return a path as users write it: `model.layers.0`. Escape surrogates, which are not valid Unicode."""
    text = ".".join(str(part) for part in path) or "(the state itself)"
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def splitter(names: Iterable[str]) -> Callable[[str], tuple[str, str] | None]:
    """Return a function that splits `name.key` into the longest name in `names` and the key, or returns None."""
    known = set(names)
    lengths = sorted({len(name) for name in known}, reverse=True)  # few lengths, even if a text has many dots

    def split(text: str) -> tuple[str, str] | None:
        ends = (end for end in lengths if text[end : end + 1] == "." and text[:end] in known)
        return next(((text[:end], text[end + 1 :]) for end in ends), None)

    return split


def unlike(text: str, taken: Container[str]) -> str:
    """Append `#` to the text until it is not in `taken`. Return the result."""
    while text in taken:
        text += "#"
    return text


INSTEAD = {
    "torch.utils.data": (
        "torch's DataLoader has no state that can be saved: use ckpt.Loader or torchdata's StatefulDataLoader. "
    ),
    "argparse.": "Save vars(...) of it. ",
    "builtins.generator": "Save its source instead, for example the torch.Generator that draws the order. ",
}
"""Alternatives to objects that users often put into a state."""


def refuse(path: Path, value: object) -> StateError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    instead = next((text for name, text in INSTEAD.items() if kind.startswith(name)), "")
    return StateError(
        f"{show(path)}: an object of type {kind} cannot be saved safely. {instead}Allowed are tensors, "
        "numpy arrays and scalars, None, bool, int, float, complex, str, bytes, bytearray, Fraction, Decimal, Path, "
        "range, slice, date, datetime, timedelta, list, tuple, set, frozenset, deque, dict, Counter and OrderedDict "
        "of these, and objects with state_dict() and load_state_dict()."
    )


def encode(value: Any, path: Path = (), extern: Callable[[object, Path], Json | None] | None = None) -> Json:
    """Encode a value as JSON. `extern` may return a reference for any object that is not a plain value."""
    if len(path) > MAX_DEPTH:
        raise StateError(f"{show(path[:4])}…: nested deeper than {MAX_DEPTH}, or containing itself")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if is_text(value) else {"$": "str", "v": value.encode("utf-32-be", "surrogatepass").hex()}
    if kind is int:
        # Other JSON readers round integers beyond 2**53, and Python limits decimal conversion to 4300 digits.
        return value if -(2**53) < value < 2**53 else {"$": "int", "v": hex(value)}
    if kind is float:
        if math.isfinite(value):
            return value
        return {"$": "float", "v": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"$": "complex", "v": struct.pack(">dd", value.real, value.imag).hex()}
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if kind is list:
        if len(value) > MANY and _are_numbers(value):
            return value.copy()
        return [encode(v, (*path, i), extern) for i, v in enumerate(value)]
    if kind is tuple:
        return {"$": "tuple", "v": [encode(v, (*path, i), extern) for i, v in enumerate(value)]}
    if kind in (dict, OrderedDict, Counter):
        return _encode_dict(value, path, extern)
    if kind is deque:
        return {"$": "deque", "v": [encode(v, (*path, i), extern) for i, v in enumerate(value)], "maxlen": value.maxlen}
    if kind in (set, frozenset):
        items = [encode_key(item, path, extern) for item in value]
        # Sort the items, because two equal sets may iterate in different orders in different processes.
        return {"$": kind.__name__, "v": sorted(items, key=lambda item: json.dumps(item, sort_keys=True))}
    if kind in (range, slice):
        bounds = [encode(v, path, extern) for v in (value.start, value.stop, value.step)]
        return {"$": kind.__name__, "v": bounds}
    if kind is bytearray:
        return {"$": "bytearray", "v": base64.b64encode(value).decode()}
    if kind is Fraction:
        return {"$": "fraction", "v": [encode(value.numerator), encode(value.denominator)]}
    if kind is Decimal:
        return {"$": "decimal", "v": str(value)}
    if kind in _PATHS:
        return {"$": "path", "v": encode(str(value)), **({} if kind is _PATHS[0] else {"class": kind.__name__})}
    if kind in _TIMES and repr(_decode_time(time := _encode_time(value))) == repr(value):  # false for a named time zone
        return time
    if extern is not None and (reference := extern(value, path)) is not None:
        return reference
    numpy = sys.modules.get("numpy")  # if numpy is not imported, no value can be a numpy value
    if numpy is not None and isinstance(value, numpy.generic) and _is_plain_scalar(value):
        return {"$": "scalar", "dtype": value.dtype.str, "v": value.tobytes().hex()}
    raise refuse(path, value)


_PATHS: tuple[type[PurePath], ...] = (type(FilePath()), PurePosixPath, PureWindowsPath)
_TIMES = {timedelta: "timedelta", datetime: "datetime", date: "date"}


def _encode_time(value: Any) -> Json:
    tag = _TIMES[type(value)]
    if tag == "timedelta":
        return {"$": tag, "v": [value.days, value.seconds, value.microseconds]}
    return {"$": tag, "v": value.isoformat()} | ({"fold": 1} if tag == "datetime" and value.fold else {})


def _decode_time(data: Json) -> timedelta | date:
    if data["$"] == "timedelta":
        days, seconds, microseconds = map(operator.index, data["v"])
        return timedelta(days, seconds, microseconds)
    if data["$"] == "date":
        return date.fromisoformat(data["v"])
    return datetime.fromisoformat(data["v"]).replace(fold=data.get("fold", 0))


def _are_numbers(values: list[Any]) -> bool:
    """Return True for a list of only floats or only integers that JSON represents exactly. Fast for long lists."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return bool(min(values) > -(2**53) and max(values) < 2**53)
    return kinds == {float} and math.isfinite(sum(values))


def _encode_dict(value: dict[Any, Any], path: Path, extern: Callable[[object, Path], Json | None] | None) -> Json:
    plain = type(value) is dict and "$" not in value and all(type(key) is str and is_text(key) for key in value)
    if plain and list(value) == sorted(value):  # canonical JSON sorts keys, so store other orders as pairs
        return {key: encode(v, (*path, key), extern) for key, v in value.items()}
    tag = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}[type(value)]
    rows = [[encode_key(key, path, extern), encode(v, (*path, part_of(key)), extern)] for key, v in value.items()]
    return {"$": tag, "v": rows}


def encode_key(key: object, path: Path, extern: Callable[[object, Path], Json | None] | None = None) -> Json:
    """Encode a key of a dict or an element of a set."""
    try:
        found = encode(key, path, extern)
        valid = _is_key(found)
    except StateError:
        valid = False
    if not valid:
        raise StateError(
            f"{show(path)}: the key {key!r:.200} cannot be saved. Keys of a dict and elements of a set can be None, "
            "bool, int, float, complex, str, bytes, dates, and tuples and frozensets of these"
        )
    return found


def _decode_key(data: Json, extern: Callable[[Json], object] | None, depth: int) -> Any:
    """Decode a key of a dict or an element of a set. Raise CorruptError for a value that is not hashable."""
    if type(data) is str or type(data) is int:
        return data
    if depth > 2 * MAX_DEPTH or not _is_key(data):
        raise CorruptError("a key of a dict is of a type that keys cannot have")
    return decode(data, extern, depth + 1)


def part_of(key: object) -> str | int:
    """Return the path component for a key of a dict."""
    return key if type(key) is str or type(key) is int else str(key)


_KEY_TAGS = {
    "str", "int", "float", "complex", "bytes", "fraction", "decimal", "path", "range", "date", "datetime", "timedelta",
    "scalar", "tuple", "frozenset", "parameter", "enum", "torch.dtype", "torch.device", "torch.Size", "torch.layout",
    "torch.memory_format",
}  # fmt: skip


def _is_key(data: Json, depth: int = 0) -> bool:
    """Return True if an encoded value has a hash that depends only on its value."""
    if type(data) is not dict:
        return data is None or type(data) in (bool, int, float, str)
    if type(tag := data.get("$")) is not str or tag not in _KEY_TAGS or depth > MAX_DEPTH:
        return False
    return tag not in ("tuple", "frozenset") or (
        type(data.get("v")) is list and all(_is_key(item, depth + 1) for item in data["v"])
    )


_KINDS = {
    "dict": "a dict", "ordered": "a dict", "counter": "a dict", "tuple": "a list", "str": "text", "bytes": "bytes",
    "int": "a number", "float": "a number", "scalar": "a number", "tensor": "a tensor", "ndarray": "an array",
    "date": "a time", "datetime": "a time", "timedelta": "a time", "complex": "a number", "deque": "a list",
    "set": "a set", "frozenset": "a set", "torch.dtype": "a dtype", "enum": "an Enum", "object": "an object",
    "torch.device": "a device", "torch.Size": "a list", "namedtuple": "a list", "given": "an object",
    "parameter": "a tensor", "bytearray": "bytes", "fraction": "a number", "decimal": "a number", "path": "a path",
    "range": "a range", "slice": "a slice",
}  # fmt: skip


def kind_of(data: Json) -> str:
    """Return a description of the kind of an encoded value, to compare two saves."""
    if isinstance(data, dict):
        return _KINDS.get(str(data["$"]), "unknown") if "$" in data else "a dict"
    if isinstance(data, (bool, int, float)):
        return "a number"
    return "a list" if isinstance(data, list) else "text" if isinstance(data, str) else "None"


def pairs(items: dict[str, Json]) -> Json:
    """Return the encoded form of a dict whose values are already encoded. Preserve the order of its items."""
    return {"$": "dict", "v": [[encode(key), value] for key, value in items.items()]}


def unpaired(data: Json) -> dict[str, Json] | None:
    """Return the still encoded values of an encoded dict with text keys, by key. Return None for other data."""
    if type(data) is not dict or "$" not in data:
        return data if type(data) is dict else None
    rows = data.get("v") if data["$"] in ("dict", "ordered") else None
    if type(rows) is not list or not all(type(row) is list and len(row) == 2 for row in rows):
        return None
    found = [(decode(key, None), value) for key, value in rows]
    return dict(found) if all(type(key) is str for key, _ in found) else None


def is_text(value: str) -> bool:
    """Return False for text with surrogates, because JSON decoders join two adjacent surrogates to one character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(data: Json, extern: Callable[[Json], object] | None = None, depth: int = 0) -> Any:
    """Decode a value. `extern` resolves references."""
    if depth > 2 * MAX_DEPTH:
        raise CorruptError("plain values are nested too deeply")
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is list:
        return [decode(v, extern, depth + 1) for v in data]
    if type(data) is not dict:
        raise CorruptError(f"not a plain value: {type(data).__name__}")
    if "$" not in data:
        return {key: decode(v, extern, depth + 1) for key, v in data.items()}
    try:
        return _decode_tagged(data, extern, depth)
    except (KeyError, TypeError, ValueError, ArithmeticError, struct.error) as error:
        raise CorruptError(f"damaged plain value with tag {data.get('$')!r}: {error}") from None


def _decode_tagged(data: dict[str, Any], extern: Callable[[Json], object] | None, depth: int) -> Any:
    tag = data["$"]
    if tag in ("tuple", "dict", "ordered", "counter", "deque", "set", "frozenset") and type(data["v"]) is not list:
        raise CorruptError(f"a {tag} does not contain a list")
    if tag == "str":
        return bytes.fromhex(data["v"]).decode("utf-32-be", "surrogatepass")
    if tag == "int":
        return int(data["v"], 16)
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(data["v"]))[0]
    if tag == "bytes":
        return base64.b64decode(data["v"], validate=True)
    if tag == "tuple":
        return tuple(decode(v, extern, depth + 1) for v in data["v"])
    if tag == "complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(data["v"])))
    if tag == "deque":
        return deque((decode(v, extern, depth + 1) for v in data["v"]), data["maxlen"])
    if tag in ("set", "frozenset"):
        return (set if tag == "set" else frozenset)(_decode_key(v, extern, depth) for v in data["v"])
    if tag in ("dict", "ordered", "counter"):
        pairs = [(_decode_key(key, extern, depth), decode(v, extern, depth + 1)) for key, v in data["v"]]
        if tag == "dict":
            return dict(pairs)
        return OrderedDict(pairs) if tag == "ordered" else Counter(dict(pairs))
    if tag in _TIMES.values():
        return _decode_time(data)
    if tag in ("range", "slice"):
        start, stop, step = (decode(v, extern, depth + 1) for v in data["v"])
        return range(start, stop, step) if tag == "range" else slice(start, stop, step)
    if tag == "bytearray":
        return bytearray(base64.b64decode(data["v"], validate=True))
    if tag == "fraction":
        numerator, denominator = (operator.index(decode(v)) for v in data["v"])
        return Fraction(numerator, denominator)
    if tag == "decimal" and type(data["v"]) is str:
        return Decimal(data["v"])
    if tag == "path":
        kinds = {kind.__name__: kind for kind in _PATHS[1:]}
        return (kinds[data["class"]] if "class" in data else _PATHS[0])(decode(data["v"]))
    if tag == "scalar":
        return _numpy_scalar(data["dtype"], bytes.fromhex(data["v"]))
    if extern is not None:
        if tag == "namedtuple":
            return extern({**data, "v": [decode(v, extern, depth + 1) for v in data["v"]]})
        if tag in ("object", "generator"):
            inner = {key: decode(data[key], extern, depth + 1) for key in ("attributes", "state") if key in data}
            return extern({**data, **inner})
        return extern(data)
    raise CorruptError(f"unknown tag {tag!r}: written by a newer version?")


def plain_dtype(text: object) -> np.dtype[Any]:
    """Return the numpy dtype with this plain name. Unlike numpy, reject structures and expressions."""
    import numpy as np

    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise CorruptError(f"not a plain numpy dtype: {text!r:.80}")
    return np.dtype(text)


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if numpy returns this dtype for its name, which excludes fields and dtypes of other packages."""
    if dtype.hasobject or dtype.names is not None or dtype.metadata or not dtype.itemsize:
        return False
    if dtype.isbuiltin == 1 and dtype.kind in "biufc" and dtype.char not in "qQ":  # the common case at every step
        return True
    try:
        found = plain_dtype(dtype.str)
        return bool(found == dtype) and found.char == dtype.char  # long and long long are equal but different types
    except (CorruptError, TypeError):  # numpy does not know the name
        return False


def _is_plain_scalar(value: np.generic) -> bool:
    dtype = value.dtype
    return dtype.kind in "biufcmM" and is_plain_dtype(dtype) and plain_dtype(dtype.str).type is type(value)


def _numpy_scalar(dtype: object, raw: bytes) -> np.generic:
    import numpy as np

    kind = plain_dtype(dtype)
    if kind.kind not in "biufcmM" or kind.itemsize != len(raw):
        raise CorruptError(f"not a numpy scalar: {dtype!r}")
    found: np.generic = np.frombuffer(raw, kind)[0]
    return found


# -- entries of a saved state --


SHARED_KINDS = ("module", "optimizer")  # kinds of entries that may be distributed over the ranks
PLAIN = "plain"  # fact of an optimizer: names of plain state tensors that are shards, as their parameter is a DTensor
TENSORS = (None, "parameter", "buffer")  # values of the field `kind` in a reference to a tensor
OBJECT_TAGS = ("enum", "namedtuple", "object", "generator", "given", "parameter")
JOINED_KIND = "optimizer"  # the kind of entries whose values are joined from all ranks
KINDS = "kinds"  # fact of an optimizer: for each state tensor that is not plain, the fields of `kind_of_tensor`
DICTS = "dicts"  # fact of an optimizer: for each parameter, the type of its dict if that is not a plain dict
ORDERS = "orders"  # fact: for each tensor that is not contiguous, its dimensions from the outermost to the innermost


@dataclass(frozen=True)
class SavedNode:
    """One entry of a saved state. `names`: names of its tensors, including aliases."""

    path: Path
    kind: str
    facts: dict[str, Any]
    values: Json
    names: tuple[str, ...]


def joined(nodes: list[SavedNode]) -> SavedNode:
    """Join the nodes of one entry, the reading rank's node first. Raise CorruptError if they contradict each other."""
    try:
        return _joined(nodes)
    except ODD as error:
        raise CorruptError(f"the values that the ranks saved for one entry are inconsistent: {error}") from None


def _joined(nodes: list[SavedNode]) -> SavedNode:
    first = nodes[0]
    alike = [node for node in nodes if node.kind == first.kind]
    if len(alike) == 1 or first.kind not in SHARED_KINDS:
        return first
    names = tuple(_union(node.names for node in alike))
    if first.kind != JOINED_KIND:
        return replace(first, names=names, facts={**first.facts, **_joined_tensors(alike)})
    # If only other ranks saved some state of this rank's parameters, that state belongs to them, so leave it out.
    own, start = {name for group in first.facts["params"] for name in group}, show((*first.path, "state")) + "."
    split, mine = splitter(name for node in alike for group in node.facts["params"] for name in group), set(first.names)
    names = tuple(
        name
        for name in names
        if name in mine or not name.startswith(start) or (split(name.removeprefix(start)) or ("",))[0] not in own
    )
    return replace(first, names=names, facts=_joined_facts(alike), values=_joined_values(alike))


def _joined_facts(nodes: list[SavedNode]) -> dict[str, Any]:
    """Join the facts of an optimizer, each parameter group separately."""
    own = {name for group in nodes[0].facts["params"] for name in group}  # the first node's facts take precedence
    groups = max(len(node.facts["params"]) for node in nodes)
    params = [_union(node.facts["params"][i] for node in nodes if i < len(node.facts["params"])) for i in range(groups)]
    state = [[n for n in node.facts["with_state"] if i == 0 or n not in own] for i, node in enumerate(nodes)]
    mine = set(nodes[0].names)
    plain = _union([n for n in node.facts.get(PLAIN, ()) if i == 0 or n not in mine] for i, node in enumerate(nodes))
    facts = {**nodes[0].facts, **({PLAIN: plain} if plain else {})}
    return {**facts, "params": params, "with_state": _union(state), **_joined_tensors(nodes)}


def _joined_tensors(nodes: list[SavedNode]) -> dict[str, Any]:
    """Join the facts about single tensors. Earlier nodes take precedence."""
    joined = _joined_wrappers(nodes)
    for fact in (ORDERS, KINDS, DICTS):
        found = {name: one for node in reversed(nodes) for name, one in node.facts.get(fact, {}).items()}
        joined |= {fact: found} if found else {}
    return joined


def _joined_wrappers(nodes: list[SavedNode]) -> dict[str, Any]:
    """Join the descriptions of tensors that consist of other tensors."""
    rows = [form for node in reversed(nodes) for form in node.facts.get("wrappers", ())]
    if not all(type(form) is dict and type(form.get("name")) is str for form in rows):
        raise CorruptError("the stored list of wrapper tensors has no names")
    return {"wrappers": list({form["name"]: form for form in rows}.values())} if rows else {}


def _joined_values(nodes: list[SavedNode]) -> Json:
    """Take the group settings from the first node, and the plain state of parameters that it lacks from other nodes."""
    own = {name for group in nodes[0].facts["params"] for name in group}
    state = {
        (name, str(key)): [name, key, value]
        for i, node in reversed(list(enumerate(nodes)))
        for name, key, value in node.values["state"]
        if i == 0 or name not in own
    }
    found = {**nodes[0].values, "state": list(state.values())}
    others = {
        owner["param"]: [owner, value]
        for node in reversed(nodes[1:])
        for owner, value in node.values.get("more", ())
        if "param" in owner and owner["param"] not in own
    }
    return {**found, "more": [*found.get("more", ()), *others.values()]} if others else found


def _union(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(dict.fromkeys(one for each in lists for one in each))


# -- check that an entry can be restored --


def check_node(node: SavedNode, find: Callable[[str], TensorSpec | None]) -> None:
    """Raise CorruptError unless a restore can read this entry. `find`: returns the tensor of a name, or None."""
    if node.kind == "optimizer" and not is_optimizer(node):
        raise CorruptError(f"{show(node.path)}: the stored data is not the state of an optimizer")
    if node.kind == "custom module" and unpaired(node.values) is None:
        raise CorruptError(f"{show(node.path)}: the stored data is not the state of a module")

    def check(reference: Json) -> str:
        tag = str(reference["$"])
        if tag in OBJECT_TAGS or tag.startswith("torch."):  # only torch or the user's code can resolve these
            return f"{tag} {reference['name'] if 'name' in reference else reference['v']!r}"
        if tag not in ("tensor", "ndarray", "wrapper"):
            raise CorruptError(f"unknown tag {tag!r}: written by a newer version?")
        if reference["$"] == "tensor" and reference.get("kind") not in TENSORS:
            raise CorruptError(f"unknown kind of tensor {reference['kind']!r:.80}: written by a newer version?")
        for name in [reference["name"]] if reference["$"] != "wrapper" else _names_in(reference):
            found = find(name) if type(name) is str else None
            if found is None:
                raise CorruptError(f"{show(node.path)} refers to {name!r:.80}, which is not in the checkpoint")
            if reference["$"] == "ndarray":
                check_array(found, reference)
        return tag

    try:
        decode(node.values, check)
        for form in node.facts.get("wrappers", ()):
            check(form)
    except ODD as error:
        raise CorruptError(f"{show(node.path)}: the stored data is damaged: {error}") from None


def _names_in(wrapper: Json) -> list[Any]:
    """Return the names of all tensors that a wrapper consists of."""
    parts = [part for _, part in wrapper["tensors"]]
    return [n for part in parts for n in ([part["name"]] if part["$"] == "tensor" else _names_in(part))]


def is_optimizer(saved: SavedNode) -> bool:
    """Return True if an entry is the state of an optimizer."""

    def texts(value: object) -> bool:
        return type(value) is list and all(type(one) is str for one in value)

    params, values = saved.facts.get("params"), saved.values
    kinds = saved.facts.get(KINDS, {})
    if type(kinds) is not dict or not all(type(one) is dict and one.get("kind") in TENSORS for one in kinds.values()):
        return False
    dicts = saved.facts.get(DICTS, {})
    if not texts(saved.facts.get(PLAIN, [])) or type(dicts) is not dict or not texts(list(dicts.values())):
        return False
    if type(params) is not list or not all(map(texts, params)) or not texts(saved.facts.get("with_state")):
        return False
    if type(values) is not dict or type(values.get("groups")) is not list or type(values.get("state")) is not list:
        return False
    groups = (type(group) is dict and not group.keys() & {"$", "params"} for group in values["groups"])
    more = values.get("more", [])
    owners = (type(row) is list and len(row) == 2 and type(row[0]) is dict for row in more)
    if type(more) is not list or not all(owners) or not all("key" in o or texts([o.get("param")]) for o, _ in more):
        return False
    return all(groups) and all(type(row) is list and len(row) == 3 and texts(row[:1]) for row in values["state"])


def check_array(of: TensorSpec, reference: Json) -> tuple[np.dtype[Any], list[int]]:
    """Return dtype and shape of the array stored in `of`. Raise CorruptError or ValueError if they are impossible."""
    dtype, shape = plain_dtype(reference["dtype"]), reference["shape"]
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"not a shape: {shape!r:.80}")
    if of.dtype != "U8" or len(of.shape) != 1 or math.prod(shape) * dtype.itemsize != of.nbytes:
        raise ValueError(f"{of.name} does not contain an array of {dtype} of shape {shape!r:.80}")
    return dtype, shape
