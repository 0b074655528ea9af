"""Several machines: two nodes with separate disks, sockets and addresses, and a network that can be cut.

A node is a process in its own namespaces (network, mounts, host name, processes), made with `unshare` and `ip`, so
these tests need root. FOLDER/local differs between the nodes; FOLDER/shared is the same. Each job is started by
torchrun on each node, and the nodes meet by torch's own rendezvous.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import inside
from processes import PYTHONPATH, REPO, eventually, nsenter, start_python
from run_files import data_files, manifests, ranks_in

TOY = REPO / "tests" / "lib" / "node_toy.py"
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}

# Its first process is a shell that waits for the end of its input, which comes with the end of the test at the latest;
# with it everything on the node ends.
BOOT = """
set -e
hostname node-{name}
mount --bind {disk} {folder}/local
mount --bind {sockets} {folder}/sockets
mount --bind {folder}/hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf
ip link set lo up
echo ready
cat
"""


class Node:
    """One machine. Its disk outlives it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.address = name, folder, ADDRESSES[name]
        self.disk = folder / f"disk-{name}"
        self.agents: list[subprocess.Popen[bytes]] = []

    def boot(self) -> None:
        sockets = self.folder / f"sockets-{self.name}"
        shutil.rmtree(sockets, ignore_errors=True)
        sockets.mkdir(mode=0o700)
        self.disk.mkdir(exist_ok=True)
        script = BOOT.format(name=self.name, disk=self.disk, sockets=sockets, folder=self.folder)
        spaces = ["--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        self.keeper = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.keeper.stdout is not None
        if self.keeper.stdout.readline() != "ready\n":
            self.keeper.kill()
            raise OSError("this machine does not let us make namespaces")
        (first,) = psutil.Process(self.keeper.pid).children()
        self.first = first.pid

    def inside(self, *words: object) -> list[str]:
        """A command line that runs there."""
        return nsenter(self.first, *words)

    def do(self, *words: object) -> None:
        subprocess.run(self.inside(*words), check=True, timeout=30)

    def join(self, other: Node) -> None:
        """A cable between two nodes."""
        here = ["nsenter", "--target", str(self.first), "--net", "ip", "link", "add", "eth0"]  # sees the other's number
        subprocess.run([*here, "type", "veth", "peer", "name", "eth0", "netns", str(other.first)], check=True)
        for node in (self, other):
            node.do("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
            node.do("ip", "link", "set", "eth0", "up")

    def network(self, state: str) -> None:
        """Set the network `up` or `down`."""
        self.do("ip", "link", "set", "eth0", state)

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Return the processes there whose command line contains `word`."""
        space, found = os.readlink(f"/proc/{self.first}/ns/pid"), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                started = mine and process.pid != self.first and process.name() != "cat"
                if started and any(word in each for each in process.cmdline()):
                    found.append(process)
        return found

    def kill(self, word: str) -> None:
        processes = self.processes(word)
        ending = [inside.process_of(process.pid) for process in processes]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert eventually(lambda: not any(process.alive for process in ending))

    def die(self) -> None:
        """Kill all processes of the node; its disk stays."""
        self.keeper.kill()
        self.keeper.communicate()
        assert eventually(lambda: not os.path.exists(f"/proc/{self.first}/ns/pid"))


class Job:
    """One start of the toy on some of the nodes."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        nodes: list[Node],
        words: list[str],
        *,
        fails: dict[str, str] | None = None,
        ranks: int = 2,
        **settings: Any,
    ) -> None:
        """`fails`: what the processes of a node are armed with; `ranks`: of each node; the rest is for the toy."""
        self.cluster, self.name, self.nodes, self.world = cluster, name, nodes, ranks * len(nodes)
        toy = json.dumps({"folder": str(cluster.folder), "job": name, "words": words, **settings})
        cluster.port += 1
        for node in nodes:
            agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", len(nodes)]
            agent += ["--nproc-per-node", ranks, "--rdzv-backend", "c10d", "--rdzv-id", name]
            agent += ["--rdzv-endpoint", f"{nodes[0].address}:{cluster.port}", "--local-addr", node.address]
            agent += ["--rdzv-conf", f"is_host={int(node is nodes[0])},join_timeout=60", "--max-restarts", 0]
            environment = {
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "CKPT_RUNTIME_DIR": str(cluster.folder / "sockets"),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "passive",
                "CKPT_FAIL": (fails or {}).get(node.name, ""),
            }
            self.output = (cluster.folder / f"{name}.{node.name}.log").open("ab")
            pipes = {"stdout": self.output, "stderr": self.output}
            process = start_python([*map(str, agent), TOY, toy], inside=node.first, env=environment, **pipes)
            node.agents.append(process)
            cluster.agents.append(process)
        self.agents = cluster.agents[-len(nodes) :]

    def said(self, rank: int) -> list[dict[str, Any]]:
        path = self.cluster.folder / "reports" / f"{self.name}.{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def all(self, what: str, **fields: Any) -> list[list[dict[str, Any]]]:
        """Return all reports of this kind by each rank."""
        wanted = {"what": what, **fields}.items()
        return [[one for one in self.said(rank) if wanted <= one.items()] for rank in range(self.world)]

    def wait(self, what: str, *, count: int = 1, timeout_s: float = 90.0, **fields: Any) -> None:
        """Wait until all ranks have sent this report `count` times."""

        def come() -> bool:
            assert all(agent.poll() in (None, 0) for agent in self.agents), self.log()
            return all(len(found) >= count for found in self.all(what, **fields))

        assert eventually(come, timeout_s), f"no {what!r} {fields}: {self.log()}"

    def end(self, timeout_s: float = 90.0) -> None:
        """Wait for all of it."""
        for agent in self.agents:
            assert agent.wait(timeout_s) == 0, self.log()

    def kill(self) -> None:
        """Agents and trainers; the writers live on."""
        threads = [threading.Thread(target=node.kill, args=(TOY.name,)) for node in self.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for agent in self.agents:
            agent.wait(30)

    def log(self) -> str:
        paths = sorted(self.cluster.folder.glob(f"{self.name}.?.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in paths)

    def started(self) -> list[dict[str, Any]]:
        return [found[0] for found in self.all("started")]

    def steps(self) -> list[dict[int, tuple[str, dict[str, str]]]]:
        """Return for each rank and step the digest of its state, and for each model the digest over all ranks."""
        return [
            {one["start"]: (one["mine"], one["whole"]) for one in self.all("started")[rank]}
            | {one["step"]: (one["mine"], one["whole"]) for one in self.all("step")[rank]}
            for rank in range(self.world)
        ]


class Cluster:
    """Two nodes and what they share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.jobs = folder, 29400, 0
        self.agents: list[subprocess.Popen[bytes]] = []
        for name in ("local", "sockets", "shared", "reports"):
            (folder / name).mkdir()
        names = [f"{address} node-{name}\n" for name, address in ADDRESSES.items()]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        self.a, self.b = Node("a", folder), Node("b", folder)
        self.a.boot()
        self.b.boot()
        self.a.join(self.b)

    def start(self, *words: str, nodes: str = "ab", **settings: Any) -> Job:
        self.jobs += 1
        return Job(self, f"job{self.jobs}", [getattr(self, name) for name in nodes], list(words), **settings)

    def replace(self, node: Node) -> None:
        """The machine is lost, its disk too; another one gets its name and address."""
        node.die()
        shutil.rmtree(node.disk)
        self.reboot(node)

    def reboot(self, node: Node) -> None:
        """A machine that went down comes up again, with its disk."""
        node.boot()
        self.a.join(self.b)

    def exchange_addresses(self) -> None:
        """Ranks are numbered by address: the first ones are now on the other node."""
        self.a.address, self.b.address = self.b.address, self.a.address
        self.a.do("ip", "link", "del", "eth0")
        self.a.join(self.b)

    def roots(self) -> dict[str, inside.LogView]:
        """Return the contents of the log of each tier."""
        places = {"a": self.a.disk, "b": self.b.disk, "shared": self.folder / "shared"}
        return {name: inside.log_at(path / "run") for name, path in places.items() if (path / "run").exists()}

    def close(self) -> None:
        for node in (self.a, self.b):
            with contextlib.suppress(AttributeError):
                node.keeper.kill()
                node.keeper.communicate()
        for agent in self.agents:
            agent.kill()
            agent.wait(30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two new machines for each test."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"only root can make namespaces ({', '.join(missing) or 'no tool'} missing)")
    try:
        made = Cluster(tmp_path)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no namespaces here: {error}")
    yield made
    made.close()


def records(root: Path) -> list[tuple[str, str]]:
    """(type, attempt) of all records of a log that are about one attempt."""
    found = [json.loads(path.read_text()) for path in sorted((root / "run" / "log").iterdir())]
    return [(one["type"], one["body"]["checkpoint"]) for one in found if "checkpoint" in one["body"]]


def check_saved(job: Job, steps: set[int]) -> None:
    """Check that all ranks were notified that these steps are committed in the local root."""
    for rank, found in enumerate(job.all("saved")):
        assert [one for one in found if one["error"]] == [], f"rank {rank}"
        assert {one["step"] for one in found if one["tier"] == "local"} == steps, f"rank {rank}"


def check_started(job: Job, step: int, tier: str, before: Job, *, resharded: bool = False) -> None:
    """All ranks went on from this step, in this tier, with the bits that `before` had."""
    for rank, one in enumerate(job.started()):
        assert one["start"] == step, (rank, one)
        assert one["tier"] == "memory" if tier == "memory" else Path(one["tier"]).parent.name == tier, (rank, one)
        own, whole = before.steps()[0 if resharded else rank][step]
        assert one["whole"] == whole, f"rank {rank} has other tensors than at step {step}"
        assert resharded or one["mine"] == own, f"rank {rank} is not what it was at step {step}"


def data_size(root: Path, step: int) -> int:
    """Return the bytes of tensors of a step in a tier."""
    parts = [json.loads(path.read_text()) for path in manifests(root / "run", step)]
    return sum(file["size"] - file["header_size"] for part in parts for file in part["files"])


def check_local_disks(cluster: Cluster, job: Job, steps: list[int]) -> None:
    """Each node's log committed the parts of its own ranks, and its disk has no part of the other node's ranks."""
    roots = cluster.roots()
    check_saved(job, set(steps))
    assert roots["a"].steps[-len(steps) :] == roots["b"].steps[-len(steps) :] == steps
    for node, ranks in ((cluster.a, (0, 1)), (cluster.b, (2, 3))):
        state, said = roots[node.name], records(node.disk)
        assert set(state.ranks.values()) == {ranks}
        assert ranks_in(node.disk / "run") == set(ranks)
        committed = [text for kind, text in said if kind == "COMMIT"]
        assert len(committed) == len(set(committed)) and {int(text[:9]) for text in committed} >= set(steps)
    assert all(ranks == (0, 1, 2, 3) for ranks in roots["shared"].ranks.values())


def test_two_nodes_lose_one_thing_after_another(cluster: Cluster) -> None:
    """After a clean end, a kill and the loss of a node, all ranks continue from the nearest tier with the files of
    every rank: the disks of both nodes, their memory, and the shared folder."""
    a, b = cluster.a, cluster.b
    first = cluster.start("train 4", "close")
    first.end()
    assert [one["nodes"] for one in first.started()] == [[0, 0, 1, 1]] * 4
    assert [one["node"] for one in first.started()] == ["node-a", "node-a", "node-b", "node-b"]
    check_local_disks(cluster, first, [1, 2, 3, 4])
    assert cluster.roots()["shared"].steps == [4]
    assert eventually(lambda: a.processes() == b.processes() == []), "a process is left"

    size = data_size(a.disk, 4) + data_size(b.disk, 4)
    second = cluster.start("train 3", "hang")
    second.wait("hangs")
    check_started(second, 4, "local", first)
    check_local_disks(cluster, second, [5, 6, 7])
    assert [one["local_ranks"] for one in second.started()] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert sum(one["nbytes"] for one in second.started()) >= size, "a byte was not read at all"
    assert all(one["nbytes_received"] for one in second.started()), "the other node's disk has what is missing here"
    second.kill()

    third = cluster.start("train 3", "hang")
    third.wait("hangs")
    check_started(third, 7, "memory", second)
    check_local_disks(cluster, third, [8, 9, 10])
    assert all(one["nbytes_received"] for one in third.started())
    digests = [one[1] for job in (first, second, third) for one in job.steps()[0].values()]
    for mode in ("ddp", "fsdp"):
        assert len({digest[mode] for digest in digests}) == 11, "a digest does see what a step changes"

    cluster.replace(a)  # with rank 0, which coordinates most work
    third.kill()
    assert b.processes(inside.WRITER), "part of the newest step is still in memory"
    fourth = cluster.start("train 3", "close")
    fourth.end()
    check_started(fourth, 8, "shared", third)
    check_local_disks(cluster, fourth, [9, 10, 11])
    # DDP sums gradients in another order in its first iteration, so it is not bound to do the same again.
    before, after = third.steps()[0], fourth.steps()[0]
    assert [before[step][1]["fsdp"] for step in (9, 10)] == [after[step][1]["fsdp"] for step in (9, 10)]


@pytest.mark.long
def test_a_node_is_rebooted(cluster: Cluster) -> None:
    """Its memory is lost but not its disk: all ranks continue from the newest step on both disks."""
    first = cluster.start("train 5", "rush 2", "hang", local_every=5)
    first.wait("hangs")
    cluster.b.die()
    cluster.reboot(cluster.b)
    first.kill()
    second = cluster.start("train 5", "close", local_every=5)
    second.end()
    check_started(second, 5, "local", first)
    check_saved(second, {10})
    roots = cluster.roots()
    assert roots["a"].steps == roots["b"].steps == [5, 10]


@pytest.mark.long
@pytest.mark.parametrize("left", ["memory", "local"])
def test_nodes_change_places(cluster: Cluster, left: str) -> None:
    """Each node has the parts of ranks that are now on the other one; what is read is passed on."""
    a, b = cluster.a, cluster.b
    first = cluster.start("train 3", "hang")
    first.wait("hangs")
    first.kill()
    if left == "local":
        a.die()
        b.die()
        a.disk, b.disk = b.disk, a.disk
        a.boot()
        cluster.reboot(b)
    else:
        cluster.exchange_addresses()
    second = cluster.start("train 3", "close")
    second.end()
    check_started(second, 3, left, first)
    check_saved(second, {4, 5, 6})
    roots = cluster.roots()
    assert roots["a"].steps == roots["b"].steps


@pytest.mark.long
@pytest.mark.parametrize("left", ["memory", "local"])
def test_fewer_ranks_on_each_node(cluster: Cluster, left: str) -> None:
    """One rank takes over what two had on its node, and gets the rest from the other node; and back again."""
    first = cluster.start("train 3", "hang")
    first.wait("hangs")
    first.kill()
    if left == "local":
        for node in (cluster.a, cluster.b):
            node.kill("")
    second = cluster.start("train 3", "hang", ranks=1)
    second.wait("hangs")
    check_started(second, 3, left, first, resharded=True)
    check_saved(second, {4, 5, 6})
    second.kill()
    third = cluster.start("train 1", "close")
    third.end()
    check_started(third, 6, "memory", second, resharded=True)
    check_saved(third, {7})


@pytest.mark.parametrize("both_have_it", [True, pytest.param(False, marks=pytest.mark.long)])
def test_killed_after_one_node_committed(cluster: Cluster, both_have_it: bool) -> None:
    """A step that one node committed is restored if the other disk has its parts too, and never otherwise.

    The writers of node b stand still: after they wrote their parts and before their commit, or before they wrote any.
    """
    stop, words = (
        ("index.stored:stop:1", ["rush 1"]) if both_have_it else ("data_file.opened:stop:2", ["train 1", "rush 1"])
    )
    first = cluster.start(*words, "hang", fails={"b": f"writer/{stop}"}, shared_every=1000)
    first.wait("hangs")
    assert eventually(lambda: len(cluster.roots()["a"].steps) == len(words))

    def stopped() -> list[psutil.Process]:
        return [p for p in cluster.b.processes(inside.WRITER) if p.status() == psutil.STATUS_STOPPED]

    assert eventually(lambda: bool(stopped()))
    assert len(cluster.roots()["b"].steps) == len(words) - 1
    checkpoint = records(cluster.a.disk)[-1][1]
    for node in (cluster.a, cluster.b):
        node.kill("")
    second = cluster.start("train 4", "close", shared_every=1000)
    second.end()
    check_started(second, 1, "local", first)
    assert (("COMMIT", checkpoint) in records(cluster.b.disk)) == both_have_it
    check_saved(second, {2, 3, 4, 5})
    roots = cluster.roots()
    assert roots["a"].steps[-4:] == roots["b"].steps[-4:] == [2, 3, 4, 5]


def test_node_keeps_the_newest_common_step_while_the_other_is_slow(cluster: Cluster) -> None:
    """A node whose disk is ahead does not delete the newest step that both nodes have, even with `keep=2`.

    The writers of node b stand still, so the job restarts from that step, and the newer steps get new ids.
    """
    words = ["train 2", "pause slow", "rush 2", "hang"]
    first = cluster.start(*words, shared_every=1000, local_keep=2)
    first.wait("paused", name="slow")
    for process in cluster.b.processes(inside.WRITER):
        process.suspend()
    (cluster.folder / "slow").touch()
    first.wait("hangs")
    assert eventually(lambda: cluster.roots()["a"].steps == [2, 3, 4])
    assert cluster.roots()["b"].steps == [1, 2]
    for node in (cluster.a, cluster.b):
        node.kill("")
    undone = {text for _, text in records(cluster.a.disk) if int(text[:9]) > 2}
    second = cluster.start("train 4", "close", shared_every=1000, local_keep=2)
    second.end()
    check_started(second, 2, "local", first)
    check_saved(second, {3, 4, 5, 6})
    roots = cluster.roots()
    assert roots["a"].steps[-2:] == roots["b"].steps[-2:] == [5, 6]
    assert not undone & roots["a"].ranks.keys(), "steps that node b does not have are deleted in the end"


@pytest.mark.long
@pytest.mark.parametrize("away", [False, True])
def test_a_node_does_not_undo_a_rollback(cluster: Cluster, away: bool) -> None:
    """Steps after the step of a rollback stay undone, even if one disk missed the rollback.

    Either that node was away while the other rolled back alone, or both were there.
    """
    first = cluster.start("train 6", *([] if away else ["restore 4"]), "hang")
    first.wait("hangs")
    for node in (cluster.a, cluster.b):
        node.kill("")
    if away:
        alone = cluster.start("hang", nodes="a")
        alone.wait("hangs")
        check_started(alone, 4, "shared", first, resharded=True)
        cluster.a.kill("")
    second = cluster.start("train 2", "close")
    second.end()
    assert [one["start"] for one in second.started()] == [4] * 4
    check_saved(second, {5, 6})
    third = cluster.start("close")
    third.end()
    check_started(third, 6, "local", second)


@pytest.mark.long
def test_network_is_cut_while_saving(cluster: Cluster) -> None:
    """A short cut is not noticed. During a long one, each node commits its parts, and no save is reported as durable.

    The shared tier does not use this network, so its checkpoints are committed. After a restart all of them exist.
    """
    first = cluster.start("train 2", "pause short", "save", "pause long", "save", "hang", busy_timeout_s=10.0)
    first.wait("paused", name="short")
    cluster.b.network("down")
    (cluster.folder / "short").touch()
    assert eventually(lambda: cluster.roots()["a"].steps == cluster.roots()["b"].steps == [1, 2, 3])
    cluster.b.network("up")
    first.wait("paused", name="long")
    check_saved(first, {1, 2, 3})
    cluster.b.network("down")
    (cluster.folder / "long").touch()
    first.wait("hangs")
    for found in first.all("saved", step=4):
        outcome = {one["tier"]: one for one in found}
        assert outcome["shared"]["error"] is None
        assert "other nodes" in outcome["local"]["error"]
    roots = cluster.roots()
    assert roots["a"].steps == roots["b"].steps == [1, 2, 3, 4], "a node keeps what the other may have too"
    first.kill()
    cluster.b.network("up")
    second = cluster.start("train 1", "close")
    second.end()
    assert [(one["start"], one["tier"]) for one in second.started()] == [(4, "memory")] * 4
    check_saved(second, {5})
    roots = cluster.roots()
    assert roots["a"].steps == roots["b"].steps and 4 in roots["a"].steps


def test_one_disk_fails(cluster: Cluster) -> None:
    """A step that one node could not write fails on all ranks, in time; the other disk does not keep it; later ones do.

    One rank of node b has no space for step 2.
    """
    job = cluster.start("train 4", "close", fails={"b": "writer/data_file.written:enospc:2"}, busy_timeout_s=10.0)
    job.end()
    for rank, found in enumerate(job.all("saved")):
        errors = {one["step"]: one["error"] for one in found if one["tier"] == "local"}
        assert errors.pop(2), f"rank {rank}"
        assert errors == {1: None, 3: None, 4: None}, f"rank {rank}"
    roots = cluster.roots()
    assert roots["a"].steps == roots["b"].steps == [1, 3, 4]
    second = cluster.start("close")
    second.end()
    check_started(second, 4, "local", job)


@pytest.mark.long
def test_a_full_disk_does_not_fill_the_other(cluster: Cluster) -> None:
    """A step that one node cannot write is deleted on the other node too. Once there is space, saves succeed again."""
    local, full = cluster.folder / "local", cluster.folder / "local" / "rubbish"
    cluster.b.do("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", local)
    words = ["train 2", "pause full", "train 8", "pause empty", "train 3", "close"]
    job = cluster.start(*words, busy_timeout_s=4.0, shared_every=1000)
    job.wait("paused", name="full")
    cluster.b.do("rm", local / "run" / ".reserve")  # otherwise this room is used first
    subprocess.run(cluster.b.inside("dd", "if=/dev/zero", f"of={full}"), stderr=subprocess.DEVNULL, check=False)
    (cluster.folder / "full").touch()
    job.wait("paused", name="empty", timeout_s=150)
    for rank, found in enumerate(job.all("saved")):
        assert [one["step"] for one in found if one["error"]] == list(range(3, 11)), f"rank {rank}"
    assert eventually(lambda: cluster.roots()["a"].steps == [1, 2])
    assert eventually(lambda: len(data_files(cluster.a.disk / "run")) <= 2 * 3)
    cluster.b.do("rm", full)
    (cluster.folder / "empty").touch()
    job.end()
    for found in job.all("saved"):
        assert {one["step"]: one["error"] for one in found if one["step"] > 10} == {11: None, 12: None, 13: None}
    assert cluster.roots()["a"].steps[-3:] == [11, 12, 13]


@pytest.mark.long
def test_writers_die_all_the_time(cluster: Cluster) -> None:
    """Whichever writer dies, at any moment: the next one continues, and every step is committed on both disks."""
    job = cluster.start("train 30", "close", shared_every=5)
    rng = random.Random(1)
    deaths = dict.fromkeys([(node.name, place) for node in (cluster.a, cluster.b) for place in (0, 1)], 0)
    job.wait("step")
    while min(deaths.values()) < 3 and not job.all("closed")[0]:
        node = rng.choice([cluster.a, cluster.b])
        for process in node.processes(inside.WRITER):
            place = int(process.cmdline()[3]) % 2  # "ckpt-writer RUN rank N KEY"
            if deaths[node.name, place] < 3 and rng.random() < 0.5:
                deaths[node.name, place] += 1
                process.kill()
        time.sleep(rng.random())
    job.end(timeout_s=150)
    assert sum(deaths.values()) > 4
    check_saved(job, set(range(1, 31)))
    roots = cluster.roots()
    assert roots["a"].steps[-4:] == roots["b"].steps[-4:] == [27, 28, 29, 30]
    assert max(len(roots[name].steps) for name in "ab") <= 6


@pytest.mark.long
def test_negative_control_a_shared_disk_has_all_parts(cluster: Cluster) -> None:
    """If both nodes have the same disk, one of them commits there immediately, and the checks above fail."""
    cluster.a.die()
    cluster.b.die()
    cluster.b.disk = cluster.a.disk
    cluster.a.boot()
    cluster.reboot(cluster.b)
    job = cluster.start("train 2", "close")
    job.end()
    assert [kind for kind, _ in records(cluster.a.disk)] == ["COMMIT", "COMMIT"]
    assert ranks_in(cluster.a.disk / "run") == {0, 1, 2, 3}
    with pytest.raises(AssertionError):
        check_local_disks(cluster, job, [1, 2])


@pytest.mark.long
def test_second_copies_of_memory(cluster: Cluster) -> None:
    """With `replicas=2` each node has the snapshots of all ranks, and the loss of a node loses no step."""
    settings = {"replicas": 2, "local_every": 1000, "shared_every": 1000}
    first = cluster.start("rush 3", "copies", "hang", **settings)
    first.wait("hangs")
    assert [found[0]["ranks"] for found in first.all("copies", step=3)] == [[0, 1, 2, 3]] * 4
    cluster.replace(cluster.b)
    cluster.a.kill(TOY.name)
    second = cluster.start("rush 2", "copies", "close", **settings)
    second.end()
    check_started(second, 3, "memory", first)
    assert [found[0]["ranks"] for found in second.all("copies", step=5)] == [[0, 1, 2, 3]] * 4


@pytest.mark.long
def test_negative_control_one_copy_is_lost_with_its_node(cluster: Cluster) -> None:
    """Without `replicas=2` each node has only its own ranks' snapshots, and no rank can restore a step from them."""
    first = cluster.start("train 4", "rush 1", "copies", "hang", local_every=1000)
    first.wait("hangs", timeout_s=150)
    assert [found[0]["ranks"] for found in first.all("copies", step=5)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for node in (cluster.a, cluster.b):
        node.kill("")
    second = cluster.start("close", local_every=1000)
    second.end()
    check_started(second, 4, "shared", first)
