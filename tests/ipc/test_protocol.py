"""Tests of the messages between trainer and writer: each is handled and survives the wire, and a wrong one is rejected.

Processes of different versions do not disturb each other."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
import ckpt.writer_process  # registers the handlers of requests
import toy
from ckpt.core.checkpoint.lease import key_of
from ckpt.core.ipc import channel as link
from ckpt.core.ipc import messages
from ckpt.core.ipc.channel import Channel
from ckpt.core.ipc.messages import MIB, MOST_BYTES, Note, Request, message_of, reply_of, table
from ckpt.core.run import writer_link
from ckpt.core.run.writer_link import WriterClient
from ckpt.core.writer import held_run
from ckpt.errors import FencedError, ProtocolError, UsageError, to_wire
from processes import REPO, eventually, writers
from test_promise_handover import NAME, Rank

REQUESTS = Request.__subclasses__()
NOTES = Note.__subclasses__()
MESSAGES = [*REQUESTS, *NOTES]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
PLAIN = {
    int: st.integers(-(2**63), 2**63),
    float: st.floats(allow_nan=False),
    str: st.text(st.characters(codec=None), max_size=8),  # lone surrogates too: file names that are not UTF-8
    bool: st.booleans(),
    type(None): st.none(),
    Any: JSON,
}


def reply_type(kind: Any) -> Any:
    return kind.__orig_bases__[0].__args__[0]


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of this type in messages."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, parts))
    if origin is list:
        return st.lists(values(parts[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, parts))
    if origin is dict:
        return st.dictionaries(values(str), values(parts[1]), max_size=3)
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


# -- the tables --


def test_every_request_has_handler_with_reply_type() -> None:
    assert len(MESSAGES) <= 25 and set(REQUESTS) == set(held_run.HANDLERS)
    for kind, handler in ((kind, handler) for kind, handlers in held_run.HANDLERS.items() for handler in handlers):
        hints = get_type_hints(handler)
        assert hints["request"] is kind
        with_fds = str(inspect.signature(handler).return_annotation).startswith("Answer")
        assert with_fds or hints["return"] == reply_type(kind), kind


def test_every_note_has_a_receiver(run_dir: str) -> None:
    with ckpt.Checkpointer(toy.build(), ckpt.Tier(run_dir, every=1)) as cp:
        assert set(cp._run.supervisor._hears) == set(NOTES)
    assert table(NOTES) == writer_link.NOTES


def test_protocol_page_lists_every_message() -> None:
    page = (REPO / "docs" / "protocol.md").read_text()
    table_of_messages = page[page.index("| conversation |") : page.index("The class of a message")]
    assert set(re.findall(r"`(\w+)`", table_of_messages)) == {kind.__name__ for kind in MESSAGES}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_documented_and_frozen(kind: Any) -> None:
    """Each has a docstring of a few lines; no field has a name that the wire adds."""
    assert kind.__doc__ and len(kind.__doc__.splitlines()) <= 5
    assert kind.__struct_config__.frozen and not {"op", "id", "fds"} & set(kind.__struct_fields__)


# -- the wire --


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_messages_survive_the_wire(kind: Any, data: st.DataObject) -> None:
    """This includes infinite times, and names that are not UTF-8."""
    message = data.draw(values(kind))
    incoming = messages.decode(messages.encode(message, 7, kind.descriptors))
    assert incoming is not None and incoming.id == 7
    incoming.fds += [-1] * kind.descriptors
    assert message_of(incoming, table(MESSAGES)) == message


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_replies_survive_the_wire(kind: Any, data: st.DataObject) -> None:
    value, request = data.draw(values(reply_type(kind))), data.draw(values(kind))
    incoming = messages.decode(messages.encode_reply(value, 7))
    assert incoming is not None and incoming.op == messages.REPLY and reply_of(incoming, request) == value


def test_error_reply_raises_in_client() -> None:
    incoming = messages.decode(messages.encode_reply(messages.failure(FencedError("gone")), 7))
    assert incoming is not None
    with pytest.raises(FencedError, match="gone"):
        reply_of(incoming, messages.Lend())
    for fields in ({"value": 5}, {}, {"error": 5}, {"error": "x"}):
        with pytest.raises(ProtocolError, match="lend"):
            reply_of(messages.Incoming("reply", 7, fields, 10), messages.Lend())


def test_too_long_request_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    """The request fails immediately by name, the error is logged, and the connection stays usable."""
    with pair() as (client, writer):
        future = client.send(messages.Retract("x" * (9 * MIB), ""))
        with pytest.raises(ProtocolError, match="'retract' has 9 MiB"):
            future.result(10)
        later = client.send(messages.ContinueRun())
        incoming = writer.receive()
        assert incoming is not None and incoming.id is not None
        writer.reply(incoming.id, None)
        assert later.result(10) == (None, [])
    assert "'retract' has 9 MiB" in caplog.text


# -- a trainer that receives invalid messages --


@contextlib.contextmanager
def pair() -> Iterator[tuple[WriterClient, Channel]]:
    """Yield a client, and the other end of its connection."""
    ours, theirs = socket.socketpair()
    client, writer = WriterClient(Channel(ours), "none"), Channel(theirs)
    try:
        yield client, writer
    finally:
        client.close()
        writer.close()


def framed(fields: Any) -> bytes:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack(">I", len(body)) + body


def test_trainer_continues_after_invalid_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No caller waits forever: the request fails, and the next note is received."""
    heard: list[Note] = []
    with pair() as (client, writer):
        client.listen(heard.append, lambda: None)
        future = client.send(messages.Lend())
        writer.sock.sendall(framed({"op": "reply", "id": 1, "value": {"trainer": "x"}}))
        with pytest.raises(ProtocolError, match="the reply to lend"):
            future.result(10)
        for fields in (
            {"op": "of_another_version"},
            {"op": "problem_note"},
            {"op": "reply"},
            {"op": "reply", "id": 99},
        ):
            writer.sock.sendall(framed(fields))
        writer.send(messages.ProblemNote("so"))
        assert eventually(lambda: heard == [messages.ProblemNote("so")])
    assert "'of_another_version' is not known here" in caplog.text and "'problem_note' is malformed" in caplog.text


