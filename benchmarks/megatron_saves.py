"""Time of a save and a restore under Megatron-core: by everystep, and by its own `dist_checkpointing`, in one run.

    python benchmarks/megatron_saves.py                      # a GPT, two data parallel ranks on the CPU
    python benchmarks/megatron_saves.py --layers 4 --saves 3

Time lost per save and restore are defined as in deepspeed_saves.py. Megatron saves `torch_dist` with the fast settings
of Megatron-LM: each rank writes an equal part (fully parallel), the plan is cached, and the optimizer stays divided
(`dp_reshardable`). megatron-core is installed into a separate environment on first use.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from trainer_saves import end, lost, options_of, run_ranks, show, timed


def train(folder: str, options: argparse.Namespace) -> None:
    """Train one rank and measure its saves."""
    import torch
    import torch.distributed as dist

    import megatron_on_cpu  # noqa: F401  # before Megatron

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    import ckpt
    import ckpt.megatron
    from megatron_own import MEGATRON_LM, state_of
    from megatron_toy import Job

    wide, sharding = options.width, "dp_reshardable"

    def build() -> Job:
        sizes = {"num_layers": options.layers, "hidden_size": wide, "ffn_hidden_size": 4 * wide, "vocabulary": 8192}
        return Job("data-bf16", overlap=False, **sizes)

    def attach(job: Job) -> ckpt.Checkpointer:
        tiers = [ckpt.Tier(f"{folder}/ours", every=10**6)]
        return ckpt.megatron.attach(job.ddps, job.optimizer, tiers, state={"sched": job.schedule})

    class Theirs:
        """Successive saves, of which the last one stays."""

        def __init__(self, apart: bool) -> None:
            self.apart, self.count, self.queue = apart, 0, AsyncCallsQueue()
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy: Any = get_default_save_sharded_strategy("torch_dist")
            strategy.use_cached_ckpt_structure = True
            self.strategy = FullyParallelSaveStrategyWrapper(strategy, group, True)

        def place(self) -> Path:
            return Path(folder, f"theirs-{self.apart}-{self.count}")

        def save(self) -> None:
            self.count += 1
            if dist.get_rank() == 0:
                self.place().mkdir()
            dist.barrier()
            request = dist_checkpointing.save(
                state_of(job, sharding, loading=False) | {"opt_param_scheduler": job.schedule.state_dict()},
                str(self.place()),
                self.strategy,
                validate_access_integrity=self.count == 1,
                async_sharded_save=self.apart,
                content_metadata={**MEGATRON_LM, "distrib_optim_sharding_type": sharding},
            )
            if self.apart:
                self.queue.schedule_async_request(request)

        def done(self) -> None:
            self.queue.maybe_finalize_async_calls(blocking=True)
            if self.count > 1 and dist.get_rank() == 0:
                shutil.rmtree(Path(folder, f"theirs-{self.apart}-{self.count - 1}"))

    job, steps = build(), 0

    def step() -> None:
        nonlocal steps
        job.train(steps)
        steps += 1

    cp = attach(job)
    cp.restore(default=0)
    whole, apart = Theirs(False), Theirs(True)
    for _ in range(2):
        step()
        cp.step(steps)
        for one in (whole, apart):
            one.save()
            one.done()
    ways = {
        "memory": (lambda: cp.step(steps), cp.wait),
        "disk": (lambda: cp.save(steps), cp.wait),
        "sync": (whole.save, whole.done),
        "async": (apart.save, apart.done),
    }
    found = lost(step, ways, options.saves)
    cp.close()
    job = build()
    with attach(job) as again:
        found["restore_memory_s"] = timed(again.restore)

    def load() -> None:
        said = dist_checkpointing.load(state_of(job, sharding, loading=True), str(whole.place()))
        job.models[0].load_state_dict(said["model"])
        job.optimizer.load_state_dict(said["optimizer"])

    found["restore_sync_s"] = timed(load)
    for child in multiprocessing.active_children():  # processes of Megatron's saves, which would keep our pipes open
        child.kill()
    end({"parameters": sum(p.numel() for p in job.gpts[0].parameters()), **found})


def main() -> None:
    options = options_of(__doc__, width=768, layers=8)
    if options.rank_of:
        return train(options.rank_of, options)
    ours = {"memory": "everystep", "disk": "everystep (disk too)"}
    names = ours | {"sync": "dist_checkpointing", "async": "dist_checkpointing, async"}
    return show(run_ranks(__file__, options), options.json, "DistributedOptimizer", names)


if __name__ == "__main__":
    main()
