"""Collects the activity of every reachable rank during a hang, and finds the ranks that the others wait for."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from ckpt.core.ipc.messages import Hang, Look
from ckpt.core.ranks.world import World
from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.guard import probe
from ckpt.guard.hang import Collective, Evidence, note_evidence, plain
from ckpt.guard.incidents import FaultCall, Incidents
from ckpt.units import duration

NODES_S = 2.0  # seconds for the other ranks to post their reports
EVIDENCE_S = 5.0


def look_around(call: FaultCall, note: Hang, incidents: Incidents) -> None:
    """Add the evidence and the suspects to the report of a hang."""
    world, client, step = incidents.world, incidents.supervisor.client, incidents.heartbeat.step
    found = dict[int, Evidence]()
    try:
        for data in client.ask(Look("node"), EVIDENCE_S)["evidence"]:
            one = Evidence.from_json(data)
            found[one.rank] = one
    except (CheckpointError, ValueError, KeyError) as error:
        log.warning("cannot inspect the ranks of this node: %s", error)
    if (own := found.get(world.rank)) is not None:
        found[world.rank] = _of_our_own(own)
    if world.size > 1:
        found = _ask_ranks(world, found, step)
    what = f"no step for {duration(note.idle_s)}, usually {duration(note.usual_s)}"
    note_evidence(call.fault, list(found.values()), what)
    call.fault.timings |= note.timings


def _of_our_own(seen: Evidence) -> Evidence:
    """Add the facts that this process alone can find out about itself."""
    frames = probe.own_stack(threading.main_thread().ident or 0)
    pending = recorded() if "torch.distributed" in sys.modules else ()
    waits = probe.collective_of(frames) or (pending[0].operation if pending else "")
    known = replace(seen, stack=frames, collective=plain(waits), pending=pending)
    return Evidence.from_json(known.to_json())


def _ask_ranks(world: World, seen: dict[int, Evidence], step: int) -> dict[int, Evidence]:
    """Collect the reports of other ranks about themselves and their nodes. A rank may be in a collective that only the
    rank itself can report. Ranks that cannot post a report delay the result for `NODES_S` seconds at most."""
    reported: dict[int, Evidence] = {}
    observed: dict[int, Evidence] = {}
    try:
        mailbox = world.mailbox()
        mailbox.put(f"hang/{step}/{world.rank}", [one.to_json() for one in seen.values()])
        end = time.monotonic() + NODES_S
        silent = set(range(world.size)) - {world.rank}
        while silent and time.monotonic() < end:
            for rank in sorted(silent):
                for key in [f"hang/{near}/{rank}" for near in (step, step - 1, step + 1)]:
                    if mailbox.poll([key]):
                        posted = [Evidence.from_json(data) for data in mailbox.wait([key], 1.0)[0]]
                        observed |= {one.rank: one for one in posted}
                        reported |= {one.rank: one for one in posted if one.rank == rank}
                        silent.discard(rank)
                        break
            time.sleep(0.05)
    except (CheckpointError, ValueError, TypeError) as error:
        log.info("other ranks did not report their activity: %s", error)
    return observed | seen | reported


NAMES = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # the first exists for all backends, the second for NCCL
ASK_S = 1.0  # seconds to wait for a dump, because a hanging thread may hold the recorder's lock
MOST = 8  # maximum number of collectives to report


# -- torch's flight recorder of this process --


def recorded() -> tuple[Collective, ...]:
    """Return the unfinished collectives, oldest first; () if unknown. Waits for one second at most. With NCCL, a rank
    waits for a collective only when it needs a result, so its stack does not show the collective. torch's flight
    recorder lists the calls of every process group (`TORCH_FR_BUFFER_SIZE`, formerly `TORCH_NCCL_TRACE_BUFFER_SIZE`; 0
    turns it off). It is read as JSON, because its other form is a pickle."""
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
    except Exception:  # another version of torch, or a destroyed communicator; the report works without collectives
        return []


def parse(dump: bytes) -> list[Collective]:
    """Parse a recorder's dump into collectives, oldest first. Raise ValueError, KeyError or TypeError if invalid."""
    entries = json.loads(dump)["entries"]
    waiting = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    return [_collective(entry) for entry in sorted(waiting, key=lambda entry: int(entry["record_id"]))]


def _collective(entry: dict[str, Any]) -> Collective:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    return Collective(operation.lstrip("_"), int(number), str(entry["process_group"][1]), str(entry["state"]))
