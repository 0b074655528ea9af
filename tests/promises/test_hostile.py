"""Malicious files in the right format, and malicious messages to a writer's socket.

None of their code runs, no path outside the root is opened, nothing hangs, and every error is one of ours. A restore
skips such a checkpoint like any damaged one and takes the older one. `tests/format/test_forged.py` tests each field of
the format, and its memory use.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import inside
import toy
from ckpt.errors import CorruptError, StoreError
from forgery import (
    Run,
    confined,
    corpus,
    genuine,
    loaded,
    mutate,
    of_two,
    put,
    restore_from,
    restored,
    same,
    some_value,
    sources,
    state,
    survives,
    taken_over,
)
from inside import forge
from processes import eventually, writers
from run_files import data_key, manifest_key

__all__ = ["genuine", "of_two"]  # fixtures

pytestmark = pytest.mark.timeout(60)  # a hang is a failure


# -- what is taken, and what is not --


def test_genuine_files_are_restored(genuine: Run, tmp_path: Path) -> None:
    """The forger makes valid files: unchanged, or with another learning rate, they are restored."""
    assert restored(put(forge(genuine), tmp_path / "run")) == 20

    folder = put(forge(genuine, manifest=some_value(7.5)), tmp_path / "run")
    assert restored(folder) == 20
    assert ckpt.load(folder).plain("meta")["lr"] == 7.5
    loaded(folder)
    inside.run(taken_over(folder))


def test_genuine_files_of_two_ranks_are_restored(of_two: Run, tmp_path: Path) -> None:
    """The forger makes valid files here too; and rank 0's word on plain values is the one that counts."""
    assert restored(put(forge(of_two, rank=1), tmp_path / "run"), exact=True) == 20
    folder = put(forge(of_two, rank=0, manifest=some_value(7.5)), tmp_path / "run")
    assert restored(folder) == 20
    assert ckpt.load(folder).plain("meta")["lr"] == 7.5
    loaded(folder)
    inside.run(taken_over(folder))


def test_negative_control_a_path_beside_the_run_is_seen(tmp_path: Path) -> None:
    """The watch over opened files does see an escape."""
    (tmp_path / "secret").write_text("x")
    with pytest.raises(AssertionError):
        with confined(tmp_path / "run"):
            (tmp_path / "secret").read_text()


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.marker, "ran"))


def zip_of(inner: bytes) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        file.writestr("archive/data.pkl", inner)
    return raw.getvalue()


def test_a_pickle_is_never_run(genuine: Run, tmp_path: Path) -> None:
    """In place of any file of the run, plain and in torch's zip form; the control shows that it would have run."""
    marker = tmp_path / "ran"
    pickled = pickle.dumps(Bomb(marker))
    for raw in (pickled, zip_of(pickled)):
        everywhere = dict.fromkeys(genuine[0], raw)
        for objects in (
            forge(genuine, table=raw),
            forge(genuine, raw_part=raw),
            *({**genuine[0], key: raw} for key in genuine[0]),
            {**everywhere, "FORMAT.json": genuine[0]["FORMAT.json"]},
            everywhere,
        ):
            survives(put(objects, tmp_path / "run"))
    value = {"$": "bytes", "v": pickled.hex()}
    survives(put(forge(genuine, manifest=some_value(value)), tmp_path / "run"))
    assert not marker.exists()
    pickle.loads(pickled)
    assert marker.exists()


def test_distant_stray_record_does_not_hang_readers(genuine: Run, tmp_path: Path) -> None:
    """Record number 10**12 - 1 does not make a reader look for all numbers before it."""
    for number in (10**12 - 1, 10**6, 90_000):
        folder = put({**genuine[0], inside.name_of_record(number): b"{}"}, tmp_path / "run")
        assert restored(folder) == 20
        assert inside.run(taken_over(folder)) == set()  # a run with a damaged log loses nothing


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"null", b"{}", b"[" * 10**6, b"9" * 10**6, b"\xff\xfe", b'{"digest":NaN}', b'{"a":1,"a":2,"digest":"x"}',
    ],
    ids=lambda raw: repr(raw[:12]),
)  # fmt: skip
def test_garbage_instead_of_json(genuine: Run, raw: bytes, tmp_path: Path) -> None:
    """In FORMAT.json, in a record, in a part."""
    objects, checkpoint = genuine
    assert restored(put({**objects, "FORMAT.json": raw}, tmp_path / "run")) == 20
    assert restored(put({**objects, manifest_key(checkpoint): raw}, tmp_path / "run")) == 10
    assert restored(put({**objects, inside.name_of_record(2): raw}, tmp_path / "run")) == 10
    survives(put(dict.fromkeys(objects, raw), tmp_path / "run"))


# -- what is not a file --


