"""Object storage on real servers: Ceph's gateway, rclone (which ignores conditions), moto, Azurite, and rejected ones.

Google's testbench is not a package: start it and set STORAGE_EMULATOR_HOST to use it.

The tests start their servers. A server that is not installed is a failure, because `make test-s3` installs them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from servers import Azurite, NotInstalledError, Rclone, Rgw, Server
from servers.misfits import Ftp, Misfit, S3rver, Sftp, ToyGcs, WebDav
from servers.process import find

import ckpt
import inside
import toy
from ckpt.core.checkpoint.commits import create_run
from ckpt.core.format.manifest import new_format
from ckpt.errors import NoCheckpointError, StoreError
from ckpt.store import Store, open_store, options_of, remember_options
from ckpt.testing import StoreTests, keys
from ckpt_backends.remote import RemoteStore
from ckpt_backends.s3 import S3Store
from processes import eventually, killed, run_script
from run_files import DATA, MANIFEST, checkpoint_id, data_key, pattern, select, step_of
from s3_server import FaultProxy, MotoServer, storage_options

pytestmark = pytest.mark.s3

ENGINES = ("obstore", "s3fs")
MISFITS = (Ftp, Sftp, WebDav, S3rver, ToyGcs)
MIB = 1 << 20
_names = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def only_this_machine() -> Iterator[None]:
    """Prevent gcsfs from querying Google about the type of an emulator's bucket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield


@pytest.fixture(scope="module")
def rgw() -> Iterator[Rgw]:
    with Rgw() as server:
        yield server


@pytest.fixture(scope="module")
def rclone() -> Iterator[Rclone]:
    with Rclone() as server:
        yield server


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    with Azurite() as server:
        yield server


def new_place(server: Server | MotoServer, engine: str | None = None, *, url: str = "") -> str:
    """Return the URL of a run in a new bucket. `url`: of a proxy in front of the server."""
    bucket = server.make_bucket(f"bucket-{next(_names)}")
    options = storage_options(url or server.url)
    remember_options(f"s3://{bucket}/some/run", options if engine is None else options | {"engine": engine})
    return f"s3://{bucket}/some/run"


# -- the contract of a store --


class OverS3(StoreTests):
    server: str
    engine: str
    has_unfinished = True
    creates_uploads = False  # names of data files are never reused, so nothing checks them first

    @pytest.fixture(autouse=True)
    def place(self, request: pytest.FixtureRequest) -> None:
        self.url = new_place(request.getfixturevalue(self.server), self.engine)

    def make(self) -> Store:
        return S3Store(self.url, writable=True)


class TestRgwByObstore(OverS3):
    server, engine = "rgw", "obstore"


class TestRgwByS3fs(OverS3):
    server, engine = "rgw", "s3fs"


def on_azure(server: Azurite) -> str:
    """Return the URL of a run in a new container."""
    place = f"az://{server.make_bucket(f'bucket-{next(_names)}')}/some/run"
    remember_options(place, server.storage_options)
    return place


def on_google() -> str:
    """Return the URL of a run in a new bucket on a running testbench."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud.storage import Client

    where = os.environ.get("STORAGE_EMULATOR_HOST")
    if not where:
        pytest.skip("Google's storage testbench is not a package: start one and set STORAGE_EMULATOR_HOST")
    bucket = f"bucket-{os.getpid()}-{next(_names)}"
    Client(project="test", credentials=AnonymousCredentials()).create_bucket(bucket)
    remember_options(f"gs://{bucket}/some/run", {"endpoint_url": where, "token": "anon", "project": "test"})
    return f"gs://{bucket}/some/run"


class ByDriver(StoreTests):
    """fsspec's driver of a cloud that supports conditional creation."""

    many = 300

    def make(self) -> Store:
        return RemoteStore(self.url, writable=True)


class TestAzure(ByDriver):
    @pytest.fixture(autouse=True)
    def place(self, azurite: Azurite) -> None:
        self.url = on_azure(azurite)


class TestGoogle(ByDriver):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.url = on_google()


# -- one name, one creator --


