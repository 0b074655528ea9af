"""Small trainings by torchtitan's own trainer on CPU ranks, several in one process, because starting one is slow.

RANK=0 WORLD_SIZE=2 … python -c 'import titan_on_cpu, titan_toy; titan_toy.main()' ACTION FOLDER

kill FOLDER      trained to `STEPS` under torchtitan's own manager, into FOLDER/theirs; then with everystep, into
                 FOLDER/ours, and killed when step `KILLED` + 1 is done and not saved: SIGKILL to itself
go_on FOLDER     restored, trained to `STEPS`, and written as Hugging Face has it
four FOLDER      by four ranks: only read, then restored with tensor parallelism, for two steps; then as kill, with
                 two groups of two that shard the model (HSDP)
begin FOLDER     restored by two ranks; and other runs that start from the earlier checkpoints
pipeline, pipeline_on
                 as kill and go_on, in a pipeline; then restored by ranks that have all layers, and back
replicated_on    continues the run of those four, and then all four shard the model
Prints a JSON line for each step of each case, and for each load.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.trainer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager as OwnManager
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import ckpt
import ckpt.torchtitan

STEPS, KILLED = 8, 5
BATCH, LENGTH, WORDS = 8, 32, 2048

_init = dist_utils.init_distributed
dist_utils.init_distributed = lambda *a, **k: dist.get_world_size() if dist.is_initialized() else _init(*a, **k)
torchtitan.trainer.time = types.SimpleNamespace(**{**vars(time), "sleep": lambda _: None})  # it sleeps at the end


class Sequences(IterableDataset):
    """Random ones, of which each share has its own. Says how many it has given."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.given = rank, world, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            seed = self.given * self.world + self.rank
            words = torch.randint(0, WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(seed))
            self.given += 1
            yield {"input": words[:-1], "positions": torch.arange(LENGTH)}, words[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Batches(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(Sequences(dp_rank, dp_world_size), dp_rank, dp_world_size, batch_size=local_batch_size)


class Words(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        self.bos_id = self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


def config(
    folder: str, checkpoint: Any, steps: int, *, tp: int = 1, pp: int = 1, replicas: int = 1, layers: int = 2
) -> Any:
    """Return the config of a small Llama with fused query, key and value weights, the default. In a pipeline (`pp`)
    each rank has two parts."""
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = [copy.deepcopy(spec.model.layers[i % len(spec.model.layers)]) for i in range(layers)]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        hf_assets_path="",
        checkpoint=checkpoint,
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=20, decay_ratio=0.8),
        tokenizer=Words.Config(),
        dataloader=Batches.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=BATCH // (dist_size() // tp // pp),
            global_batch_size=BATCH,
            seq_len=LENGTH,
            steps=steps,
            disable_cuda_graphs=True,
            dtype="float32",
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=tp,
            data_parallel_replicate_degree=replicas,
            pipeline_parallel_degree=pp,
            pipeline_parallel_schedule="Interleaved1F1B",
            pipeline_parallel_microbatch_size=2,
            spmd_backend="partial_dtensor",
        ),
        debug=DebugConfig(seed=0, deterministic=True),
    )


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def build(made: Any) -> Any:
    """A trainer. Over gloo gradients are summed."""
    trainer = made.build()
    for module in (one for part in trainer.model_parts for one in part.modules()):
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    return trainer


def digests(trainer: Any) -> dict[str, str]:
    """Return digests of whole weights and whole moments, for any number of ranks, and the counters."""
    names = {p: name for part in trainer.model_parts for name, p in part.named_parameters()}
    state = {names[p]: one for optimizer in trainer.optimizers for p, one in optimizer.state.items()}
    found = {}
    for p, name in names.items():
        moments = b"".join(key.encode() + _bytes(one) for key, one in sorted(state.get(name, {}).items()))
        found[name] = [hashlib.sha256(one).hexdigest() for one in (_bytes(p), moments)]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, found)  # a rank of a pipeline has only its own parts
    whole = sorted({name: one for found in of_all for name, one in found.items()}.items())
    weights, moments = (hashlib.sha256(str([(n, one[at]) for n, one in whole]).encode()).hexdigest() for at in (0, 1))
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    counts = [trainer.step, rates, trainer.lr_schedulers.state_dict()]
    return {"weights": weights[:16], "moments": moments[:16], "counts": str(counts)}


def _bytes(tensor: Any) -> bytes:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return bytes(whole.detach().float().contiguous().numpy().tobytes())


def say(**words: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(words), flush=True)


