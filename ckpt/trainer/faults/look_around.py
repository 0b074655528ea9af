"""Where nothing moves: what every rank that can be reached does, and whom they wait for."""

from __future__ import annotations

import threading
import time

from ckpt.errors import CheckpointError
from ckpt.events import log
from ckpt.faults import probe
from ckpt.faults.hang import Evidence, note_evidence
from ckpt.ipc.notes import HangNote
from ckpt.ipc.watch_requests import AskEvidence
from ckpt.ranks.world import World
from ckpt.trainer.faults.incidents import FaultCall
from ckpt.trainer.supervise.writer_client import WriterClient

NODES_S = 2.0  # for other nodes to say what their ranks do
EVIDENCE_S = 5.0


def look_around(call: FaultCall, note: HangNote, world: World, client: WriterClient, step: int) -> None:
    """Into the account of a hang at this step: the evidence, and the suspects."""
    found = dict[int, Evidence]()
    try:
        for data in client.ask(AskEvidence(), EVIDENCE_S):
            one = Evidence.from_json(data)
            found[one.rank] = one
    except (CheckpointError, ValueError, KeyError) as error:
        log.warning("the ranks of this node cannot be looked at: %s", error)
    if (mine := found.get(world.rank)) is not None:
        frames = probe.own_stack(threading.main_thread().ident or 0)
        collective = probe.collective_of(frames)
        found[world.rank] = Evidence.from_json({**mine.to_json(), "stack": list(frames), "collective": collective})
    if max(world.nodes) > 0:
        found |= _ask_nodes(world, found, step)
    what = f"no step for {note.idle_s:.1f} s, where {note.usual_s:.2f} s are usual"
    note_evidence(call.fault, list(found.values()), what)
    call.fault.timings |= note.timings


def _ask_nodes(world: World, here: dict[int, Evidence], step: int) -> dict[int, Evidence]:
    """What other nodes found out; each rank that can posts all that its node knows."""
    found: dict[int, Evidence] = {}
    try:
        mailbox = world.mailbox()
        mailbox.put(f"hang/{step}/{world.rank}", [one.to_json() for one in here.values()])
        end = time.monotonic() + NODES_S
        missing = set(range(world.size)) - here.keys()
        while missing and time.monotonic() < end:
            for key in [f"hang/{s}/{r}" for r in sorted(missing) for s in (step, step - 1, step + 1)]:
                if mailbox.poll([key]):
                    for data in mailbox.wait([key], 1.0)[0]:
                        one = Evidence.from_json(data)
                        found[one.rank] = one
            missing -= found.keys()
            time.sleep(0.05)
    except (CheckpointError, ValueError, TypeError) as error:
        log.info("other nodes do not say what their ranks do: %s", error)
    return {rank: one for rank, one in found.items() if rank not in here}
