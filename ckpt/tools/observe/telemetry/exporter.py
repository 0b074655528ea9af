"""Export metrics from the writer: an endpoint for Prometheus, and scalars for TensorBoard.

The packages are imported in the writer only if they are needed; TensorBoard is used without torch and TensorFlow. An
error is logged once, and the export is retried. It never delays a save.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ckpt.events import log
from ckpt.metrics import INSTALL, Metrics
from ckpt.tools.observe.telemetry.gauges import KINDS, Gauge, gauges
from ckpt.tools.observe.telemetry.status import RankStatus

SCRAPE_S = 5.0  # maximum seconds to collect the status while a client waits
PATIENCE_S, SOON_S = 3.0, 0.2  # seconds for which a port may be busy without a warning, and between these attempts
AGAIN_S = 2.0  # seconds between attempts after the warning
LAST_S = 2.0  # maximum seconds to write the last scalars when the writer exits
Look = Callable[[], Coroutine[Any, Any, RankStatus]]
P = ParamSpec("P")
T = TypeVar("T")


class Exporter:
    """Serves and records metrics in the writer's event loop. `look()`: returns the status of this writer's rank.
    `warn`: shows a warning to the user. `serves`: receives the address of the endpoint, or "" when there is none."""

    def __init__(self, look: Look, warn: Callable[[str], None], serves: Callable[[str], None]) -> None:
        self._look, self._warn, self._serves = look, warn, serves
        self._wanted: tuple[Metrics, int, int] | None = None
        self._server: Any = None
        self._events: EventFile | None = None
        self._serving: asyncio.Task[None] | None = None
        self._recording: asyncio.Task[None] | None = None
        self._said: set[str] = set()
        self._written: tuple[int, str] | None = None

    async def begin(self, wanted: Metrics | None, rank: int, local_rank: int) -> None:
        """Start the exports that a trainer has configured. Exports that run already with the same settings continue."""
        now = None if wanted is None else (wanted, rank, local_rank)
        self._written = None
        if self._events is not None and now == self._wanted:
            self._events.start()
        if now == self._wanted:
            return
        await self.stop()
        self._wanted, self._said = now, set()
        if wanted is None:
            return
        if wanted.prometheus_port is not None:
            self._serving = asyncio.create_task(self._serve(wanted.host, wanted.prometheus_port + local_rank))
        if wanted.tensorboard is not None:
            folder = Path(str(wanted.tensorboard)) / f"rank{rank}"
            self._recording = asyncio.create_task(self._record(folder, wanted.every_s))

    async def stop(self) -> None:
        """Stop serving and recording."""
        self.stop_serving()
        if self._recording is not None:
            self._recording.cancel()
        self._recording = self._wanted = None
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(deferred(events.close), LAST_S)

    def stop_serving(self) -> None:
        """Release the port now, because the next writer may need it before this process has exited."""
        if self._serving is not None:
            self._serving.cancel()
        server, self._server, self._serving = self._server, None, None
        self._serves("")
        if server is not None:
            threading.Thread(target=_end, args=(server,), daemon=True).start()

    async def finish(self) -> None:
        """Record the last scalars before the writer exits, if that takes at most `LAST_S`."""
        with contextlib.suppress(TimeoutError, Exception):
            if self._events is not None:
                await asyncio.wait_for(self._write(self._events), LAST_S)
        with contextlib.suppress(Exception):
            await self.stop()

    def _say(self, what: str, text: str) -> None:
        """Log a warning, once per kind of problem until the problem is solved."""
        if what not in self._said:
            self._said.add(what)
            self._warn(text)

    # -- Prometheus --

    async def _serve(self, host: str, port: int) -> None:
        """Start the endpoint. Retry until the port is free."""
        loop, patience = asyncio.get_running_loop(), time.monotonic() + PATIENCE_S
        while self._server is None:
            starting = deferred(_start, host, port, self._look, loop)
            try:
                server = await asyncio.shield(starting)
            except asyncio.CancelledError:
                starting.add_done_callback(_end_late)
                raise
            except ImportError as error:
                self._say("import", f"cannot serve metrics: {error}. {INSTALL}")
                return
            except Exception as error:
                if time.monotonic() < patience:  # a writer that is about to exit may still have the port
                    await asyncio.sleep(SOON_S)
                    continue
                about = f"cannot serve metrics at {host}:{port}: {error}"
                advice = "Free the port, or use another prometheus_port=. Training continues, and serving is retried"
                self._say("port", f"{about}. {advice}")
                await asyncio.sleep(AGAIN_S)
                continue
            self._server = server
            self._serves(f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics")
            if "port" in self._said:
                self._said.discard("port")
                log.info("serving metrics at %s:%d", host, port)

    # -- TensorBoard --

    async def _record(self, folder: Path, every_s: float) -> None:
        while True:
            try:
                if self._events is None:
                    self._events = await deferred(EventFile, folder)
                await self._write(self._events)
                self._said.discard("events")
            except FileNotFoundError:
                self._events = None  # the event file was deleted: create a new one
                await asyncio.sleep(min(every_s, SOON_S))
                continue
            except ImportError as error:
                self._say("import", f"cannot write scalars: {error}. {INSTALL}")
                return
            except Exception as error:
                about = f"cannot write scalars to {folder}: {error}"
                self._say("events", f"{about}. Training continues, and writing is retried")
            await asyncio.sleep(every_s)

    async def _write(self, events: EventFile) -> None:
        look = await self._look()
        state = look.calls, look.trainer
        if look.step < 0 or state == self._written:
            return
        values = {tag_of(one): one.value for one in gauges(look)}
        await deferred(events.write, look.step, values)
        self._written = state


def deferred(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Run a function in a daemon thread, so that a hanging disk or driver does not delay the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*args, **kwargs)
        except BaseException as found:
            error = found
        with contextlib.suppress(RuntimeError):  # raised if the loop has closed in the meantime
            loop.call_soon_threadsafe(settle, result, error)

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done() and error is not None:
            future.set_exception(error)
        elif not future.done():
            future.set_result(result)

    threading.Thread(target=work, name="ckpt-metrics", daemon=True).start()
    return future


def tag_of(gauge: Gauge) -> str:
    """Return the TensorBoard tag of a gauge, for example ckpt/tier_lag_steps/file:///data/run1."""
    return "/".join(filter(None, ("ckpt", gauge.name.removeprefix("ckpt_"), gauge.label)))


