"""Requests reach their handler methods, whichever objects define them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ckpt.core.ipc.messages import KeepSteps, Request
from ckpt.core.writer import held_run
from ckpt.core.writer.held_run import Caller, Dispatch, handles


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> object:
    """Return an object that handles all requests but one. No other object has handlers."""
    monkeypatch.setattr(held_run, "HANDLERS", {})
    methods = {}
    for kind in (kind for kind in Request.__subclasses__() if kind is not KeepSteps):

        def method(self: object, request: Any) -> None:
            raise AssertionError

        method.__name__ = kind.__name__
        methods[kind.__name__] = handles(kind)(method)
    return type("Others", (), methods)()


def test_several_objects_handle_a_request_in_order(others: object) -> None:
    heard = []

    class Core:
        @handles(KeepSteps)
        async def deal_with(self, request: KeepSteps) -> str:
            await asyncio.sleep(0)
            heard.append((self, request))
            return "core"

    class PlugIn:
        @handles(KeepSteps)
        def deal_with(self, request: KeepSteps, caller: Caller) -> str:
            heard.append((self, request))
            return "plug-in"

    core, plug_in, request = Core(), PlugIn(), KeepSteps(step=3)
    caller: Any = None
    assert asyncio.run(Dispatch(others, core, plug_in).answer(request, caller)) == "core"
    assert heard == [(core, request), (plug_in, request)]
    assert asyncio.run(Dispatch(others, plug_in).answer(request, caller)) == "plug-in"


def test_writer_start_fails_on_a_request_without_handler(others: object) -> None:
    with pytest.raises(TypeError, match="no handler for KeepSteps"):
        Dispatch(others)