def train(case: str, made: Any, *, kill: int | None = None) -> None:
    """Load and train, as torchtitan's script does."""
    trainer = build(made)
    losses: dict[str, Any] = {}

    def log(step: int, average: float, most: float, norm: float, extra_metrics: Any = None) -> None:
        losses.update(loss=average, most=most, norm=norm, tokens=extra_metrics["n_tokens_seen"])

    trainer.metrics_processor.log = log
    load, step, save = trainer.checkpointer.load, trainer.train_step, trainer.checkpointer.save

    def loaded(**given: Any) -> bool:
        found = bool(load(**given))
        checkpointer = getattr(trainer.checkpointer, "_checkpointer", None)
        last = checkpointer and checkpointer.last_restore
        say(case=case, loaded=trainer.step, found=found, tier=last and last.tier, **digests(trainer))
        return found

    def stepped(batches: Any) -> None:
        step(batches)
        say(case=case, step=trainer.step, **losses, **digests(trainer))
        if kill is not None and trainer.step > kill:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    def saved(*given: Any, **more: Any) -> bool:
        if not save.__self__.enable:
            return False
        with CommDebugMode() as seen:
            done = bool(save(*given, **more))
        say(case=f"{case}, saved", step=trainer.step, done=done, collectives=seen.get_total_counts())
        return done

    trainer.checkpointer.load, trainer.train_step, trainer.checkpointer.save = loaded, stepped, saved
    try:
        trainer.train()
    finally:
        trainer.close()


def ours(**settings: Any) -> Any:
    """Every second step in the folder, of which two stay."""
    return ckpt.torchtitan.CheckpointManager.Config(
        **{"enable": True, "interval": 2, "keep_latest_k": 2, "last_save_model_only": False, **settings}
    )


def kill(folder: str) -> None:
    own = OwnManager.Config(enable=True, interval=4, last_save_model_only=False)
    train("theirs", config(f"{folder}/theirs", own, STEPS))
    train("ours", config(f"{folder}/ours", ours(), STEPS), kill=KILLED)


def go_on(folder: str) -> None:
    hf = {"last_save_in_hf": True, "last_save_model_only": True}
    train("ours", config(f"{folder}/ours", ours(also=[f"{folder}/also"], **hf), STEPS))


def four(folder: str) -> None:
    before = _files(f"{folder}/ours")
    look = {"load_only": True, "exclude_from_loading": ["dataloader", "optimizer"]}
    train("looked at", config(f"{folder}/ours", ours(**look), STEPS + 1))
    say(case="looked at", unchanged=_files(f"{folder}/ours") == before)
    trainer = build(config(f"{folder}/ours", ours(load_only=True), STEPS + 1))
    try:
        trainer.checkpointer.load()
    except ckpt.errors.UsageError as error:
        say(case="refused", error=str(error))
    trainer.close()
    train("tensor parallel", config(f"{folder}/ours", ours(), STEPS + 2, tp=2))
    place = f"{folder}/replicated"
    train("untouched", config(f"{place}/untouched", ours(enable=False), STEPS, replicas=2))
    train("replicated", config(place, ours(), STEPS, replicas=2), kill=KILLED)


def begin(folder: str) -> None:
    train("taken back", config(f"{folder}/ours", ours(), STEPS + 3))
    theirs = f"{folder}/theirs/checkpoint/step-4"
    for case, path, settings, steps in (
        ("theirs", theirs, {"initial_load_model_only": False}, 6),
        ("a run", f"{folder}/also@{STEPS}", {}, 1),
        ("Hugging Face", f"{folder}/ours/checkpoint-hf/step-{STEPS}", {"initial_load_in_hf": True}, 1),
    ):
        place = f"{folder}/begun-{len(path)}"
        train(f"from {case}", config(place, ours(initial_load_path=path, **settings), steps))


def pipeline(folder: str) -> None:
    place = f"{folder}/pipeline"
    train("alone", config(f"{place}/alone", ours(enable=False), STEPS, pp=2, layers=4))
    train("pipeline", config(place, ours(), STEPS, pp=2, layers=4), kill=KILLED)


def pipeline_on(folder: str) -> None:
    place = f"{folder}/pipeline"
    train("pipeline", config(place, ours(), STEPS, pp=2, layers=4))
    train("tensor parallel", config(place, ours(), STEPS + 1, tp=2, layers=4))
    train("pipeline again", config(place, ours(), STEPS + 2, pp=2, layers=4))


def replicated_on(folder: str) -> None:
    place = f"{folder}/replicated"
    train("replicated", config(place, ours(), STEPS, replicas=2))
    train("divided", config(place, ours(), STEPS + 1))


def _files(folder: str) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path(folder).rglob("*") if path.is_file())


def main() -> None:
    torch.set_num_threads(1)
    actions: list[Callable[[str], None]] = [kill, go_on, four, begin, pipeline, pipeline_on, replicated_on]
    dict(zip((one.__name__ for one in actions), actions, strict=True))[sys.argv[1]](sys.argv[2])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # some of gloo's threads do not leave
