"""Time of a save and a restore under torchtitan: by everystep, and by its own manager, in one run.

    python benchmarks/torchtitan_saves.py                    # a Llama under FSDP2, two ranks on the CPU
    python benchmarks/torchtitan_saves.py --layers 24 --saves 3

Time lost per save and restore are defined as in deepspeed_saves.py. torchtitan is installed into a separate environment
on first use.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from trainer_saves import end, lost, options_of, run_ranks, show, timed


def train(folder: str, options: argparse.Namespace) -> None:
    """Train one rank and measure its saves."""
    import torch

    import titan_on_cpu  # noqa: F401  # before torchtitan
    import titan_toy

    torch.set_num_threads(1)

    def build(place: str, checkpoint: Any) -> Any:
        steps = 10**6  # more than the trained steps
        return titan_toy.build(titan_toy.config(f"{folder}/{place}", checkpoint, steps, layers=options.layers))

    def manager(trainer: Any, place: str, settings: Any) -> Any:
        """Return another manager with the arguments of the trainer's own."""
        return settings.build(
            dataloader=trainer.dataloader,
            model_parts=trainer.model_parts,
            optimizers=trainer.optimizers,
            lr_schedulers=trainer.lr_schedulers,
            states={"train_state": trainer},
            sd_adapter=None,
            base_folder=f"{folder}/{place}",
        )

    own = titan_toy.OwnManager.Config
    every = {"enable": True, "interval": 1, "keep_latest_k": 0, "last_save_model_only": False}
    trainer = build("ours", titan_toy.ours(interval=10**6, keep_latest_k=0))
    ours, checkpointer = trainer.checkpointer, trainer.checkpointer._checkpointer
    ours.load()
    whole = manager(trainer, "whole", own(**every))
    apart = manager(trainer, "apart", own(**every, async_mode="async"))
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.metrics_processor.log = lambda *_, **__: None

    def step() -> None:
        trainer.step += 1
        trainer.train_step(batches)

    for _ in range(2):
        step()
        ours.save(trainer.step)
    ways = {
        "memory": (lambda: ours.save(trainer.step), checkpointer.wait),
        "disk": (lambda: checkpointer.save(trainer.step), checkpointer.wait),
        "sync": (lambda: whole.save(trainer.step), lambda: None),
        "async": (lambda: apart.save(trainer.step), apart.maybe_wait_for_saving),
    }
    found = lost(step, ways, options.saves)
    ours.close()
    again = build("ours", titan_toy.ours(interval=10**6, keep_latest_k=0))
    found["restore_memory_s"] = timed(again.checkpointer.load)
    found["restore_sync_s"] = timed(manager(again, "whole", own(**every)).load)
    again.checkpointer.close()
    end({"parameters": sum(p.numel() for part in trainer.model_parts for p in part.parameters()), **found})


def main() -> None:
    options = options_of(__doc__, layers=48)
    if options.rank_of:
        return train(options.rank_of, options)
    names = {"memory": "everystep", "disk": "everystep (disk too)", "sync": "torchtitan", "async": "torchtitan, async"}
    return show(run_ranks(__file__, options), options.json, "FSDP2", names)


if __name__ == "__main__":
    main()