def _start(host: str, port: int, look: Look, loop: asyncio.AbstractEventLoop) -> Any:
    """Start the server. Called in a thread, because the imports are slow. For each scrape, it requests the status."""
    client: Any = importlib.import_module("prometheus_client")
    core: Any = importlib.import_module("prometheus_client.core")

    class Rank:
        def collect(self) -> Iterator[Any]:
            future = asyncio.run_coroutine_threadsafe(look(), loop)
            try:
                found = future.result(SCRAPE_S)
            finally:
                future.cancel()
            yield from families(found, core)

    registry = client.CollectorRegistry()
    registry.register(Rank())
    server, _ = client.start_http_server(port, addr=host, registry=registry)
    return server


def _end(server: Any) -> None:
    server.shutdown()
    server.server_close()


def _end_late(starting: asyncio.Future[Any]) -> None:
    """Stop a server whose start was cancelled, once it has started."""
    if not starting.cancelled() and starting.exception() is None:
        threading.Thread(target=_end, args=(starting.result(),), daemon=True).start()


def families(look: RankStatus, core: Any) -> Iterator[Any]:
    """Yield the metrics in the form that prometheus_client serves. `core`: the module `prometheus_client.core`."""
    found: dict[str, Any] = {}
    run, rank = look.run, str(look.rank)
    for one in gauges(look):
        kind = KINDS[one.name]
        if one.name not in found:
            made = core.CounterMetricFamily if kind.counter else core.GaugeMetricFamily
            labels = ["run", "rank", *([kind.label] if kind.label else [])]
            found[one.name] = made(one.name, kind.help, labels=labels)
        found[one.name].add_metric([run, rank, *([one.label] if kind.label else [])], one.value)
    yield from found.values()


class EventFile:
    """A file with scalars by step for TensorBoard. Any thread may call its methods. Raises ImportError if the package
    is missing, OSError if the folder cannot be written to (the file is then unchanged), and FileNotFoundError once the
    file was deleted."""

    def __init__(self, folder: Path) -> None:
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        name = f"events.out.tfevents.{stamp}"
        self._file = open(folder / name, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        self._starts, self._lock = True, threading.Lock()
        try:
            self._append(self._event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        except BaseException:
            self._file.close()
            (folder / name).unlink(missing_ok=True)
            raise

    def start(self) -> None:
        """Mark the start of a new trainer: from its first step on, its values replace those of earlier trainers."""
        self._starts = True

    def write(self, step: int, values: dict[str, float]) -> None:
        with self._lock:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError("the event file was deleted")
            if self._starts:
                session = self._event.SessionLog(status=self._event.SessionLog.START)
                self._append(self._event.Event(wall_time=time.time(), step=step, session_log=session))
                self._starts = False
            scalars = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            summary = self._summary.Summary(value=scalars)
            self._append(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def _append(self, event: Any) -> None:
        """Append a complete record, because an incomplete one would make all later records unreadable."""
        buffer = io.BytesIO()
        self._records.RecordWriter(buffer).write(event.SerializeToString())
        record, before, written = buffer.getvalue(), self._file.tell(), 0
        try:
            while written < len(record):
                written += self._file.write(record[written:])
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
                self._file.seek(before)
            raise

    def close(self) -> None:
        with self._lock:
            self._file.close()