def test_negative_control_race_without_conditions(rclone: Rclone) -> None:
    """On a store that ignores conditions, the race above has several winners."""

    async def work(store: Store) -> None:
        tries = [store.put("log/0.json", b"%d" % i * 200, create=True) for i in range(16)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(result is None for result in results) > 1

    using(new_place(rclone), work)


def test_store_that_ignores_conditions_is_rejected(rclone: Rclone) -> None:
    """A run on a server that ignores conditions is rejected each time with the reason. Existing objects are
    unchanged."""
    empty, used = new_place(rclone), new_place(rclone)

    async def refused(store: Store) -> None:
        with pytest.raises(StoreError, match="an object can be created twice") as caught:
            await create_run(store)
        assert store.url in str(caught.value) and not caught.value.retryable

    async def fresh(store: Store) -> None:
        await refused(store)
        await refused(store)
        assert await keys(store) == []

    async def old(store: Store) -> None:
        """Check a run that was copied to the store."""
        await store.put("FORMAT.json", new_format("0" * 32))
        await store.put("log/000000000000.json", b"a record")
        before = {key: bytes(await store.get(key)) for key in await keys(store)}
        await refused(store)
        assert {key: bytes(await store.get(key)) for key in await keys(store)} == before

    using(empty, fresh)
    using(used, old)


@pytest.mark.parametrize("kind", MISFITS)
def test_unsuitable_server_is_rejected_by_name(kind: type[Misfit]) -> None:
    """Real servers that ignore conditions or ranges are rejected when the training opens them. The error has the URL
    and the missing guarantee, and nothing is left there."""
    with kind() as server:
        before = server.left()
        place = f"{server.scheme}://{server.bucket}/run"
        tier = ckpt.Tier(place, every=1, storage_options=server.storage_options)
        with pytest.raises(StoreError, match=f"^{place}.* cannot store a run, because it does not ") as caught:
            with ckpt.Checkpointer(toy.build(), [tier], triggers=[], memory=ckpt.Memory(linger_s=0)) as cp:
                cp.restore(default=0)
        assert not caught.value.retryable
        assert server.left() == before


def test_negative_control_suitable_servers_are_accepted(rgw: Rgw, moto: MotoServer) -> None:
    """The same call succeeds, twice, on servers that honor conditions."""
    for server in (rgw, moto):

        async def work(store: Store) -> None:
            await create_run(store)
            await create_run(store)

        using(new_place(server), work)


# -- a run --


LARGE = inside.Contents.of({"w": ("F32", (40 * MIB // 4,)), "m": ("F32", (9 * MIB // 4 + 77,)), "step": ("F32", (1,))})
"""Several parts of an upload, and an odd rest."""


def content(of: inside.Contents, step: int) -> bytes:
    return random.Random(step).randbytes(of.size)


async def save(job: inside.Job, step: int, of: inside.Contents) -> None:
    await job.save(step, of, content(of, step), [None])


DIE = """
import asyncio, json, os, signal, sys
from ckpt.store import remember_options
from ckpt_backends.s3 import S3Store

async def main(url, options):
    remember_options(url, json.loads(options))
    store = S3Store(url, writable=True)
    target = await store.upload("KEY", size=64 << 20)
    await target.write_at(0, memoryview(bytes(target.part)))
    while not await store.unfinished():
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1], sys.argv[2]))
""".replace("KEY", data_key(checkpoint_id(50, 9)))


@pytest.mark.parametrize("engine", ENGINES)
def test_run_is_saved_restored_and_retired(rgw: Rgw, engine: str) -> None:
    """Write, commit, read back by another job and retire. The upload of a killed process is dropped, and only the
    files that the checkpoints need remain."""
    place = new_place(rgw, engine)

    async def train(store: Store) -> None:
        job = await inside.Job.open(store)
        for step in (10, 20, 30, 40):
            await save(job, step, LARGE)

    async def come_back(store: Store) -> None:
        assert await inside.checked_steps(store) == [10, 20, 30, 40]
        found = await inside.read_back(store)
        assert (found.step, found.data) == (40, content(LARGE, 40))

    async def tidy(store: Store) -> None:
        assert await (await inside.Job.open(store)).clean_up(last=2) == [10, 20]
        assert {step_of(key) for key in select(await keys(store))} == {30, 40}
        assert (await inside.read_back(store)).data == content(LARGE, 40)

    async def sweep(store: Store) -> None:
        assert await store.drop_uploads(lambda key: True) == 0
        assert await store.drop_uploads(lambda key: False) == 1

    using(place, train)
    using(place, come_back)
    assert killed(run_script(DIE, place, json.dumps(options_of(place))))
    assert unfinished(rgw, place) == 1
    using(place, tidy)
    assert unfinished(rgw, place) == 1, "retention does not drop uploads, which others may be writing"
    using(place, sweep)
    assert unfinished(rgw, place) == 0


def test_negative_control_changed_byte_is_detected(rgw: Rgw) -> None:
    """If one bit of a data file changes in the bucket, a restore fails and names the file."""

    async def work(store: Store) -> None:
        await save(await inside.Job.open(store), 1, LARGE)
        (key,) = select(await keys(store), DATA)
        data = bytearray(await store.get(key))
        data[-5] ^= 1
        await store.put(key, data)
        with pytest.raises(NoCheckpointError, match=key):
            await inside.read_back(store)
        assert await inside.problems_in(store, 1) != []

    using(new_place(rgw), work)


@pytest.mark.parametrize("engine", ENGINES)
def test_run_survives_network_faults(rgw: Rgw, engine: str) -> None:
    """After 503 responses, resets and lost replies, the run is still complete, with each commit once."""
    with FaultProxy(rgw.url) as proxy:

        async def work(store: Store) -> None:
            job = await inside.Job.open(store)
            proxy.fail("status", method="PUT", match=pattern(DATA), skip=1, count=1)
            proxy.fail("reset", method="PUT", match=pattern(DATA), skip=1, count=1)
            proxy.fail("lost_reply", method="PUT", match="log/", count=1)
            proxy.fail("lost_reply", method="PUT", match=pattern(MANIFEST), count=1)
            await save(job, 1, LARGE)
            assert {kind for _, _, kind in proxy.hits()} == {"status", "reset", "lost_reply"}
            assert job.steps == [1]
            proxy.fail("truncate", method="GET", match=pattern(DATA), count=1, after=1000)
            proxy.fail("status", method="GET", match=pattern(DATA), count=1)
            assert (await inside.read_back(store)).data == content(LARGE, 1)

        using(new_place(rgw, engine, url=proxy.url), work)


@pytest.mark.parametrize("engine", ENGINES)
def test_training_restores_from_the_bucket_alone(rgw: Rgw, engine: str, tmp_path: Path) -> None:
    """A run is saved to a folder and a bucket, and the folder is deleted. The URL alone is enough to restore every bit
    of the newest step. Older steps are retired, and no upload is unfinished."""
    place = new_place(rgw, engine)
    state, folder = toy.build(), tmp_path / "run"
    far = ckpt.Tier(place, every=2, keep=2, storage_options=options_of(place), reader_grace_s=0)
    with ckpt.Checkpointer(state, [ckpt.Tier(str(folder), every=1), far]) as cp:
        cp.restore(default=0)
        for step in range(1, 13):
            toy.train_step(state)
            save = cp.step(step)
            assert save is not None
            save.wait_durable(60, tier="all")
    expected = toy.digest(state)
    shutil.rmtree(folder)
    again = toy.build(seed=9)
    with ckpt.Checkpointer(again, [far]) as cp:
        assert cp.restore() == 12
        assert cp.last_restore is not None and cp.last_restore.tier == place
        assert toy.digest(again) == expected
    assert unfinished(rgw, place) == 0
    assert len(select(inside.file_names(place), DATA)) <= 3


@pytest.mark.parametrize("cloud", ["azure", "google"])
def test_training_restores_from_other_clouds(cloud: str, request: pytest.FixtureRequest) -> None:
    """A run has only memory and a container, and the memory is lost. The URL alone is enough to restore the newest
    step. Retired steps are gone, and the others are intact."""
    place = on_azure(request.getfixturevalue("azurite")) if cloud == "azure" else on_google()
    state = toy.build()
    far = ckpt.Tier(place, every=2, keep=2, storage_options=options_of(place), reader_grace_s=0, full_every=1)
    for first, last in ((1, 6), (7, 12)):
        with ckpt.Checkpointer(state, [far], memory=ckpt.Memory(linger_s=0)) as cp:
            assert cp.restore(default=0) == first - 1
            for step in range(first, last + 1):
                toy.train_step(state)
                save = cp.step(step)
                if step % 2 == 0:
                    assert save is not None
                    save.wait_durable(60)
        expected, state = toy.digest(state), toy.build(seed=last)
    with ckpt.Checkpointer(state, [far], memory=ckpt.Memory(linger_s=0)) as cp:
        assert cp.restore() == 12
        assert cp.last_restore is not None and cp.last_restore.tier == place
    assert toy.digest(state) == expected

    assert inside.steps_at(place)[:2] == [12, 10] and len(inside.history(place)) < 6
    assert inside.problems_at(place) == []
    assert not [key for key in inside.file_names(place) if key.startswith("doctor-")]


# -- the servers themselves --


def test_servers_end_with_their_test() -> None:
    """A killed test leaves no server behind, and the next server deletes its folder. A normal stop also deletes the
    folder."""
    code = """
import os, signal
from servers import Rclone
server = Rclone()
print(server.folder, *server.pids(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = run_script(code)
    assert killed(result), result.stderr
    left, *fields = result.stdout.split()
    pids = [int(field) for field in fields]
    assert pids and eventually(lambda: not any(map(psutil.pid_exists, pids)))
    with Rclone() as server:
        assert not Path(left).exists()
        pids = server.pids()
        assert all(map(psutil.pid_exists, pids)) and server.folder.exists()
    assert not any(map(psutil.pid_exists, pids)) and not server.folder.exists()


def test_missing_server_raises_an_error() -> None:
    """A missing server is not a skip: the error explains how to install it."""
    with pytest.raises(NotInstalledError, match="make test-s3"):
        find("no-such-server")


# -- helpers --


def using(place: str, work: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        store = open_store(place, writable=True)
        try:
            await work(store)
        finally:
            await store.aclose()

    asyncio.run(main())


def unfinished(server: Server, place: str) -> int:
    """Return the number of unfinished uploads, as the server reports it."""
    bucket = place.removeprefix("s3://").partition("/")[0]
    return len(server.client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))
