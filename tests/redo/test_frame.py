"""Frames of a redo log: what is written is read again, and whatever is not a whole frame is passed over and told."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptError
from ckpt.format.layout import BLOB, Layout, TensorSpec
from ckpt.format.manifest import Attempt
from ckpt.redo import frame as frames
from ckpt.redo import frame_file
from ckpt.redo.adam import Coefficients
from ckpt.redo.frame import DELTA, DERIVED, MAGIC, PREDICTED, RAW, SAME, WHOLE, Frame, FrameColumns, Recipe, units
from ckpt.redo.frame_file import Appender, StoredFrame, back, scan, values_of

HEAD, DIGEST = 40, 16
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

NAMES = ("w", "mean", "square")
ADAM = Layout(
    (
        *(TensorSpec(name, "F32", (4,)) for name in NAMES),
        TensorSpec("step", "F32", ()),
        TensorSpec("half", "BF16", (4,)),
    ),
    {},
    [],
)
RECIPE = Recipe(0, 1, 2, 3, 0)
SOME = Coefficients(10.0, 0.999, 0.001, 1.0, -0.001, 0.5, 1e-8)


def attempt(step: int) -> Attempt:
    return Attempt(1, step, "0" * 8)


def frame_of(
    step: int,
    base: int | None,
    forms: list[int],
    stored: list[int],
    *,
    layout: Layout = ADAM,
    recipes: tuple[Recipe, ...] = (RECIPE,),
    finite: bool | None = None,
) -> Frame:
    """Blobs of the layout in pack order. What is predicted takes the only row, what is derived the first blob."""
    form = np.array(forms, np.int64)
    row, master = np.where(form == PREDICTED, 0, -1), np.where(form == DERIVED, 0, -1)
    digest = np.full((len(forms), 16), step % 256, np.uint8)
    columns = FrameColumns(form, row, master, np.array(stored, np.int64), digest)
    of = None if base is None else attempt(base)
    return Frame(attempt(step), of, layout, recipes, (SOME,), columns, 1.5 + step, finite, 0.25)


def write(path: Path, frame: Frame, *, appender: Appender | None = None, fill: int | None = None) -> Appender:
    """Append a frame; its payload is so many bytes as its columns say."""
    appender = appender or Appender(str(path))
    appender.begin()
    for size in frame.columns.stored.tolist():
        appender.add(bytes([frame.attempt.step % 256 if fill is None else fill]) * size)
    appender.end(frame, json.dumps([frame.attempt.step]).encode())
    return appender


WHOLLY = [WHOLE, RAW, RAW, DERIVED, RAW]


def alone(step: int, **more: Any) -> Frame:
    """In pack order: mean, square, w, half, step."""
    return frame_of(step, None, WHOLLY, [9, 16, 16, 0, 4], **more)


def after(step: int, base: int | None = None, **more: Any) -> Frame:
    forms = [DELTA, PREDICTED, PREDICTED, DERIVED, RAW]
    return frame_of(step, step - 1 if base is None else base, forms, [11, 5, 3, 0, 4], **more)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A file of a frame that stands alone, one on top of it, and one that stands alone again."""
    path = tmp_path / "log"
    appender = write(path, alone(5))
    write(path, after(6), appender=appender)
    write(path, alone(7), appender=appender)
    appender.close()
    return path


def steps(path: Path) -> list[int]:
    return [one.frame.attempt.step for one in scan(str(path))[0]]


def alike(a: Frame, b: Frame) -> bool:
    columns = all(
        np.array_equal(getattr(a.columns, n), getattr(b.columns, n)) for n in FrameColumns.__dataclass_fields__
    )
    return columns and replace(a, columns=b.columns) == b


# -- whole files --


@QUICK
@given(data=st.data())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """What was appended is what is read, with its bytes at their places."""
    path = tmp_path_factory.mktemp("f") / "log"
    appender, written = Appender(str(path)), list[Frame]()
    for step in range(data.draw(st.integers(1, 4))):
        one = data.draw(st.sampled_from([alone, after]))(
            step + 1, finite=data.draw(st.sampled_from([None, True, False]))
        )
        write(path, one, appender=appender)
        written.append(one)
    appender.close()
    found, problems = scan(str(path))
    assert not problems and len(found) == len(written) and all(map(alike, (f.frame for f in found), written))
    raw = path.read_bytes()
    assert sum(one.size for one in found) == len(raw) == appender.size
    for one in found:
        begin, size = one.payload
        step = one.frame.attempt.step
        assert set(raw[begin : begin + size - one.values]) == {step}
        assert json.loads(values_of(one, raw[begin + size - one.values : begin + size])) == [step]
    listed, none = scan(str(path), verify=False)
    assert not none and [(a.offset, a.size, a.payload) for a in listed] == [
        (b.offset, b.size, b.payload) for b in found
    ]