@pytest.mark.parametrize(
    "key_of", [manifest_key, data_key, lambda checkpoint: "FORMAT.json"], ids=["manifest", "data", "format"]
)
def test_links_are_not_followed(genuine: Run, key_of: Callable[[Any], str], tmp_path: Path) -> None:
    """See test_promise_damage.py for pipes, folders and devices in place of any file."""
    folder = put(forge(genuine), tmp_path / "run")
    key = key_of(genuine[1])
    shutil.move(folder / key, tmp_path / "moved")
    (folder / key).symlink_to(tmp_path / "moved")
    if key != "FORMAT.json":
        with pytest.raises((CorruptError, StoreError)):
            restore_from(sources(folder)[0], state(1))
    survives(folder)


# -- a corpus of mutations --


def check_mutated(data: st.DataObject, one: Run, two: Run, folder: Path) -> None:
    """Any change to a part or to the newest record, sealed again: it is taken, or there is an error of ours."""
    what = data.draw(st.sampled_from(["manifest", "record"]))
    run, rank = data.draw(st.sampled_from([(one, 0), (two, 0), (two, 1)]))
    survives(put(forge(run, rank=rank, **{what: lambda document: mutate(data.draw, document)}), folder))


@given(data=st.data())
@corpus(40)
def test_mutated_documents(genuine: Run, of_two: Run, data: st.DataObject, tmp_path: Path) -> None:
    """Restore, load and take over forty changed documents, of a single rank or of one of two."""
    check_mutated(data, genuine, of_two, tmp_path / "run")


@pytest.mark.long
@pytest.mark.timeout(3600)
@given(data=st.data())
@corpus(10_000)
def test_mutated_documents_long(genuine: Run, of_two: Run, data: st.DataObject, tmp_path: Path) -> None:
    """Ten thousand of them."""
    check_mutated(data, genuine, of_two, tmp_path / "run")


# -- a real restore --

UNCLOSED = some_value({"$": "scalar", "dtype": "(1,2", "v": "00"})  # an expression that is not closed


def test_checkpointer_skips_a_forged_checkpoint(genuine: Run, tmp_path: Path) -> None:
    """`restore()` returns the older step with the reason, and training continues."""
    folder = put(forge(genuine, manifest=UNCLOSED), tmp_path / "run")
    live = state(1)
    with ckpt.Checkpointer(live, ckpt.Tier(folder, every=1)) as cp:
        assert cp.restore() == 10
        assert cp.last_restore is not None and [s.step for s in cp.last_restore.skipped] == [20]
        assert same(live, state(10))
        live["model"](torch.ones(3)).sum().backward()
        live["optim"].step()
        cp.save(21).wait_durable(60)
    assert ckpt.load(folder).step == 21


# -- the writer's socket --


def message(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


HOSTILE_MESSAGES: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\x00\x00",
    "huge length": b"\xff\xff\xff\xff",
    "largest length": struct.pack(">I", inside.LARGEST_MESSAGE) + b"x",
    "half a message": struct.pack(">I", 100) + b"{",
    "noise": bytes(range(256)) * 64,
    "empty message": message(b""),
    "not JSON": message(b"\x80\x04cposix\nsystem\n."),
    "not UTF-8": message(b'{"op":"\xff"}'),
    "deep": message(b"[" * 10**6),
    "list": message(b"[]"),
    "number": message(b"5"),
    "null": message(b"null"),
    "no op": message(b"{}"),
    "no op, a reply": message(b'{"id":1}'),
    "op is a list": message(b'{"op":[],"id":1}'),
    "op is dunder": message(b'{"op":"__class__","id":1}'),
    "unknown op": message(b'{"op":"of_another_version","id":1}'),
    "id is a list": message(b'{"op":"nothing","id":[]}'),
    "descriptors that are not there": message(b'{"op":"attach_arena","id":1,"fds":3}'),
    "negative descriptors": message(b'{"op":"attach_arena","id":1,"fds":-1}'),
    "descriptors of text": message(b'{"op":"attach_arena","id":1,"fds":"x"}'),
    "attach nothing": message(b'{"op":"attach_arena","id":1}'),
    "negative arena": message(b'{"op":"make_arena","id":1,"slots":-1,"slot_size":-5,"least":1}'),
    "huge arena": message(b'{"op":"make_arena","id":1,"slots":3,"slot_size":1000000000000000,"least":1}'),
    "many slots": message(b'{"op":"make_arena","id":1,"slots":1000,"slot_size":4096,"least":1}'),
    "write of nothing": message(b'{"op":"write_slot","id":1,"tier":0,"arena":"00","slot":0,"attempt":"x"}'),
    "write of a far slot": message(b'{"op":"write_slot","id":1,"tier":99,"arena":"00","slot":99999,"attempt":"x"}'),
    "watch nothing": message(b'{"op":"watch_arena","id":1,"arena":"00"}'),
    "layout of nonsense": message(b'{"op":"know_layout","id":1,"layout":{"tensors":[["x","F32",[-1],false]]}}'),
    "rollback to nonsense": message(b'{"op":"acquire_run","id":1,"nonce":"x","restored":"../x","floor":0,"tiers":[0]}'),
    "acquire far places": message(b'{"op":"acquire_run","id":1,"nonce":"x","restored":null,"floor":0,"tiers":[99]}'),
    "no tier to distrust": message(b'{"op":"distrust","id":1}'),
    "own without fields": message(b'{"op":"own_run","id":1}'),
    "own of nonsense": message(b'{"op":"own_run","id":1,"owner":[1,"x","../x"],"roles":[],"recover":[]}'),
    "own of text": message(b'{"op":"own_run","id":1,"owner":"owner","roles":[]}'),
    "complete nonsense": message(b'{"op":"complete","id":1,"tier":0,"attempts":["../x"]}'),
    "complete what nobody holds": message(b'{"op":"complete","id":1,"tier":0,"attempts":["1.00000000-5"]}'),
    "complete far places": message(b'{"op":"complete","id":1,"tier":99,"attempts":["1.00000000-5"]}'),
    "retract nonsense": message(b'{"op":"retract","id":1,"attempt":"../x","reason":""}'),
    "partner of nothing": message(b'{"op":"partner","id":1}'),
    "push nothing": message(b'{"op":"push","id":1,"arena":"00","slot":0,"attempt":"x"}'),
    "open without fields": message(b'{"op":"open_run","id":1}'),
    "greeting and nothing else": message(b'{"op":"greeting","id":1}'),
}


