"""A manager for torchtitan with a small model, called as torchtitan's trainer may call one: what its own tests of
managers ask of it, without a trainer. Prints a JSON line with what each call did.

    python titan_manager.py FOLDER
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import ckpt
import ckpt.torchtitan


def main(folder: str) -> None:
    said: dict[str, Any] = {}

    def manager(place: str, **settings: Any) -> tuple[Any, nn.Module]:
        model = nn.Linear(2, 2)
        optim = torch.optim.AdamW(model.parameters())
        config = ckpt.torchtitan.CheckpointManager.Config(
            **{"enable": True, "folder": place, "interval": 3, "keep_latest_k": 0, **settings}
        )
        rest = {"lr_schedulers": torch.optim.lr_scheduler.ConstantLR(optim), "sd_adapter": None, "states": {}}
        return config.build(dataloader=None, model_parts=[model], optimizers=[optim], base_folder=folder, **rest), model

    def refused(one: Any, step: int) -> str:
        try:
            return f"loaded: {one.load(step)}"
        except ckpt.CheckpointError as error:
            return str(error)

    def kept(place: str) -> list[int]:
        return sorted(one.step for one in ckpt.Run(f"{folder}/{place}").list())

    one, model = manager("run")
    said["found in an empty folder"] = one.load(-1)
    said["saved"] = [one.save(step) for step in (1, 2, 3, 4)] + [one.save(5, last_step=True)]
    weight = model.weight.detach().clone()
    model.weight.data.zero_()
    said["comes back"] = one.load(5) and torch.equal(model.weight, weight)
    one.close()
    said["kept"] = kept("run")

    one, _ = manager("run")
    said["step that is not there"] = refused(one, 9)
    one.close()
    one, _ = manager("fresh")
    said["step of an empty folder"] = refused(one, 5)
    one.close()

    one, _ = manager("run", load_only=True, initial_load_path=f"{folder}/nowhere")
    said["load only"] = [one.load(-1), one.save(6), one.save(7, last_step=True)]
    one.close()
    said["kept after that"] = kept("run")

    one, _ = manager("first", enable_first_step_checkpoint=True)
    said["first"] = [one.save(step) for step in (1, 2)]
    one.close()

    one, _ = manager("off", enable=False)
    one.maybe_wait_for_staging()
    one.maybe_wait_for_saving()
    said["off"] = [one.load(-1), one.save(3)]
    one.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
