"""A checkpoint to an object store and back, compared with obstore, s3fs, torch DCP, torchsnapshot and s3torchconnector
in the same run, with a server on this machine.

    make bench-storage    or: python benchmarks/storage.py [--quick] [--mib 1536] [--server rgw|moto] [--json FILE]

Every measurement is its own process; the libraries alternate. Measured:

  upload    from the call to durable: GB/s, and CPU seconds per GB of all processes of the library (our writer's too),
            without the server; sampled memory in addition to the state; for our own store also the most bytes in flight
  restore   the same back into tensors (raw contenders: into one buffer), compared bit for bit
  requests  of one checkpoint and one restore, counted by a proxy in front of the server
  training  steps of a CPU training loop in another process during uploads, compared with steps right before them, in
            pairs; with the default priority and with a throttle. The server gets the lowest priority here, since it
            stands for a remote one that uses no CPU of this machine

"raw" has no format, no digests and no commit: it shows the limit of the network. The server uses the same CPU, so the
ratios, measured in one run, mean more than absolute figures. Peers are installed into a temporary folder. The server
keeps all uploads in memory: 12 GB with the default size.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

REPO = Path(__file__).parent.parent
sys.path.insert(0, str(REPO / "tests" / "lib"))

MIB, PART, AT_ONCE = 1 << 20, 16 << 20, 8
TENSOR_MIB = 24
PEERS = (
    "torchsnapshot", "s3torchconnector", "s3torchconnectorclient", "nest_asyncio", "importlib_metadata", "zipp",
    "lazy_importer", "tenacity",
)  # fmt: skip
OURS, STORE, RAW = "everystep", "its store alone", "raw obstore"
LIMIT_S = 300.0  # of one measurement
BUCKET = "bucket"

Json = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """`mib`: size of the state; `turns`: measurements; `pairs`: of training without and with uploads of `slow_mib`."""

    mib: int
    turns: int
    slow_mib: int
    pairs: int
    throttles_mib_s: tuple[float, ...] = (64.0, 16.0)


FULL = Plan(mib=1536, turns=3, slow_mib=256, pairs=5)
QUICK = Plan(mib=128, turns=1, slow_mib=64, pairs=2)


# -- the libraries --


def build(mib: int) -> dict[str, torch.Tensor]:
    """Build float32 tensors like a fresh initialization, equal each time: some of several MiB, many small ones."""
    torch.manual_seed(0)
    count, small = max(1, mib // TENSOR_MIB), 64
    each = (mib * MIB // 4 - small * 1024) // count
    state = {f"layers.{i}.weight": torch.randn(each) for i in range(count)}
    return state | {f"layers.{i}.bias": torch.randn(1024) for i in range(small)}


def size_of(state: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in state.values())


class Contender(Protocol):
    """Created with the state, or one of the same shape to restore into, and its URL. `warm_up` is not measured."""

    def __init__(self, state: dict[str, torch.Tensor], asked: Json) -> None: ...

    def warm_up(self) -> None: ...

    def put(self) -> None:
        """Save the state, and return when it is durable."""

    def get(self) -> None: ...

    def right(self, expected: dict[str, torch.Tensor]) -> bool:
        """Return True if the restored state equals the saved one."""

    def close(self) -> Json:
        """Close, and return additional facts to report."""


class WithState:
    def __init__(self, state: dict[str, torch.Tensor], asked: Json) -> None:
        self.state, self.asked, self.url = state, asked, str(asked["url"])
        self.options = {"endpoint_url": asked["endpoint"], "key": asked["key"], "secret": asked["secret"]}

    def warm_up(self) -> None:
        import s3fs  # noqa: F401
        import torch.distributed.checkpoint  # noqa: F401

    def right(self, expected: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(self.state[name], t) for name, t in expected.items())

    def close(self) -> Json:
        return {}


class Ours(WithState):
    """A Checkpointer, its writer, and one tier in the object store."""

    def __init__(self, state: dict[str, torch.Tensor], asked: Json) -> None:
        super().__init__(state, asked)
        import ckpt

        throttle = asked.get("throttle_mib_s")
        tier = ckpt.Tier(self.url, every=1, keep=2, storage_options=self.options, max_mib_s=throttle)
        self.cp = ckpt.Checkpointer({"model": state}, [tier], memory=ckpt.Memory(linger_s=0.0))
        self.step = 0

    def warm_up(self) -> None:
        """Save once, since the first save allocates the memory for snapshots."""
        super().warm_up()
        if self.asked["action"] != "get":
            self.cp.restore(default=0)
            self.put()
            self.cp.wait(LIMIT_S)

    def put(self) -> None:
        self.step += 1
        self.cp.save(self.step).wait_durable(LIMIT_S)

    def get(self) -> None:
        self.cp.restore()

    def close(self) -> Json:
        self.cp.close()
        return {}


class OurStore(WithState):
    """The same without Checkpointer and writer: data file, digests and commit from this process, and back."""

    def __init__(self, state: dict[str, torch.Tensor], asked: Json) -> None:
        super().__init__(state, asked)
        from ckpt.core.format.layout import Layout, TensorSpec
        from ckpt.store import open_store, remember_options
        from ckpt_backends.limit import Limit

        tensors = tuple(TensorSpec(name, "F32", tuple(t.shape)) for name, t in state.items())
        self.layout = Layout(tensors, {}, [{"path": [], "kind": "x", "facts": {}, "names": list(state)}])
        self.flat = flat(state, self.layout.arrangement.data_size)
        remember_options(self.url, self.options)
        self.loop = asyncio.new_event_loop()
        self.store: Any = self.loop.run_until_complete(self._limited(Limit, open_store))

    async def _limited(self, limit: Any, opening: Any) -> Any:
        return limit(opening(self.url, writable=True))

    def warm_up(self) -> None:
        super().warm_up()
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        from ckpt.core.checkpoint import commits, read
        from ckpt.core.format.manifest import new_nonce
        from ckpt.core.log.run_log import RunLog

        if self.asked["action"] == "get":
            self.log = await read.open_run(self.url, self.store)
            return
        await commits.create_run(self.store)
        self.log = RunLog(self.store)
        await self.log.open()
        self.mine = await commits.acquire(self.log, new_nonce())

    def put(self) -> None:
        self.loop.run_until_complete(self._put())

    async def _put(self) -> None:
        from ckpt.core.checkpoint import commits
        from ckpt.core.checkpoint.write import RankSnapshot, write_part
        from ckpt.core.format.manifest import CheckpointId

        snapshot = RankSnapshot(CheckpointId(self.mine.term, 1, self.mine.nonce), self.layout, self.flat, [None])
        await commits.commit(self.log, self.mine, [await write_part(self.store, snapshot)])

    def get(self) -> None:
        self.loop.run_until_complete(self._get())

    async def _get(self) -> None:
        from ckpt.core.checkpoint import read

        manifest = await read.load_all(self.store, read.choose(self.log))
        table, header = manifest.table, manifest.manifests[0].files[0].header_size

        def sink(chunk: int, data: memoryview) -> None:
            at = int(table.offset[chunk]) - header
            self.flat[at : at + len(data)] = data

        await read.fetch(self.store, table, read.plan_reads(table, range(len(table.length)), far=True), sink)

    def right(self, expected: dict[str, torch.Tensor]) -> bool:
        return bool(self.flat == flat(expected, len(self.flat)))

    def close(self) -> Json:
        self.loop.run_until_complete(self.store.aclose())
        return {"in_flight": self.store.most_in_flight}


class Raw(WithState):
    """One object with the same bytes, in parts of 16 MiB, eight at a time."""

    def __init__(self, state: dict[str, torch.Tensor], asked: Json) -> None:
        super().__init__(state, asked)
        self.flat = flat(state, size_of(state))
        self.ranges = [(start, min(start + PART, len(self.flat))) for start in range(0, len(self.flat), PART)]

    def right(self, expected: dict[str, torch.Tensor]) -> bool:
        return bool(self.flat == flat(expected, len(self.flat)))


class RawObstore(Raw):
    def __init__(self, state: dict[str, torch.Tensor], asked: Json) -> None:
        super().__init__(state, asked)
        from obstore.store import S3Store

        bucket, _, self.name = self.url.removeprefix("s3://").partition("/")
        self.store = S3Store(
            bucket,
            endpoint=asked["endpoint"],
            access_key_id=asked["key"],
            secret_access_key=asked["secret"],
            region=asked["region"],
            client_options={"allow_http": True},
        )

    def put(self) -> None:
        import obstore

        obstore.put(
            self.store,
            self.name,
            (self.flat[a:b] for a, b in self.ranges),
            use_multipart=True,
            chunk_size=PART,
            max_concurrency=AT_ONCE,
        )

    def get(self) -> None:
        import obstore

        def one(span: tuple[int, int]) -> None:
            self.flat[slice(*span)] = memoryview(obstore.get_range(self.store, self.name, start=span[0], end=span[1]))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, self.ranges))


class RawS3fs(Raw):
    def __init__(self, state: dict[str, torch.Tensor], asked: Json) -> None:
        super().__init__(state, asked)
        import s3fs

        self.fs = s3fs.S3FileSystem(**self.options, skip_instance_cache=True)
        self.path = self.url.removeprefix("s3://")

    def put(self) -> None:
        self.fs.pipe_file(self.path, bytes(self.flat), chunksize=PART, max_concurrency=AT_ONCE)

    def get(self) -> None:
        def one(span: tuple[int, int]) -> None:
            self.flat[slice(*span)] = self.fs.cat_file(self.path, start=span[0], end=span[1])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, self.ranges))


class Nothing(WithState):
    """A control: pairs of training blocks without an upload."""

    def put(self) -> None:
        time.sleep(2.0)


class Dcp(WithState):
    """`torch.distributed.checkpoint` over fsspec, with its defaults."""

    def put(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        dcp.save(self.state, storage_writer=FsspecWriter(self.url, **self.options))

    def get(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp.load(self.state, storage_reader=FsspecReader(self.url, **self.options))


class TorchSnapshot(WithState):
    def put(self) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot.take(self.url, {"state": torchsnapshot.StateDict(**self.state)})

    def get(self) -> None:
        import torchsnapshot

        torchsnapshot.Snapshot(self.url).restore({"state": torchsnapshot.StateDict(**self.state)})


class S3TorchConnector(WithState):
    """Uses torch.save with its writer, and torch.load with its reader."""

    def __init__(self, state: dict[str, torch.Tensor], asked: Json) -> None:
        super().__init__(state, asked)
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        config = S3ClientConfig(force_path_style=True, max_attempts=2)
        self.place = S3Checkpoint(asked["region"], endpoint=asked["endpoint"], s3client_config=config)

    def put(self) -> None:
        with self.place.writer(self.url) as writer:
            torch.save(self.state, writer)

    def get(self) -> None:
        with self.place.reader(self.url) as reader:
            for name, t in torch.load(reader, weights_only=True).items():
                self.state[name].copy_(t)


CONTENDERS: dict[str, Callable[[dict[str, torch.Tensor], Json], Contender]] = {
    OURS: Ours,
    STORE: OurStore,
    RAW: RawObstore,
    "raw s3fs": RawS3fs,
    "torch DCP, fsspec": Dcp,
    "torchsnapshot": TorchSnapshot,
    "s3torchconnector": S3TorchConnector,
}

CONTROL = "nothing at all"


def flat(state: dict[str, torch.Tensor], size: int) -> memoryview:
    """Return the same bytes in one buffer."""
    joined = torch.empty(size, dtype=torch.uint8)
    at = 0
    for t in state.values():
        joined[at : at + t.nbytes] = t.view(torch.uint8)
        at += t.nbytes
    return memoryview(joined.numpy()).cast("B")


# -- one measurement, in its own process --


class Meter:
    """Measures CPU seconds and private memory of this process and its writer, if there is one; memory is sampled."""

    def __init__(self) -> None:
        self.processes = [psutil.Process(), *writers()]
        self.cpu, self.memory, self.most = self._cpu(), self._memory(), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self.started = time.perf_counter()

    def stop(self) -> Json:
        seconds = time.perf_counter() - self.started
        cpu = self._cpu() - self.cpu
        self._over.set()
        self._thread.join()
        return {"seconds": seconds, "cpu_s": cpu, "memory": self.most - self.memory}

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, self._memory())

    def _cpu(self) -> float:
        return sum(t.user + t.system for t in (process.cpu_times() for process in self.processes))

    def _memory(self) -> int:
        return sum(m.rss - m.shared for m in (process.memory_info() for process in self.processes))


def writers() -> list[psutil.Process]:
    """Return the writer whose socket is in the runtime folder of this process, which no other process uses."""
    folder, found = os.environ["CKPT_RUNTIME_DIR"], []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(folder in word for word in process.cmdline()):
                found.append(process)
    return found


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def work(asked: Json) -> None:
    """Run the requested action and report; report the error of a peer that fails."""
    torch.set_num_threads(1 if asked["action"] == "train" else 2)
    if asked["action"] == "train":
        return train(asked)
    try:
        perform(asked)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        say(failed=f"{type(error).__name__}: {lines[0][:160]}")
    return None


def perform(asked: Json) -> None:
    expected = build(int(asked["mib"]))
    restoring = asked["action"] == "get"
    state = {name: torch.zeros_like(t) for name, t in expected.items()} if restoring else expected
    nbytes = size_of(state)
    contender = (CONTENDERS | {CONTROL: Nothing})[asked["who"]](state, asked)
    contender.warm_up()
    if asked["action"] == "loop":
        return repeat(contender)
    opening, meter = counted(asked), Meter()
    contender.get() if restoring else contender.put()
    facts = meter.stop()
    requests = counted(asked) - opening
    right = contender.right(expected) if restoring else True
    say(**facts, nbytes=nbytes, right=right, opening=opening.total(), requests=requests, **contender.close())
    return None


def counted(asked: Json) -> Counter[str]:
    """Return the number of requests so far, by kind, if they pass through a counting proxy."""
    if not asked.get("proxy"):
        return Counter()
    from s3_server import FAULTS

    with urllib.request.urlopen(asked["endpoint"] + FAULTS, timeout=30) as answer:
        return Counter(json.load(answer)["requests"])


def repeat(contender: Contender) -> None:
    """Upload once for each input line."""
    say(ready=True)
    for _ in sys.stdin:
        started = time.monotonic()
        contender.put()
        say(span=[started, time.monotonic()])
    contender.close()


def train(asked: Json) -> None:
    """Train a small model until the input ends; report the end time of each step."""
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    optim = torch.optim.AdamW(model.parameters())
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    ends = []
    while not over.is_set():
        x = torch.randn(64, 512)
        optim.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        optim.step()
        ends.append(time.monotonic())
        if len(ends) == 10:
            say(ready=True)
    say(ends=ends)


# -- measurements, one after the other --


class Bench:
    """Measurements. `place`: access to the server. `folder`: temporary files, with packages of peers in `peers`."""

    def __init__(self, server: Any, folder: Path, plan: Plan) -> None:
        from s3_server import KEY, REGION, SECRET

        self.server, self.folder, self.plan = server, folder, plan
        self.place = {"endpoint": server.url, "key": KEY, "secret": SECRET, "region": REGION}

    def start(self, action: str, who: str = "", **more: Any) -> subprocess.Popen[str]:
        runtime = Path(tempfile.mkdtemp(dir=self.folder))
        asked = {"action": action, "who": who, **self.place, **more}
        path = [REPO, REPO / "backends", REPO / "tests" / "lib", self.folder / "peers"]
        environment = {
            **os.environ,
            "PYTHONPATH": ":".join(map(str, path)),
            "CKPT_RUNTIME_DIR": str(runtime),
            "OMP_WAIT_POLICY": "passive",
            "PYTHONWARNINGS": "ignore",
            "AWS_ENDPOINT_URL": asked["endpoint"],
            "AWS_ACCESS_KEY_ID": asked["key"],
            "AWS_SECRET_ACCESS_KEY": asked["secret"],
            "AWS_DEFAULT_REGION": asked["region"],
        }
        with open(self.folder / "errors", "a") as errors:
            return subprocess.Popen(
                [sys.executable, __file__, "--work", json.dumps(asked)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def measure(self, action: str, who: str, name: str, **more: Any) -> Json:
        process = self.start(action, who, url=f"s3://{BUCKET}/{name}", **{"mib": self.plan.mib, **more})
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
            lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            return dict(lines[-1]) if lines else {"failed": f"ended with {process.returncode}"}
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LIMIT_S:g} s"}
        finally:
            process.kill()
            process.communicate()

    def forget(self, name: str) -> None:
        """Delete the objects of a measurement, since they are stored in memory."""
        client = self.client()
        while found := client.list_objects_v2(Bucket=BUCKET, Prefix=name).get("Contents", ()):
            client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": one["Key"]} for one in found]})
        for one in client.list_multipart_uploads(Bucket=BUCKET, Prefix=name).get("Uploads", ()):
            client.abort_multipart_upload(Bucket=BUCKET, Key=one["Key"], UploadId=one["UploadId"])
        if hasattr(self.server, "collect"):
            self.server.collect()

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.server.url,
            aws_access_key_id=self.place["key"],
            aws_secret_access_key=self.place["secret"],
            region_name=self.place["region"],
        )

    def there_and_back(self) -> dict[str, dict[str, list[Json]]]:
        """Return the results of each turn, by action and library."""
        found: dict[str, dict[str, list[Json]]] = {"put": {}, "get": {}}
        alive = list(CONTENDERS)
        for turn in range(self.plan.turns):
            for who in list(alive) if turn % 2 == 0 else list(reversed(alive)):
                name = f"{slug(who)}-{turn}"
                for action in ("put", "get"):
                    facts = self.measure(action, who, name)
                    found[action].setdefault(who, []).append(facts)
                    said = facts.get("failed") or f"{facts['seconds']:.2f} s"
                    print(f"  turn {turn}, {action} {who}: {said}", file=sys.stderr)
                    if "failed" in facts:
                        alive.remove(who)
                        break
                self.forget(name)
        return found

    def requests(self, names: list[str]) -> dict[str, dict[str, Json]]:
        """Return the number of requests of each kind, by library and action, for a state of the same size."""
        from s3_server import FaultProxy

        found: dict[str, dict[str, Json]] = {}
        with FaultProxy(self.server.url) as proxy:
            for who in names:
                name = f"{slug(who)}-counted"
                for action in ("put", "get"):
                    proxy.clear()
                    facts = self.measure(action, who, name, endpoint=proxy.url, proxy=True)
                    found.setdefault(who, {})[action] = {**facts, "all": proxy.requests().total()}
                self.forget(name)
        return found

    def step_deferred(self) -> None:
        """Set the lowest priority for every thread of the server and its children."""
        for pid in self.server.pids() if hasattr(self.server, "pids") else [self.server.process.pid]:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), 19)

    def slowdown(self, who: str, throttle_mib_s: float | None) -> Json:
        """Compare steps during an upload with steps in the pause before it, which is as long as the previous upload."""
        name = f"{slug(who)}-loop"
        url, mib = f"s3://{BUCKET}/{name}", self.plan.slow_mib
        uploading = self.start("loop", who, url=url, mib=mib, throttle_mib_s=throttle_mib_s)
        training = self.start("train", mib=mib)
        spans: list[tuple[float, float]] = []
        try:
            first = listen(uploading)
            if "failed" in first:
                return first
            listen(training)
            pause = 3.0
            for _ in range(self.plan.pairs):
                time.sleep(pause)
                uploading.stdin.write("go\n")  # type: ignore[union-attr]
                uploading.stdin.flush()  # type: ignore[union-attr]
                begun, ended = listen(uploading)["span"]
                spans.append((begun, ended))
                pause = min(10.0, max(1.0, ended - begun))
            training.stdin.close()  # type: ignore[union-attr]
            ends = listen(training)["ends"]
        except (KeyError, OSError) as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        finally:
            for process in (uploading, training):
                process.kill()
                process.wait()
            self.forget(name)
        ratios, before, steps = [], 0.0, list(pairwise(ends))
        for begun, ended in spans:
            since = max(before, 2 * begun - ended)
            quiet = [b - a for a, b in steps if since <= a and b <= begun]
            busy = [b - a for a, b in steps if begun <= a and b <= ended]
            if quiet and busy:
                ratios.append(statistics.mean(busy) / statistics.mean(quiet))
            before = ended + 0.5  # cleanup right after an upload counts for neither
        return {
            "ratios": ratios,
            "slowdown": statistics.median(ratios) if ratios else None,
            "seconds": statistics.median(ended - begun for begun, ended in spans),
        }


def listen(process: subprocess.Popen[str]) -> Json:
    """Return the next event of the process."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    return {"failed": f"ended with {process.wait()}"}