def test_empty(tmp_path: Path) -> None:
    """A log that nothing was appended to holds nothing, and nothing is wrong with it; nor with a state of nothing."""
    path = tmp_path / "log"
    Appender(str(path)).close()
    assert scan(str(path)) == ([], [])
    nothing = Layout((), {}, [])
    write(tmp_path / "other", frame_of(1, None, [], [], layout=nothing, recipes=())).close()
    assert steps(tmp_path / "other") == [1]


def test_new_files_only(tmp_path: Path) -> None:
    """A log is never begun on top of another."""
    write(tmp_path / "log", alone(1)).close()
    with pytest.raises(FileExistsError):
        Appender(str(tmp_path / "log"))
    assert steps(tmp_path / "log") == [1]


def test_abandoned(tmp_path: Path) -> None:
    """What was begun and given up leaves nothing, large or small, and the next frame follows the last whole one."""
    path = tmp_path / "log"
    appender = write(path, alone(1))
    for size in (10, 3 << 20):
        appender.begin()
        appender.add(b"x" * size)
        appender.abandon()
        assert path.stat().st_size == appender.size
    write(path, after(2), appender=appender)
    assert scan(str(path))[1] == [] and steps(path) == [1, 2]


@pytest.mark.parametrize("way", ["direct", "refused", "cached"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.one_of(st.integers(0, 9000), st.integers(0, 9 << 20)), max_size=6),
    starts=st.lists(st.integers(0, 20_000), min_size=1, max_size=3),
)
def test_large_and_small_pieces_lie_where_they_belong(
    tmp_path_factory: pytest.TempPathFactory, way: str, sizes: list[int], starts: list[int]
) -> None:
    """Pages past the cache and pages through it make one file, wherever a frame begins; and where a file system takes
    no such pages, or says so only when it is asked to write."""
    path = tmp_path_factory.mktemp("f") / "log"
    fd, expected = os.open(path, os.O_RDWR | os.O_CREAT), bytearray()
    tail = frame_file._Tail(str(path), fd)
    assert tail._direct is not None, "no O_DIRECT in the folder for tests: it has to be on a disk"
    direct, write = tail._direct, os.pwrite

    def refuses(to: int, data: memoryview, at: int) -> int:
        if to == direct and way == "refused":
            raise OSError(errno.EINVAL, "wants larger pages")
        return write(to, data, at)

    if way == "cached":
        tail.close()
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", refuses)
        for gap in starts:
            tail.start(len(expected) + gap)
            expected += bytes(gap)
            for size in sizes:
                piece = rng.integers(0, 256, size, np.uint8)
                tail.put(piece.data)
                expected += piece.tobytes()
                piece[:] = 0  # what was put is not looked at any more
            assert tail.write() == len(expected)
    tail.close()
    os.close(fd)
    assert path.read_bytes() == bytes(expected[: path.stat().st_size]) and not any(expected[path.stat().st_size :])


# -- cut off and damaged --


def test_cut_off_anywhere(three: Path) -> None:
    """Of a file that ends anywhere, each frame is found that is there as a whole, and nothing else."""
    raw, cut = three.read_bytes(), three.with_name("cut")
    whole = scan(str(three))[0]
    ends = {one.offset + one.size for one in whole}
    for length in range(len(raw) + 1):
        cut.write_bytes(raw[:length])
        found, problems = scan(str(cut))
        assert [one.frame.attempt for one in found] == [
            one.frame.attempt for one in whole if one.offset + one.size <= length
        ]
        assert bool(problems) == (length > 0 and length not in ends), length
        assert all(alike(a.frame, b.frame) for a, b in zip(found, whole, strict=False))


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.long)])
def test_any_bit_flipped(three: Path, bits: int) -> None:
    """Every flipped bit is told, and costs the frame that it lies in and what is read by way of that, nothing else.
    `bits`: so many of each byte."""
    raw, path = bytearray(three.read_bytes()), three.with_name("flipped")
    whole = scan(str(three))[0]
    assert [one.frame.base for one in whole] == [None, attempt(5), None]
    for at in range(len(raw)):
        hit = next(i for i, one in enumerate(whole) if one.offset <= at < one.offset + one.size)
        kept = {0: [7], 1: [5, 7], 2: [5, 6]}[hit]
        for bit in {(at + n) % 8 for n in range(bits)}:
            raw[at] ^= 1 << bit
            path.write_bytes(raw)
            raw[at] ^= 1 << bit
            found, problems = scan(str(path))
            assert [one.frame.attempt.step for one in found] == kept, (at, bit)
            assert len(problems) == 1 and f"byte {whole[hit].offset}:" in str(problems[0])