# -- a real writer --

WRONG: dict[str, tuple[Any, str]] = {
    "unknown": ({"op": "of_another_version"}, "'of_another_version' is not known here"),
    "no name": ({}, "a message without a name is not known here"),
    "a name of another kind": ({"op": "gone_note"}, "'gone_note' is not known here"),
    "wrong type": ({"op": "use_arena", "arena": 5}, "'use_arena' is malformed: Expected `str`, got `int`"),
    "wrong type deep inside": (
        {"op": "keep_steps", "notes": [["x", "y"]]},
        "'keep_steps' is malformed: Expected `int`, got `str`",
    ),
    "missing field": ({"op": "write_slot", "tier": 0}, "'write_slot' is malformed: Object missing required field"),
    "missing descriptor": ({"op": "attach_arena"}, "'attach_arena' comes with 1 descriptors, not 0"),
    "too long": ({"op": "retract", "checkpoint": "x" * (10 * MIB)}, "'retract' has 10 MiB, limit 8 MiB"),
    "a long name": ({"op": "x" * 5000}, "'" + "x" * 60 + "' is not known here"),
}


def test_writer_rejects_wrong_messages_and_continues(own_sockets: Path, run_dir: str) -> None:
    """A wrong message gets an error, and the connection stays usable. Bytes that are not a message end the connection;
    so does a far too long message, after its error. The same writer continues to save."""
    live = toy.build()
    with ckpt.Checkpointer(live, ckpt.Tier(run_dir, every=1)) as cp:
        cp.restore(default=0)
        key, pid = key_of(run_dir, 0), cp.writer_pid
        one = link.connect(key)
        assert one is not None
        for number, (fields, said) in enumerate(WRONG.values()):
            one.sock.sendall(framed({**fields, "id": number}))
            incoming = one.receive()
            assert incoming is not None and incoming.id == number
            with pytest.raises(ProtocolError) as caught:
                reply_of(incoming, messages.Lend())
            assert said in str(caught.value) and ckpt.__version__ in str(caught.value)
            assert one.ask(messages.Lend(), 30.0) is not None
        for raw, said in (
            (framed(b"\x80\x04 not JSON"), ""),
            (struct.pack(">I", MOST_BYTES + MIB) + b'{"op":"know_layout","id":5,"layout":{' + b" " * 200, "257 MiB"),
        ):
            other = link.connect(key)
            assert other is not None
            other.sock.sendall(raw)
            incoming = other.receive()
            assert said in (str(incoming.fields["message"]) if incoming is not None else "")
            assert (incoming is not None) == bool(said) and other.receive() is None
            other.close()
        one.close()
        toy.train_step(live)
        assert cp.save(1).wait_durable(60).step == 1 and cp.writer_pid == pid
        assert [process.pid for process in writers(own_sockets)] == [pid]


