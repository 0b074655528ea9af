"""Messages that a writer cannot satisfy or cannot parse."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

import ckpt
import toy
from ckpt.core.checkpoint.lease import key_of
from ckpt.core.ipc import channel as link
from test_hostile import HOSTILE_MESSAGES, message

Json = Any
pytestmark = pytest.mark.timeout(60)  # a hang is a failure


def test_writer_answers_invalid_requests_with_errors(own_sockets: Path, run_dir: str) -> None:
    """An invalid request gets an error reply, and the connection stays usable."""
    with ckpt.Checkpointer(toy.build(), ckpt.Tier(run_dir, every=1)) as cp:
        cp.restore(default=0)
        channel = link.connect(key_of(run_dir, 0))
        assert channel is not None
        requests: list[Json] = [{"op": "nonsense"}, {"op": "know_layout", "layout": 5}, {"op": "use_arena"}, {}]
        for number, request in enumerate(requests):
            channel.sock.sendall(message(json.dumps({**request, "id": number}).encode()))
            received = channel.receive()
            assert received is not None and received.id == number and "error" in received.fields
        channel.close()


@pytest.mark.parametrize("raw", HOSTILE_MESSAGES.values(), ids=HOSTILE_MESSAGES)
def test_channel_receives_messages_or_none(raw: bytes) -> None:
    """For any bytes, `receive` returns None or an object with the descriptors that it names."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = link.Channel(ours)
        theirs.sendall(raw[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        received = channel.receive()
        assert received is None or (type(received.fields) is dict and received.fds == [])
        channel.close()