def test_hostile_messages_leave_writer_and_training_alone(own_sockets: Path, run_dir: str) -> None:
    """Garbage on the writer's socket, from the same user: the same writer continues, and all saves succeed."""
    live = toy.build()
    with ckpt.Checkpointer(live, ckpt.Tier(run_dir, every=1)) as cp:
        cp.restore(default=0)
        toy.train_step(live)
        first = cp.save(1)
        first.wait_durable(60)
        before = [process.pid for process in writers(own_sockets)]
        address = inside.addresses_of(inside.name_of_writer_in(run_dir))[0]
        open_ones = []
        for step, (name, raw) in enumerate(HOSTILE_MESSAGES.items(), start=2):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            open_ones.append(peer)
            peer.connect(address)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(raw)
            toy.train_step(live)
            save = cp.step(step)
            assert save is not None and save.wait_staged(60).step == step, name
        save.wait_durable(60)
        for peer in open_ones:
            peer.close()
        toy.train_step(live)
        save = cp.save(1000)
        assert save.wait_durable(60).step == 1000
        assert [process.pid for process in writers(own_sockets)] == before
    assert ckpt.load(run_dir).step == 1000
    assert eventually(lambda: not writers(own_sockets))


def test_writer_output_goes_only_to_private_folders(own_sockets: Path) -> None:
    """A writer's output goes only to a folder of our own with mode 0700. Without one, training still works."""
    folder = own_sockets / f"everystep-{os.getuid()}"
    assert inside.log_of_writer("key").startswith(str(folder))
    for mode in (0o755, 0o770, 0o701, 0o1777):
        folder.chmod(mode)
        assert inside.log_of_writer("key") == ""
    folder.chmod(0o700)
    assert inside.log_of_writer("key")
    folder.rename(own_sockets / "elsewhere")
    folder.symlink_to(own_sockets / "elsewhere")
    assert inside.log_of_writer("key") == ""
    folder.unlink()
    folder.write_text("a file")
    assert inside.log_of_writer("key") == ""
    with ckpt.Checkpointer(toy.build(), options=ckpt.Options(name="no words")) as cp:
        assert cp.save(1).wait_staged(60).step == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_writer_name_taken_by_another_user_is_ignored(own_sockets: Path) -> None:
    """Another user who takes our writer's name first cannot prevent training, and gets no messages."""
    key = inside.name_of_writer("memory:squatted")
    code = f"""
import os, socket
os.setuid(12345)
s = socket.socket(socket.AF_UNIX)
s.bind({inside.addresses_of(key)[0]!r})
s.listen(1)
print("there", flush=True)
input()
"""
    squatter = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert squatter.stdout is not None and squatter.stdin is not None
    try:
        assert squatter.stdout.readline() == "there\n"
        assert not inside.can_connect(key)
        with ckpt.Checkpointer(toy.build(), options=ckpt.Options(name="squatted")) as cp:
            assert cp.save(1).wait_staged(60).step == 1
            assert inside.names_taken(key) == {0: key}
    finally:
        squatter.kill()
        squatter.communicate()
