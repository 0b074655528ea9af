"""Where nothing moves: what every rank that can be reached does, and whom they wait for."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from ckpt.core.ipc.notes import HangNote
from ckpt.core.ipc.watch_requests import AskEvidence
from ckpt.core.ranks.world import World
from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.guard import probe
from ckpt.guard.hang import Collective, Evidence, note_evidence, plain
from ckpt.guard.incidents import FaultCall, Incidents
from ckpt.units import duration

NODES_S = 2.0  # for other ranks to say what they do
EVIDENCE_S = 5.0


def look_around(call: FaultCall, note: HangNote, incidents: Incidents) -> None:
    """Into the account of a hang: the evidence, and the suspects."""
    world, client, step = incidents.world, incidents.supervisor.client, incidents.heartbeat.step
    found = dict[int, Evidence]()
    try:
        for data in client.ask(AskEvidence(), EVIDENCE_S):
            one = Evidence.from_json(data)
            found[one.rank] = one
    except (CheckpointError, ValueError, KeyError) as error:
        log.warning("the ranks of this node cannot be looked at: %s", error)
    if (mine := found.get(world.rank)) is not None:
        found[world.rank] = _of_our_own(mine)
    if world.size > 1:
        found = _ask_ranks(world, found, step)
    what = f"no step for {duration(note.idle_s)}, where {duration(note.usual_s)} are usual"
    note_evidence(call.fault, list(found.values()), what)
    call.fault.timings |= note.timings


def _of_our_own(seen: Evidence) -> Evidence:
    """What this process knows of itself, beyond what is seen from outside."""
    frames = probe.own_stack(threading.main_thread().ident or 0)
    pending = recorded() if "torch.distributed" in sys.modules else ()
    waits = probe.collective_of(frames) or (pending[0].operation if pending else "")
    known = replace(seen, stack=frames, collective=plain(waits), pending=pending)
    return Evidence.from_json(known.to_json())


def _ask_ranks(world: World, seen: dict[int, Evidence], step: int) -> dict[int, Evidence]:
    """What the others say of themselves, and what they see of those of their nodes, as far as nobody knows better.
    A rank that can post may be in a collective that only it knows of; one that cannot is not waited for long."""
    told: dict[int, Evidence] = {}
    theirs: dict[int, Evidence] = {}
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
                        theirs |= {one.rank: one for one in posted}
                        told |= {one.rank: one for one in posted if one.rank == rank}
                        silent.discard(rank)
                        break
            time.sleep(0.05)
    except (CheckpointError, ValueError, TypeError) as error:
        log.info("other ranks do not say what they do: %s", error)
    return theirs | seen | told


NAMES = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of every backend, and of NCCL alone
ASK_S = 1.0  # its lock may be held by a thread that hangs
MOST = 8  # of which are told


# -- what torch's flight recorder says of this process --


def recorded() -> tuple[Collective, ...]:
    """The collectives under way, the oldest first; () where nothing is known. Waits for a second at most.

    Where NCCL does them a rank waits for one wherever it next needs a result, so its stack does not say in which. The
    recorder is torch's own (`TORCH_FR_BUFFER_SIZE`, in older versions `TORCH_NCCL_TRACE_BUFFER_SIZE`; 0 turns it off)
    and notes the calls of every process group. It is asked for JSON, since its other form is a pickle.
    """
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
