"""A pickle read as plain data: nothing in it is looked up, imported, built or called.

A pickle is a program. Loading it with Python's own reader runs whatever it names, so a crafted `.pt` file, or the
`.metadata` of a distributed checkpoint, runs a shell command the moment another program opens it. Here its
instructions are walked as text. Where it names a class or a function, a `Name` stands in the result; where it would
call one, a `PickleNode` says with what. The caller lists the names it knows what to do with; any other is refused, and
where in the data it stands is said.

What damaged or hostile input can cost is limited too: bytes, instructions, depth, and the size of what a reader would
have to walk through (a few bytes can say "twice the list before", often). Numbers that count are 64-bit at most where
they are keys, since larger ones can be made to collide.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CorruptError, FormatError
from ckpt.format.values import Path, show

MAX_BYTES = 256 << 20  # of a pickle
MAX_STEPS = 8_000_000  # instructions of it
MAX_DEPTH = 200
MAX_WALK = 512 << 20  # bytes that it is when nothing is shared, 16 counted for each object
MAX_INT = 1 << 16  # bytes of a number

_OLD = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names of protocol 2, which Python 2 can read


@dataclass(frozen=True, slots=True)
class Name:
    """Where a class or function would be looked up."""

    text: str

    def __str__(self) -> str:
        return self.text


class PickleNode:
    """What calling `name` with `args` would have given, with what would have been put into it afterwards.

    `state`: of `__setstate__` or `__dict__`; `pairs`: of a mapping; `items`: of a sequence or set.
    """

    __slots__ = ("args", "items", "name", "pairs", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None
        self.pairs: list[tuple[Any, Any]] = []
        self.items: list[Any] = []


class Outside:
    """Something that the pickle leaves to its reader to find, such as the bytes of a tensor."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


