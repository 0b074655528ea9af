"""What torch's flight recorder says of this process: collectives that it has called and that have not ended.

Where NCCL does them a rank waits for one wherever it next needs a result, so its stack does not say in which. The
recorder is torch's own (`TORCH_FR_BUFFER_SIZE`, in older versions `TORCH_NCCL_TRACE_BUFFER_SIZE`; 0 turns it off) and
notes the calls of every process group. It is asked for JSON, since its other form is a pickle.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from ckpt.faults.hang import Collective

NAMES = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of every backend, and of NCCL alone
ASK_S = 1.0  # its lock may be held by a thread that hangs
MOST = 8  # of which are told


def pending() -> tuple[Collective, ...]:
    """The collectives under way, the oldest first; () where nothing is known. Waits for a second at most."""
    found: list[Collective] = []
    asking = threading.Thread(target=lambda: found.extend(_ask()), name="ckpt-recorder", daemon=True)
    asking.start()
    asking.join(ASK_S)
    return tuple(found[:MOST])


def _ask() -> list[Collective]:
    import torch

    binding = getattr(torch._C, "_distributed_c10d", None)
    dump = next((one for name in NAMES if (one := getattr(binding, name, None)) is not None), None)
    try:
        return [] if dump is None else parse(dump(includeCollectives=True, onlyActive=True))
    except Exception:  # another version's, or a communicator that was taken apart: a report may do without
        return []


def parse(dump: bytes) -> list[Collective]:
    """Of a dump, the oldest first. ValueError, KeyError or TypeError for what is none."""
    entries = json.loads(dump)["entries"]
    waiting = [one for one in entries if not one["retired"] and one["state"] != "completed"]
    return [_collective(one) for one in sorted(waiting, key=lambda one: int(one["record_id"]))]


def _collective(entry: dict[str, Any]) -> Collective:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    return Collective(operation.lstrip("_"), int(number), str(entry["process_group"][1]), str(entry["state"]))