def test_layouts_that_come_back(tmp_path: Path) -> None:
    """A frame is never read with the layout or the recipes of another one than it was written with."""
    path, swapped = tmp_path / "log", replace(RECIPE, weight=RECIPE.square, square=RECIPE.weight)
    appender = write(path, alone(1))
    write(path, after(2), appender=appender)
    write(path, replace(after(3), recipes=(swapped,)), appender=appender)
    write(path, replace(after(4), recipes=(swapped,)), appender=appender)
    appender.close()
    found = scan(str(path))[0]
    assert [one.frame.recipes for one in found] == [(RECIPE,), (RECIPE,), (swapped,), (swapped,)]
    raw = bytearray(path.read_bytes())
    raw[found[2].offset + HEAD] ^= 1
    path.write_bytes(raw)
    assert steps(path) == [1, 2]  # the fourth would be read with the first one's recipes


def test_zeros_in_between(three: Path) -> None:
    """Pages that never came to the disk are zeros: what lies behind them is found."""
    raw = bytearray(three.read_bytes())
    first, second, _ = scan(str(three))[0]
    raw[second.offset : second.offset + second.size] = bytes(second.size)
    three.write_bytes(raw)
    assert steps(three) == [5, 7]
    raw[first.offset : first.offset + 8] = bytes(8)
    three.write_bytes(raw)
    assert steps(three) == [7]


@pytest.mark.parametrize("before", [0, 1, 7, (1 << 20) - 4, (1 << 20) + 40, 3 << 20])
def test_rubbish_in_front(three: Path, before: int) -> None:
    """The next frame is found however much lies before it, also across the pieces in which the file is read."""
    three.write_bytes(b"C" * before + three.read_bytes())
    found, problems = scan(str(three))
    assert found[0].offset == before and len(found) == 3 and len(problems) == (before > 0)


def test_magic_in_the_payload(tmp_path: Path) -> None:
    """Bytes of a tensor that look like the beginning of a frame are none, whether the frame around them is whole or
    not; a whole log as a tensor is found only where the frame around it is damaged, and belongs to another run."""
    path, inner = tmp_path / "log", tmp_path / "inner"
    write(inner, replace(alone(3), attempt=Attempt(1, 3, "f" * 8))).close()
    bytes_of = inner.read_bytes()
    payload = MAGIC * 3 + struct.pack("<8sIIQQQ", MAGIC, frames.VERSION, 1, 10, 10, 10) + MAGIC + bytes_of
    layout = Layout((TensorSpec("w", "U8", (len(payload),)),), {}, [])
    appender = Appender(str(path))
    for step in (1, 2):
        appender.begin()
        appender.add(payload)
        appender.end(frame_of(step, None, [RAW], [len(payload)], layout=layout, recipes=()), b"[]")
    appender.close()
    found, problems = scan(str(path))
    assert [one.frame.attempt for one in found] == [attempt(1), attempt(2)] and not problems
    raw = bytearray(path.read_bytes())
    raw[HEAD] ^= 1
    path.write_bytes(raw)
    found, problems = scan(str(path))
    assert [one.frame.attempt for one in found] == [Attempt(1, 3, "f" * 8), attempt(2)] and problems


