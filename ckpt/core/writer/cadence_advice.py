"""How often the trainer should save, by what saving costs it: looked at again and again, and proposed if it differs."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ckpt.core.cadence import cadence
from ckpt.core.cadence.cadence import MEMORY, Auto, SaveCost, TierCadence
from ckpt.core.cadence.ledger import Account, Decision
from ckpt.core.cadence.overhead import Meter
from ckpt.core.ipc.watch_requests import CadenceOf

DECIDE_S, DECIDE_MOST_S = 2.0, 300.0  # between two looks at what saving costs: more and more rarely


class CadenceAdvice:
    """For one trainer. `tiers`: what it says of each, and of memory; `meter`: of its steps; `past`: earlier
    incarnations."""

    def __init__(self, tiers: Iterable[CadenceOf], meter: Meter, *, decides: bool = False) -> None:
        self._tiers = [_cadence(one) for one in tiers]
        self._meter = meter
        self.decides = decides and any(isinstance(one.every, Auto) for one in self._tiers)
        self.past: list[Account] = []
        self._look_at, self._pause_s = time.monotonic() + DECIDE_S, DECIDE_S

    def decided(self, decision: Decision) -> None:
        """The ranks have agreed on a cadence."""
        self._tiers = [
            TierCadence(one.name, one.every, decision.every.get(one.name, one.now), one.remote) for one in self._tiers
        ]

    def propose(self, account: Account) -> Decision | None:
        """Another cadence, if it is time to look and what saving costs says so."""
        now, step_s = time.monotonic(), self._meter.step_s
        if not self.decides or now < self._look_at or step_s is None:
            return None
        costs = {one.name: cost for one in self._tiers if (cost := self._cost(one.name)) is not None}
        settled = all(cadence.enough(one, costs.get(one.name)) for one in self._tiers)
        self._pause_s = min(DECIDE_MOST_S, 1.5 * self._pause_s) if settled else DECIDE_S
        self._look_at = now + self._pause_s
        known = cadence.history([*self.past, account])
        held = account.decisions[-1] if account.decisions else None
        decision = cadence.decide(self._tiers, account.step, step_s, costs, known, account.world, held)
        return decision if cadence.differs(decision, self._tiers) else None

    def _cost(self, name: str) -> SaveCost | None:
        meter = self._meter
        if name == MEMORY:
            save_s, lasted_s, samples, unsure_s = meter.snapshot_s, 0.0, meter.snapshots, meter.snapshot_unsure_s
        else:
            save_s, lasted_s = meter.save_s(name), meter.write_s(name)
            samples, unsure_s = meter.saves(name), meter.save_unsure_s(name)
        return None if save_s is None else SaveCost(save_s, lasted_s, samples, unsure_s)


def _cadence(one: CadenceOf) -> TierCadence:
    return TierCadence(one.name, one.every if isinstance(one.every, int) else Auto(*one.every), one.now, one.remote)
