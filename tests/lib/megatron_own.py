"""Megatron's own `torch_dist` checkpoints next to runs of `ckpt.megatron`, on the trainings of `megatron_toy`.

RANK=0 WORLD_SIZE=2 … python -c 'import megatron_on_cpu, megatron_own; megatron_own.main()' ACTION FOLDER CASE[=TPxPP]…

save FOLDER CASE…     each is trained to `SAVED` by Megatron alone, which saves FOLDER/theirs/CASE
resume FOLDER CASE…   two trainings continue to `STEPS`, one from FOLDER/theirs/CASE as Megatron itself does, the other
                      with everystep from FOLDER/runs/CASE, where it saves
look FOLDER CASE…     Megatron loads FOLDER/given/CASE: differences from the last step of FOLDER/runs/CASE
Prints a JSON line for each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as sizes
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import ckpt
from megatron_toy import Job, say

SAVED, STEPS = 3, 5
DIRT = 50  # the first of steps that none of these trainings has
MEGATRON_LM = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}

_set = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_with_step(self: Any, p: Any, tensors: dict[str, Any]) -> None:
    """Megatron 0.16 cannot load `fully_reshardable` into torch's Adam, which counts steps by parameter, as fused ones
    do not: it looks for a step here, and has given one tensor for it to all parameters before."""
    group, place = self.model_param_group_index_map[p]
    own = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
    own["step"] = own["step"].clone()
    _set(self, p, {"step": own["step"], **tensors})


DistributedOptimizer._set_main_param_and_optimizer_states = _set_with_step


def state_of(job: Job, sharding: str, *, loading: bool) -> dict[str, Any]:
    """Build the state as Megatron-LM does."""
    metadata = {**MEGATRON_LM, "distrib_optim_sharding_type": sharding}
    model = job.models[0].sharded_state_dict(metadata=metadata)
    return {"model": model, "optimizer": job.optimizer.sharded_state_dict(model, loading, metadata=metadata)}


def write(job: Job, folder: str, iteration: int, sharding: str = "fully_reshardable") -> None:
    place = sizes.get_pipeline_model_parallel_rank(), sizes.get_tensor_model_parallel_rank()
    whole = sizes.get_pipeline_model_parallel_world_size(), sizes.get_tensor_model_parallel_world_size()
    numbers = [{"torch_rng_state": torch.get_rng_state()}]
    more = {
        "args": argparse.Namespace(num_layers=4),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "opt_param_scheduler": job.schedule.state_dict(),
        "rng_state": ShardedObject("rng_state", numbers, whole, place, sizes.get_data_parallel_rank()),
    }
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    content = {**MEGATRON_LM, "distrib_optim_sharding_type": sharding}
    dist_checkpointing.save(state_of(job, sharding, loading=False) | more, folder, content_metadata=content)


def read(job: Job, folder: str) -> int:
    """Megatron's own load, over steps that have changed all of it."""
    for step in range(DIRT, DIRT + 6):  # of fp16 the first ones overflow
        job.train(step)
    job.gather()  # what is under way would overwrite what is loaded
    wanted = state_of(job, "fully_reshardable", loading=True)
    found = dist_checkpointing.load(wanted, folder)
    job.models[0].load_state_dict(found["model"])
    job.optimizer.load_state_dict(found["optimizer"])
    job.schedule.num_steps = 0
    job.schedule.load_state_dict(found["opt_param_scheduler"])
    return int(found["iteration"])


def job_of(pair: str) -> Job:
    case, _, divided = pair.partition("=")
    tp, _, pp = divided.partition("x")
    return Job(case, (int(tp), int(pp)) if divided else None, frozen=False, overlap=False)


def seed() -> None:
    """Seed the random numbers as Megatron does at a start. Both trainings must replace this state."""
    tensor_parallel.model_parallel_cuda_manual_seed(7 + 100 * sizes.get_pipeline_model_parallel_rank())
    torch.manual_seed(0)


def save(folder: str, pairs: list[str]) -> None:
    for pair in pairs:
        job = job_of(pair)
        for step in range(SAVED):
            job.train(step)
        write(job, f"{folder}/theirs/{job.case}", SAVED)
        say(case=job.case, saved=job.digest())
    write(job, f"{folder}/theirs/by-rank", SAVED, "dp_reshardable")


def resume(folder: str, pairs: list[str]) -> None:
    for pair in pairs:
        theirs = job_of(pair)
        start = read(theirs, f"{folder}/theirs/{theirs.case}")
        said = go_on(theirs, start)
        ours = job_of(pair)
        with ours.attach(f"{folder}/runs/{ours.case}") as cp:
            again = go_on(ours, cp.restore(step=SAVED), cp)
        say(case=ours.case, theirs=said, ours=again)


def go_on(job: Job, start: int, cp: ckpt.Checkpointer | None = None) -> list[Any]:
    """The step of it, and losses and digests from there on."""
    seed()
    said: list[Any] = [start, job.digest()]
    for step in range(start, STEPS):
        said += [job.train(step), job.digest()]
        if cp is not None:
            cp.step(step + 1)
    return said


def look(folder: str, pairs: list[str]) -> None:
    for pair in pairs:
        job = job_of(pair)
        step = read(job, f"{folder}/given/{job.case}")
        wrong = job.differences(f"{folder}/runs/{job.case}", step)
        say(case=job.case, step=step, wrong=wrong, counts=job.counts())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    action, folder, *pairs = sys.argv[1:]
    {"save": save, "resume": resume, "look": look}[action](folder, pairs)
    dist.barrier()
    sys.stdout.flush()
    for child in multiprocessing.active_children():  # of Megatron's save, which would hold our pipes open
        child.kill()
    os._exit(0)  # some of gloo's threads do not leave