def load(data: bytes, allowed: Container[str], path: Path = ()) -> Any:
    """The value: None, bool, int, float, str, bytes, bytearray, list, tuple, dict, Name, Node, Outside.

    `allowed`: names such as "collections.OrderedDict". `path`: where the value stands, for messages. FormatError if it
    names anything else, or is of a kind that is not read here; CorruptError if it is damaged.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"{show(path)}: {len(data) >> 20} MiB of plain values; at most {MAX_BYTES >> 20} are read")
    machine = _Machine(allowed)
    try:
        value = machine.run(data)
        _weigh(value)
    except (CorruptError, FormatError):
        _refuse(machine.refused, None, path)
        raise
    _refuse(machine.refused, value, path)
    return value


def _refuse(found: list[str], value: Any, path: Path) -> None:
    if found:
        where = (*path, *(_find(value, found[0]) or ()))
        raise FormatError(
            f"{show(where)}: it would run {found[0][:200]} when loaded with pickle; refused. Nothing of it was run. "
            "If you trust the file, load it where it was written and save tensors and plain values instead"
        )


class _Machine:
    """The stack machine that a pickle is written for, on inert values."""

    def __init__(self, allowed: Container[str]) -> None:
        self._allowed = allowed
        self.refused: list[str] = []
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        try:
            return self._run(data)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error) as error:
            raise CorruptError(f"a damaged pickle: {str(error)[:200]}") from None

    def _run(self, data: bytes) -> Any:
        if data[:1] != b"\x80" or not 2 <= data[1] <= 5:
            raise FormatError("not a pickle of protocol 2 to 5, which are read")
        at, end, left, table = 2, len(data), MAX_STEPS, _TABLE
        while at < end and left:
            code = data[at]
            at += 1
            left -= 1
            if code == _STOP:
                return self._end(at == end)
            if code == _GLOBAL:
                at = self._global(data, at)
                continue
            row = table.get(code)
            if row is None:
                raise FormatError(f"a pickle with the instruction {bytes([code])!r}, which is not read")
            handler, number, size, convert = row
            if number is None:
                handler(self, None)
                continue
            (argument,) = number(data, at)
            at += size
            if convert is not None:
                stop = at + argument
                if not at <= stop <= end:
                    raise CorruptError("a damaged pickle: it ends in the middle of something")
                argument, at = convert(data[at:stop]), stop
            handler(self, argument)
        if at < end:
            raise FormatError(f"more than {MAX_STEPS} plain values")
        raise CorruptError("a pickle without an end")

    def _global(self, data: bytes, at: int) -> int:
        """A name in two lines; where it ends."""
        first = data.index(b"\n", at)
        second = data.index(b"\n", first + 1)
        self.name(data[at:first].decode(), data[first + 1 : second].decode())
        return second + 1

    def _end(self, whole: bool) -> Any:
        if not whole or self._below or len(self.stack) != 1:
            raise CorruptError("a damaged pickle: something is left over at its end")
        return self.stack[0]

    def mark(self) -> None:
        if len(self._below) > 2 * MAX_DEPTH:
            raise FormatError(f"plain values that are nested deeper than {MAX_DEPTH}")
        self._below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        found = self.stack
        self.stack = self._below.pop()
        return found

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise CorruptError("a damaged pickle: a name that is no text")
        text = f"{_OLD.get(module, module)}.{name}"
        if text not in self._allowed and len(self.refused) < 1:
            self.refused.append(text)
        self.stack.append(Name(text))

    def call(self, args: Any) -> None:
        """Of what is on top of the stack."""
        target = self.stack[-1]
        if type(target) is not Name or type(args) is not tuple:
            raise CorruptError("a damaged pickle: it calls something that has no name")
        self.stack[-1] = PickleNode(target.text, args)

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not PickleNode:
            raise CorruptError("a damaged pickle: a state of something that has none")
        target.state = state

    def drop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is PickleNode:
            target.items += values
        elif type(target) is list:
            target += values
        else:
            raise CorruptError("a damaged pickle: items of something that has none")

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if len(flat) % 2:
            raise CorruptError("a damaged pickle: a key without a value")
        pairs = zip(flat[::2], flat[1::2], strict=True)
        if type(target) is PickleNode:
            target.pairs += [(_key(key), value) for key, value in pairs]
        elif type(target) is dict:
            target.update((_key(key), value) for key, value in pairs)
        else:
            raise CorruptError("a damaged pickle: keys of something that has none")


def _key(key: Any) -> Any:
    """Of a dict. Not those of which many can be made to collide."""
    kind = type(key)
    if kind in (str, bool, bytes, Name, PickleNode) or key is None or (kind is int and -(2**63) <= key < 2**63):
        return key
    raise FormatError(f"a dict with a key of the type {kind.__name__}: only text and 64-bit numbers can be keys")


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    def make(machine: _Machine, _: Any) -> None:
        if len(machine.stack) < count:
            raise CorruptError("a damaged pickle: a tuple of what is not there")
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return make


def _gather(make: Callable[[list[Any]], Any]) -> Callable[[_Machine, Any], None]:
    def push(machine: _Machine, _: Any) -> None:
        found = machine.since_mark()  # changes which stack there is
        machine.stack.append(make(found))

    return push


def _dict(machine: _Machine, _: Any) -> None:
    found = machine.since_mark()
    machine.stack.append({})
    machine.set_items(found)


def _drop(machine: _Machine, _: Any) -> None:
    machine.since_mark()


def _new_with_keywords(machine: _Machine, _: Any) -> None:
    if machine.stack.pop() != {}:
        raise FormatError("a pickle that calls a class with keywords, which is not read")
    machine.call(machine.stack.pop())


def _object(machine: _Machine, _: Any) -> None:
    found = machine.since_mark()
    machine.stack.append(found[0])
    machine.call(tuple(found[1:]))


def _put_one(machine: _Machine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


def _name_of_stack(machine: _Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.name(module, name)


def _top(machine: _Machine, _: Any) -> None:
    machine.stack.append(machine.stack[-1])


def _literal(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _get(machine: _Machine, index: int) -> None:
    machine.stack.append(machine.memo[index])


_STOP, _GLOBAL = ord("."), ord("c")
_Row = tuple[Callable[[_Machine, Any], None], Callable[[bytes, int], Any] | None, int, Callable[[bytes], Any] | None]


def _rows(
    codes: dict[bytes, Callable[[_Machine, Any], None]], form: str = "", convert: Callable[[bytes], Any] | None = None
) -> dict[int, _Row]:
    """Instructions with an argument of one form; with `convert`, that is how many bytes of it follow."""
    one = struct.Struct(form) if form else None
    return {
        ord(code): (handler, one.unpack_from if one else None, one.size if one else 0, convert)
        for code, handler in codes.items()
    }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _whole_number(data: bytes) -> int:
    if len(data) > MAX_INT:
        raise FormatError(f"a number of more than {MAX_INT} bytes")
    return int.from_bytes(data, "little", signed=True)


_TABLE: dict[int, _Row] = {
    **_rows({
        b"N": lambda machine, _: machine.stack.append(None),
        b"\x88": lambda machine, _: machine.stack.append(True),
        b"\x89": lambda machine, _: machine.stack.append(False),
        b")": lambda machine, _: machine.stack.append(()),
        b"]": lambda machine, _: machine.stack.append([]),
        b"}": lambda machine, _: machine.stack.append({}),
        b"\x8f": lambda machine, _: machine.stack.append(PickleNode("builtins.set", ())),
        b"\x91": _gather(lambda found: PickleNode("builtins.frozenset", (found,))),
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"t": _gather(tuple),
        b"l": _gather(list),
        b"d": _dict,
        b"(": lambda machine, _: machine.mark(),
        b"0": lambda machine, _: machine.drop(),
        b"1": _drop,
        b"2": _top,
        b"\x94": lambda machine, _: machine.memoize(),
        b"\x93": _name_of_stack,
        b"R": lambda machine, _: machine.call(machine.stack.pop()),
        b"\x81": lambda machine, _: machine.call(machine.stack.pop()),
        b"\x92": _new_with_keywords,
        b"o": _object,
        b"b": lambda machine, _: machine.build(),
        b"a": lambda machine, _: machine.append([machine.stack.pop()]),
        b"e": lambda machine, _: machine.append(machine.since_mark()),
        b"\x90": lambda machine, _: machine.append(machine.since_mark()),
        b"s": _put_one,
        b"u": lambda machine, _: machine.set_items(machine.since_mark()),
        b"Q": lambda machine, _: machine.stack.append(Outside(machine.stack.pop())),
    }),
    **_rows({b"K": _literal, b"q": _Machine.put, b"h": _get}, "<B"),
    **_rows({b"M": _literal}, "<H"),
    **_rows({b"J": _literal}, "<i"),
    **_rows({b"r": _Machine.put, b"j": _get}, "<I"),
    **_rows({b"G": _literal}, ">d"),
    **_rows({b"\x95": lambda machine, length: None}, "<Q"),  # a frame: a hint for readers of streams
    **_rows({b"\x8a": _literal}, "<B", _whole_number),
    **_rows({b"\x8b": _literal}, "<i", _whole_number),
    **_rows({b"\x8c": _literal}, "<B", _text),
    **_rows({b"X": _literal}, "<I", _text),
    **_rows({b"\x8d": _literal}, "<Q", _text),
    **_rows({b"C": _literal}, "<B", bytes),
    **_rows({b"B": _literal}, "<I", bytes),
    **_rows({b"\x8e": _literal}, "<Q", bytes),
    **_rows({b"\x96": _literal}, "<Q", bytearray),
}  # fmt: skip
"""By the byte of an instruction: what it does, how its argument is read, and bytes of that."""


def _inside(value: Any) -> Sequence[Any]:
    """What a value consists of; nothing if it is a leaf."""
    kind = type(value)
    if kind is list or kind is tuple:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return [*value, *value.values()]
    if kind is PickleNode:
        return [value.args, value.state, *value.items, *(part for pair in value.pairs for part in pair)]
    return [value.key] if kind is Outside else []


_CONTAINERS = frozenset((list, tuple, dict, PickleNode, Outside))


def _weigh(root: Any) -> None:
    """CorruptError if it contains itself; FormatError if it is too deep, or too much to walk through."""
    done: dict[int, tuple[int, int]] = {}
    open_now: set[int] = set()

    def weigh(value: Any, depth: int) -> tuple[int, int]:
        key = id(value)
        if depth > MAX_DEPTH:
            raise FormatError(f"plain values that are nested deeper than {MAX_DEPTH}")
        if key in open_now:
            raise CorruptError("a damaged pickle: something contains itself")
        open_now.add(key)
        size, height = 16, 0
        for part in _inside(value):
            kind = type(part)
            if kind in _CONTAINERS:
                known = done.get(id(part)) or weigh(part, depth + 1)
                size += known[0]
                if known[1] >= height:
                    height = known[1] + 1
                    if depth + height > MAX_DEPTH:
                        raise FormatError(f"plain values that are nested deeper than {MAX_DEPTH}")
            elif kind is str or kind is bytes or kind is bytearray:
                size += 16 + len(part)
            else:
                size += 16
        if size > MAX_WALK:
            raise FormatError(f"plain values that come to more than {MAX_WALK >> 20} MiB")
        open_now.discard(key)
        done[key] = size, height
        return size, height

    if type(root) in _CONTAINERS:
        weigh(root, 0)


def _find(value: Any, name: str) -> Path | None:
    """The keys under which a name is first used. Of values that have been weighed."""
    seen: set[int] = set()

    def find(value: Any) -> Path | None:
        if type(value) is Name and value.text == name:
            return ()
        if type(value) not in _CONTAINERS or id(value) in seen:
            return None
        seen.add(id(value))
        if type(value) is PickleNode and value.name == name:
            return ()
        for key, part in _keyed(value):
            if (below := find(part)) is not None:
                return (key, *below) if type(key) in (str, int) else ()
        return None

    return find(value)


def _keyed(value: Any) -> list[tuple[Any, Any]]:
    """What a value consists of, with the keys that a reader would call it by, if it has any."""
    if type(value) in (list, tuple):
        return list(enumerate(value))
    pairs: list[tuple[Any, Any]] = []
    if type(value) is dict:
        pairs = list(value.items())
    elif type(value) is PickleNode:
        state = list(value.state.items()) if type(value.state) is dict else []
        pairs = [*enumerate(value.items), *value.pairs, *state]
    return [*pairs, *((None, part) for part in _inside(value))]