def slug(who: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in who)


def install_peers(folder: Path) -> str | None:
    """Install peers into a separate folder, without dependencies, so that torch stays unchanged. Return any error."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--target"]
    result = subprocess.run([*command, str(folder), *PEERS], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else (result.stderr.strip().splitlines() or ["pip failed"])[-1]


@contextlib.contextmanager
def serving(kind: str) -> Iterator[Any]:
    from servers import Rgw

    from s3_server import MotoServer

    with MotoServer() if kind == "moto" else Rgw(size=14 << 30) as server:
        server.make_bucket(BUCKET)
        yield server


# -- figures and tables --


def figures(turns: list[Json], raw: Json | None) -> Json:
    if why := next((one["failed"] for one in turns if "failed" in one), None):
        return {"failed": why}
    seconds, gb = statistics.median(one["seconds"] for one in turns), turns[0]["nbytes"] / 1e9
    found: Json = {
        "seconds": [one["seconds"] for one in turns],
        "gb_s": gb / seconds,
        "cpu_s_gb": statistics.median(one["cpu_s"] for one in turns) / gb,
        "memory_mib": max(one["memory"] for one in turns) / MIB,
        "right": all(one["right"] for one in turns),
        "in_flight_mib": max((one["in_flight"] for one in turns if "in_flight" in one), default=0) / MIB,
    }
    if raw is not None and "gb_s" in raw:
        found["of_raw"] = found["gb_s"] / raw["gb_s"]
        found["cpu_of_raw"] = found["cpu_s_gb"] / raw["cpu_s_gb"]
    return found


def compared(turns: dict[str, list[Json]]) -> dict[str, Json]:
    raw = figures(turns[RAW], None) if RAW in turns else None
    return {who: figures(told, raw) for who, told in turns.items()}


def show(title: str, columns: list[str], rows: list[tuple[str, list[str] | str]]) -> None:
    """Print a table. A string instead of cells is the reason for missing ones."""
    from rich.console import Console
    from rich.table import Table

    table, whys = Table(title=title, title_justify="left"), list[str]()
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in rows:
        if isinstance(cells, str):
            whys += [cells] if cells not in whys else []
            table.add_row(name, f"({whys.index(cells) + 1})", *["-"] * (len(columns) - 1))
        else:
            table.add_row(name, *cells)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for i, why in enumerate(whys):
        console.print(f"({i + 1}) does not run here: {why}", markup=False)


def cells(f: Json) -> list[str] | str:
    if "failed" in f:
        return str(f["failed"])
    return [
        f"{f['gb_s']:.2f}",
        f"{f['of_raw']:.2f}" if "of_raw" in f else "",
        f"{f['cpu_s_gb']:.2f}",
        f"{f['cpu_of_raw']:.2f}" if "cpu_of_raw" in f else "",
        f"{f['memory_mib']:.0f}",
        f"{f['in_flight_mib']:.0f}" if f["in_flight_mib"] else "",
        "yes" if f["right"] else "NO",
    ]


def report(found: Json, plan: Plan) -> None:
    columns = ["GB/s", "/ raw", "CPU-s a GB", "/ raw", "MiB on top", "MiB in flight", "right"]
    for action, title in (("put", "Upload"), ("get", "Restore")):
        show(f"{title} of {plan.mib} MiB", columns, [(who, cells(f)) for who, f in found[action].items()])
    kinds = ["PUT", "POST", "GET", "HEAD", "DELETE"]

    def counts(f: Json) -> list[str] | str:
        if "failed" in f:
            return str(f["failed"])
        closing = f["all"] - f["opening"] - sum(f["requests"].values())
        return [str(n) for n in (f["opening"], *(f["requests"].get(kind, 0) for kind in kinds), closing)]

    rows = [(f"{who}, {action}", counts(f)) for who, by in found["requests"].items() for action, f in by.items()]
    show(
        "Requests of a checkpoint; before it (with everystep's first checkpoint), and after it",
        ["before", *kinds, "after"],
        rows,
    )
    show(
        f"Training in another process while {plan.slow_mib} MiB are uploaded: a step, against one right before",
        ["step / without", "least", "most", "one upload"],
        [(name, slow_cells(f)) for name, f in found["slowdown"].items()],
    )


def slow_cells(f: Json) -> list[str] | str:
    if f.get("slowdown") is None:
        return str(f.get("failed", "no step fell into an upload"))
    return [f"{f['slowdown']:.3f}", f"{min(f['ratios']):.3f}", f"{max(f['ratios']):.3f}", f"{f['seconds']:.2f} s"]


def measure(bench: Bench, plan: Plan) -> Json:
    told = bench.there_and_back()
    found: Json = {action: compared(turns) for action, turns in told.items()}
    found["requests"] = bench.requests([who for who, f in found["get"].items() if "failed" not in f])
    bench.step_deferred()
    found["slowdown"] = {
        OURS: bench.slowdown(OURS, None),
        **{f"{OURS}, {rate:g} MiB/s at most": bench.slowdown(OURS, rate) for rate in plan.throttles_mib_s},
        RAW: bench.slowdown(RAW, None),
        CONTROL: bench.slowdown(CONTROL, None),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller, and one turn each; two minutes")
    parser.add_argument("--mib", type=int, help="size of the state")
    parser.add_argument("--turns", type=int, help="measurements of each library")
    parser.add_argument("--server", choices=("rgw", "moto"), default="rgw")
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(json.loads(arguments.work))
    plan = QUICK if arguments.quick else FULL
    plan = Plan(arguments.mib or plan.mib, arguments.turns or plan.turns, plan.slow_mib, plan.pairs)
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    print(
        f"{machine['cpus']} cores, load {machine['load']:.1f}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, server: {arguments.server}, {plan.turns} turns"
    )
    folder, started = Path(tempfile.mkdtemp(prefix="bench-")), time.monotonic()
    try:
        if why := install_peers(folder / "peers"):
            print(f"cannot install peers: {why}")
        with serving(arguments.server) as server:
            found = measure(Bench(server, folder, plan), plan)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(found, plan)
    print(f"{time.monotonic() - started:.0f} s in total")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine, "plan": plan.__dict__, **found}, indent=1))
    return None


if __name__ == "__main__":
    main()