def test_cut_off_while_it_is_read(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer may cut off what it gives up while another process looks: that is a problem, not the end of it."""
    real = os.fstat

    def larger(fd: int) -> Any:
        found = list(real(fd))
        found[6] += 1 << 20
        return os.stat_result(found)

    first = scan(str(three))[0][0]
    raw = three.read_bytes()
    three.write_bytes(raw[: first.size + HEAD + 30])
    monkeypatch.setattr(os, "fstat", larger)
    found, problems = scan(str(three))
    assert len(found) == 1 and len(problems) == 1 and "cut off" in str(problems[0])


# -- other versions --


@pytest.mark.parametrize("field", [8, 12])
def test_newer(three: Path, field: int) -> None:
    """A newer version, or one that predicts otherwise, is called that, with what to do; what else is there is read."""
    second = scan(str(three))[0][1]
    raw = bytearray(three.read_bytes())
    struct.pack_into("<I", raw, second.offset + field, 9)
    three.write_bytes(raw)
    found, problems = scan(str(three))
    assert [one.frame.attempt.step for one in found] == [5, 7]
    assert len(problems) == 1 and "version" in str(problems[0]) and "upgrade" in str(problems[0])


# -- what no writer makes --


def forged(
    path: Path, change: Callable[[dict[str, Any]], object], *, table: bytes | None = None, text: bytes | None = None
) -> tuple[list[StoredFrame], list[str]]:
    """A file of one frame that stands alone, its meta (or all of a part) changed, and the digest made right again."""
    write(path, alone(5)).close()
    raw = path.read_bytes()
    payload, columns, meta = struct.unpack_from("<QQQ", raw, 16)
    body, rest = raw[HEAD : HEAD + payload], raw[HEAD + payload : HEAD + payload + columns + meta]
    said = json.loads(zstandard.decompress(rest[columns:]))
    change(said)
    packed = zstandard.compress(json.dumps(said).encode()) if text is None else text
    path.write_bytes(sealed(body, rest[:columns] if table is None else table, packed))
    return scan(str(path))


def sealed(payload: bytes, table: bytes, text: bytes) -> bytes:
    head = struct.pack("<8sIIQQQ", MAGIC, frames.VERSION, 1, len(payload), len(table), len(text))
    body = payload + table + text
    return head + body + xxhash.xxh3_128_digest(body + head)


def nothing(said: dict[str, Any]) -> None:
    pass


def test_forgeries_are_read(tmp_path: Path) -> None:
    """A negative control: what is forged without a change is a frame."""
    found, problems = forged(tmp_path / "log", nothing)
    assert len(found) == 1 and not problems and alike(found[0].frame, alone(5))


def _rows(*rows: Any) -> Callable[[dict[str, Any]], object]:
    """Recipes that a writer would not make, with the digest that goes with them where there can be one."""

    def change(said: dict[str, Any]) -> None:
        said["recipes"] = list(rows)
        try:
            said["form"] = frames._form(ADAM, [Recipe(*row) for row in rows])
        except Exception:
            said["form"] = "?"

    return change


def _layout(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    def changed(said: dict[str, Any]) -> None:
        change(said["layout"])
        try:
            layout = Layout.from_json(said["layout"])
            said["form"] = frames._form(layout, [Recipe(*row) for row in said["recipes"]])
        except Exception:
            pass

    return changed


def _set(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda said: said.update(fields)


def _deep(said: dict[str, Any]) -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    said["layout"] = deep


ENORMOUS = 10**400
HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no attempt": _set(attempt=None),
    "odd attempt": _set(attempt="1.0-1"),
    "odd base": _set(base=[1]),
    "no form": lambda said: said.pop("form"),
    "a form of something else": _set(form="0" * 64),
    "no layout": _set(layout=None),
    "a layout of words": _set(layout="layout"),
    "a deep layout": _deep,
    "an endless tensor": _layout(lambda layout: layout["tensors"].append(["x", "F32", [2**59], False])),
    "a tensor of less than nothing": _layout(lambda layout: layout["tensors"][0].__setitem__(2, [-4])),
    "another size": _layout(lambda layout: layout["tensors"][4].__setitem__(2, [BLOB])),
    "an unknown dtype": _layout(lambda layout: layout["tensors"][0].__setitem__(1, "F33")),
    "a dtype that is none": _layout(lambda layout: layout["tensors"][0].__setitem__(1, ["F32"])),
    "a tensor twice": _layout(lambda layout: layout["tensors"].append(layout["tensors"][0])),
    "an odd component": _layout(lambda layout: layout["components"].append({"path": 1})),
    "a rank beyond": _layout(lambda layout: layout.update(rank=1)),
    "a number that JSON does not have": _layout(lambda layout: layout["components"].append(float("nan"))),
    "no recipes": _set(recipes=None),
    "a recipe of four": _rows([0, 1, 2, 3]),
    "a recipe beyond": _rows([5, 1, 2, 3, 0]),
    "a recipe before": _rows([-5, 1, 2, 3, 0]),
    "a recipe of fractions": _rows([0.0, 1, 2, 3, 0]),
    "a recipe of an odd group": _rows([0, 1, 2, 3, "0"]),
    "a recipe of another dtype": _rows([4, 1, 2, 3, 0]),
    "a recipe of another size": _rows([3, 1, 2, 3, 0]),
    "a recipe of one tensor": _rows([0, 0, 0, 3, 0]),
    "two recipes of one tensor": _rows([0, 1, 2, 3, 0], [2, 1, 0, 3, 0]),
    "odd coefficients": _set(coefficients=[[1, 2, 3]]),
    "enormous coefficients": _set(coefficients=[[ENORMOUS] * 7]),
    "no time": _set(time=None),
    "an endless time": _set(time=float("inf")),
    "an enormous time": _set(time=ENORMOUS),
    "an enormous duration": _set(settled_s=ENORMOUS),
    "odd finite": _set(finite="yes"),
    "values of less than nothing": _set(values=-1),
    "too many values": _set(values=2**40),
    "other values": _set(values=3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_meta(tmp_path: Path, name: str) -> None:
    """Meta that no writer makes is one problem, and neither a frame nor an error."""
    found, problems = forged(tmp_path / "log", HOSTILE[name])
    assert not found and len(problems) == 1


TEXTS = {
    "none": b"",
    "no zstd": b"{}",
    "no JSON": zstandard.compress(b"{"),
    "no mapping": zstandard.compress(b"[1]"),
    "no text": zstandard.compress(b"\xff\xfe\xfd"),
    "deep": zstandard.compress(b"[" * (1 << 20)),
    "a bomb": zstandard.compress(bytes(frames.MAX_META + 1), 1),
    "of unknown size": zstandard.ZstdCompressor(write_content_size=False).compress(b"{}"),
    "a long number": zstandard.compress(b'{"time":' + b"9" * 5000 + b"}"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_text(tmp_path: Path, name: str) -> None:
    """Meta that is no JSON, or that would take more memory than any meta, is one problem."""
    found, problems = forged(tmp_path / "log", nothing, text=TEXTS[name])
    assert not found and len(problems) == 1


def columns_of(frame: Frame, **changed: Any) -> bytes:
    return frames.pack_columns(replace(frame.columns, **{k: np.array(v, np.int64) for k, v in changed.items()}))


TABLES: dict[str, Callable[[], bytes]] = {
    "none": lambda: b"",
    "no zstd": lambda: b"1234",
    "of fewer blobs": lambda: zstandard.compress(bytes(29 * 4)),
    "of more blobs": lambda: zstandard.compress(bytes(29 * 6)),
    "a bomb": lambda: zstandard.compress(bytes(256 << 20), 1),
    "an unknown form": lambda: columns_of(alone(5), form=[WHOLE, 6, RAW, DERIVED, RAW]),
    "a delta to nothing": lambda: columns_of(alone(5), form=[DELTA, RAW, RAW, DERIVED, RAW]),
    "a prediction of nothing": lambda: columns_of(alone(5), form=[WHOLE, PREDICTED, RAW, DERIVED, RAW], row=[0] * 5),
    "nothing unchanged": lambda: columns_of(alone(5), form=[WHOLE, RAW, RAW, SAME, RAW]),
    "a row beyond": lambda: columns_of(alone(5), row=[1, -1, -1, -1, -1]),
    "a master beyond": lambda: columns_of(alone(5), master=[-1, -1, -1, 5, -1]),
    "no master": lambda: columns_of(alone(5), master=[-1] * 5),
    "too long": lambda: columns_of(alone(5), stored=[17, 16, 16, 0, 4]),
    "shorter than raw": lambda: columns_of(alone(5), stored=[9, 15, 16, 0, 4]),
    "derived, and stored": lambda: columns_of(alone(5), stored=[9, 16, 16, 1, 4]),
    "other sizes": lambda: columns_of(alone(5), stored=[8, 16, 16, 0, 4]),
}


@pytest.mark.parametrize("name", TABLES)
def test_hostile_columns(tmp_path: Path, name: str) -> None:
    """Columns that say what cannot be are one problem."""
    found, problems = forged(tmp_path / "log", nothing, table=TABLES[name]())
    assert not found and len(problems) == 1


@pytest.mark.parametrize("place", [0, 3, 4])
def test_predictions_without_a_recipe(tmp_path: Path, place: int) -> None:
    """What no recipe makes cannot be predicted: exp_avg itself, a count of steps, or a tensor of another kind."""
    forms = [DELTA, PREDICTED, PREDICTED, DERIVED, RAW]
    forms[place] = PREDICTED
    path = tmp_path / "log"
    write(path, replace(frame_of(2, 1, forms, [3, 5, 3, 0, 4]))).close()
    found, problems = scan(str(path))
    assert not found and len(problems) == 1
    forms[place] = DELTA
    path.unlink()
    write(path, frame_of(2, 1, forms, [3, 5, 3, 0, 4])).close()
    assert steps(path) == [2]


@pytest.mark.parametrize("at", [16, 24, 32])
@pytest.mark.parametrize("size", [2**40, 2**63, 2**64 - 1])
def test_huge_sizes(three: Path, at: int, size: int) -> None:
    """A head that claims more than there is costs no memory, and its own frame only."""
    raw = bytearray(three.read_bytes())
    struct.pack_into("<Q", raw, at, size)
    three.write_bytes(raw)
    found, problems = scan(str(three))
    assert [one.frame.attempt.step for one in found] == [7] and len(problems) == 1


@QUICK
@given(data=st.data())
def test_any_damage(three: Path, data: st.DataObject) -> None:
    """Whatever is done to a file: its frames are some of those that were written, and nothing is raised."""
    kept = three.with_name("kept")
    if not kept.exists():
        kept.write_bytes(three.read_bytes())
    whole = scan(str(kept))[0]
    raw = bytearray(kept.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        a, b = sorted(data.draw(st.tuples(st.integers(0, len(raw)), st.integers(0, len(raw)))))
        raw[a:b] = data.draw(st.sampled_from([b"", bytes(b - a), raw[a:b] * 2, MAGIC, raw[:40], b"\xff" * 5]))
    three.write_bytes(raw)
    found, _ = scan(str(three))
    assert all(any(alike(one.frame, other.frame) for other in whole) for one in found)
    scan(str(three), verify=False)


@pytest.mark.parametrize("data", [b"", b"x", zstandard.compress(b"[]")[:-1], zstandard.compress(bytes(300 << 20), 1)])
def test_values(three: Path, data: bytes) -> None:
    """Plain values that do not decompress, or to more than there can be, are damage."""
    one = scan(str(three))[0][0]
    with pytest.raises(CorruptError):
        values_of(one, data)


# -- order --


def test_units() -> None:
    """Every blob is stored once: those of a recipe together, piece by piece, the rest one by one."""
    count = (2 * BLOB + 8) // 4
    layout = Layout(
        (
            *(TensorSpec(name, "F32", (count,)) for name in NAMES),
            TensorSpec("step", "F32", ()),
            *(TensorSpec(f"empty {name}", "F32", (0,)) for name in NAMES),
            TensorSpec("bool", "BOOL", (3,)),
        ),
        {},
        [],
    )
    found = units(layout, [RECIPE, Recipe(4, 5, 6, 3, 0)])
    assert sorted(blob for unit in found for blob in unit[:3]) == list(range(len(layout.arrangement.blobs)))
    names = [[layout.tensors[layout.arrangement.blobs[b].tensor].name for b in unit[:3]] for unit in found]
    assert names == [["mean", "square", "w"]] * 3 + [["step"], ["bool"]]
    assert [unit[3] for unit in found[:3]] == [0, 0, 0]


def test_back(three: Path) -> None:
    """From a frame back to one that stands alone; a circle of bases ends."""
    found = {one.frame.attempt: one for one in scan(str(three))[0]}
    assert [one.frame.attempt.step for one in back(found, attempt(6))] == [6, 5]
    assert [one.frame.attempt.step for one in back(found, attempt(7))] == [7]
    assert list(back(found, attempt(8))) == []
    one = found[attempt(6)]
    round_about = {
        attempt(6): replace(one, frame=after(6, base=7)),
        attempt(7): replace(one, frame=after(7, base=6)),
    }
    assert len(list(back(round_about, attempt(7)))) == 2