# -- another version --

OTHER = "import ckpt.version; ckpt.version.VERSION = '9.9'; import ckpt.core.ipc.messages as p; p.PROTOCOL = 99\n"


@pytest.fixture
def other_version(tmp_path: Path) -> str:
    """Return a path from which processes import the library as a different version."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OTHER)
    return str(tmp_path / "site")


def test_writer_of_another_version_is_left_running(own_sockets: Path, other_version: str) -> None:
    """The trainer of the other version is dead, and memory has the newest step. A start of this version explains the
    remedy and ends no process, also in a takeover. A start of the other version continues from memory."""
    with Rank(4, site=other_version) as first:
        assert first.trained() == "start 0 0"
    for words in ((), ("takeover",)):
        with Rank(5, *words) as second:
            said = second.line()
        assert said.startswith("ckpt.errors.ProtocolError:") and f"process {first.writer} holds memory" in said
        assert "everystep 9.9, protocol 99" in said and f"kill -9 {first.writer}" in said
        assert [process.pid for process in writers(own_sockets)] == [first.writer]
    with Rank(4, site=other_version) as third:
        assert third.trained() == "start 4 4" and third.writer == first.writer


def test_trainer_of_another_version_continues(own_sockets: Path, other_version: str) -> None:
    """The trainer lives: a takeover by this version fails, and the trainer continues with the same writer."""
    with Rank(4, site=other_version) as first:
        first.trained()
        with Rank(5, "takeover") as second:
            assert "ProtocolError" in second.line()
        assert first.do("train()") == "done 5" and first.do("print(cp.writer_pid)") == str(first.writer)


def test_new_writer_of_another_version_is_rejected(own_sockets: Path, other_version: str) -> None:
    """The library changed on disk during a training whose writer then dies: the error explains why nothing is saved."""
    with Rank(4) as first:
        first.trained()
        first.do(f"os.environ['PYTHONPATH'] = {other_version!r} + ':' + os.environ['PYTHONPATH']")
        first.do(f"os.kill({first.writer}, 9)")
        first.do("from processes import eventually; eventually(lambda: cp._run.supervisor.failure is not None)")
        said = first.do("train()")
    assert "the writer is lost" in said and "9.9" in said and "changed on disk" in said, said


def test_writer_without_versions_gets_no_hello(own_sockets: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such a writer would give its memory to any peer that sends `hello`. It gets none, and rejects other requests."""
    key, heard = link.run_key(f"memory:{NAME}", 0), list[str]()
    listener = link.listen(key)
    assert listener is not None

    def old_writer() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer = Channel(listener.accept()[0])
                while (incoming := peer.receive()) is not None:
                    heard.append(incoming.op)
                    error = UsageError(f"the writer does not know {incoming.op!r}: is it of another version?")
                    peer.sock.sendall(framed({**to_wire(error), "op": "reply", "id": incoming.id}))

    threading.Thread(target=old_writer, daemon=True).start()
    with Rank(1) as one:
        said = one.line()
    listener.close()
    assert "ProtocolError" in said and "is it of another version?" in said
    assert "hello" not in heard and heard[-1] == "lend"


def test_negative_control_environment_changes_the_version(own_sockets: Path, other_version: str) -> None:
    code = "import ckpt.core.ipc.messages as r; print(r.Lend().protocol, r.Lend().library)"
    path = f"{other_version}:{REPO}:{REPO / 'backends'}"
    said = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["99", "9.9"]
    assert messages.Lend().protocol == messages.PROTOCOL != 99
