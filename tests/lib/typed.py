"""Uses of the public names that a type checker must take, and others that it must not. Checked, never run.

An ignore that is not needed is an error: so what is marked as wrong has to be found wrong.
"""

from __future__ import annotations

from typing import Any, assert_type

from torch import Tensor, nn

import ckpt


def right(model: nn.Module, state: dict[str, Any]) -> None:
    tiers = [ckpt.Tier("s3://b/r", every=100, keep=ckpt.Keep(last=3, every=1000))]
    with ckpt.Checkpointer(
        state, tiers, every=ckpt.Auto(budget=0.02), options=ckpt.Options(metrics=9400), memory=ckpt.Memory(every="auto")
    ) as cp:
        assert_type(cp.restore(default=0), int)
        assert_type(cp.restore(), int)
        assert_type(cp.restore(default=None), int | None)
        assert_type(cp.step(1), ckpt.Save | None)
        save = cp.save(2)
        assert_type(save, ckpt.Save)
        assert_type(save.wait_durable(5.0), ckpt.types.Checkpoint)
        assert_type(cp.last_restore, ckpt.Restored | None)
    ckpt.Checkpointer(state, "runs/a", every=50, keep=10)
    ckpt.Checkpointer(state, "runs/a", every="10min", keep="all")
    assert_type(ckpt.load("runs/a", only="model.*")["model.w"], Tensor)
    for _ in ckpt.Loader([1, 2], batch_size=2, num_workers=1):
        pass
    stop = ckpt.events.subscribe(lambda event: print(event.step, event.to_json()))
    stop()
    ckpt.lightning.CheckpointCallback("runs/a", every=200, monitor="loss")
    ckpt.transformers.CheckpointCallback("runs/a", every="auto", strict=False)
    try:
        pass
    except ckpt.errors.MismatchError as error:
        assert isinstance(error, ckpt.CheckpointError)


def wrong(state: dict[str, Any]) -> None:
    cp = ckpt.Checkpointer([state])  # type: ignore[arg-type]
    cp.step("1")  # type: ignore[arg-type]
    cp.sav()  # type: ignore[attr-defined]
    ckpt.Options(on_bussy="wait")  # type: ignore[call-arg]
    ckpt.Tier("runs/a", every=object())  # type: ignore[arg-type]
    ckpt.no_such_name()  # type: ignore[attr-defined]
    cp.restore(default=0).upper()  # type: ignore[attr-defined]
