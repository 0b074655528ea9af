"""Number of agreements of ranks in open and restore. Every rank waits for the slowest in each agreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel import free_port, launch

RANK = """
import json, os, sys, torch, torch.distributed as dist
import ckpt
from ckpt.core.ranks.world import World

topics, agree = [], World.agree
def counted(world, topic, *arguments, **settings):
    topics.append(topic)
    return agree(world, topic, *arguments, **settings)
World.agree = counted

tier, what = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8)
torch.nn.init.constant_(model.weight, -1.0)
memory = ckpt.Memory(linger_s=60 if what == "killed" else 0)
cp = ckpt.Checkpointer({"model": model}, ckpt.Tier(tier, every=2), memory=memory)
opening, topics[:] = list(topics), []
step = cp.restore(default=0)
restoring = list(topics)
if what == "killed":
    for step in range(1, 4):
        torch.nn.init.constant_(model.weight, float(step))
        cp.step(step)
    cp.wait(timeout_s=60)
    dist.barrier()
    os._exit(0)
assert (model.weight == float(step)).all()
print(json.dumps({"from": cp.last_restore.tier, "opening": opening, "restoring": restoring}), flush=True)
cp.close()
dist.destroy_process_group()
"""


def ranks(run: Path, what: str) -> list[dict[str, Any]]:
    done = launch(2, RANK, str(run), what, port=free_port())
    assert [one.returncode for one in done] == [0] * 2, "\n".join(one.stderr for one in done)
    return [json.loads(line) for one in done for line in one.stdout.splitlines()]


def test_ranks_agree_once_in_open_and_four_times_in_restore(tmp_path: Path, own_sockets: Path) -> None:
    """The state comes from the memory of killed trainers."""
    ranks(tmp_path / "run", "killed")
    found = ranks(tmp_path / "run", "restore")
    assert len(found) == 2
    for one in found:
        assert one["from"] == "memory" and one["opening"] == ["open"]
        assert one["restoring"] == ["candidates", "place", "fill", "finish"]
