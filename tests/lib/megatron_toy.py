"""Small trainings under Megatron-core on CPU ranks, several of them in one process, because starting one is slow.

RANK=0 WORLD_SIZE=2 … python -c 'import megatron_on_cpu, megatron_toy; megatron_toy.main()' ACTION FOLDER CASE[=SIZES]…

kill FOLDER CASE…    each is trained to `STEPS` by Megatron alone; then again with everystep, into FOLDER/CASE, and
                     killed in the middle of step `KILLED` + 1: SIGKILL to itself
go_on FOLDER CASE…   restored, and trained to `STEPS`
take_over FOLDER CASE=TPxPP…, CASE=TPxPPxPARTS…
                     the checkpoint of CASE is restored with these sizes of tensor and pipeline parallelism, and PARTS
                     parts of the model on each stage
refuse FOLDER        the errors of the first rank for unknown settings, also of the last rank alone, and for the case
                     tensor-fp32 with another vocabulary
Prints a JSON line for each step of each case, for each restore, and for each error.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as sizes
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

import ckpt
import ckpt.megatron

STEPS, KILLED = 5, 3
LAYERS, WIDTH, VOCABULARY, LENGTH, BATCH = 4, 32, 64, 8, 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SWIGLU = {"gated_linear_unit": True, "activation_func": functional.silu, "add_bias_linear": False}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
Sizes = tuple[int, ...]  # tensor, pipeline, and parts of the model on each stage if there are several
CASES: dict[str, tuple[Sizes, str, dict[str, Any]]] = {
    "data-bf16": ((1, 1), "bf16", {**SWIGLU, **DROPOUT, "tied": True, "overlap": True}),
    "data-fp16": ((1, 1), "fp16", {"frozen": True}),
    "data-small": ((1, 1), "bf16", {"small": True}),
    "tensor-fp32": ((2, 1), "fp32", SWIGLU),
    "tensor-bf16": ((2, 1), "bf16", {**DROPOUT, "tied": True}),
    "pipeline-bf16": ((1, 2), "bf16", {**SWIGLU, **DROPOUT, "tied": True}),
    "interleaved-bf16": ((1, 2, 2), "bf16", {**SWIGLU, **DROPOUT, "tied": True}),
}
BY_COLUMNS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
FIRST = ("linear_fc1.weight", "linear_fc1.bias")  # by columns too; with SwiGLU two halves, each of which is divided
NORMS = {  # as Transformer Engine has them, in the layers that follow
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
BY_ROWS = ("linear_proj.weight", "linear_fc2.weight")


def set_sizes(tp: int, pp: int, vp: int | None = None) -> None:
    if sizes.model_parallel_is_initialized():
        if (
            sizes.get_tensor_model_parallel_world_size(),
            sizes.get_pipeline_model_parallel_world_size(),
            sizes.get_virtual_pipeline_model_parallel_world_size(),
        ) == (tp, pp, vp):
            return
        sizes.destroy_model_parallel()
    sizes.initialize_model_parallel(tp, pp, vp)


def name_in_whole(gpt: GPTModel, name: str) -> str:
    """Return the name of a parameter in the whole model."""
    before, layers, rest = name.partition("decoder.layers.")
    if layers:
        number, _, rest = rest.partition(".")
        for here, there in NORMS.items():
            rest = rest.replace(here, there)
        return f"{before}{layers}{gpt.decoder.layers[int(number)].layer_number - 1}.{rest}"
    if name == "output_layer.weight" and gpt.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


class Job:
    """One training under Megatron."""

    def __init__(self, case: str, divided: Sizes | None = None, **changes: Any) -> None:
        own, self.dtype, more = CASES[case]
        more = {**more, **changes}
        tied, frozen, small, overlap = (more.pop(word, False) for word in ("tied", "frozen", "small", "overlap"))
        vocabulary, distributed = more.pop("vocabulary", VOCABULARY), more.pop("distributed", True)
        self.case, self.gated = case, "gated_linear_unit" in more
        set_sizes(*(divided or own))
        tensor_parallel.model_parallel_cuda_manual_seed(7 + 100 * sizes.get_pipeline_model_parallel_rank())
        torch.manual_seed(0)
        low = {} if self.dtype == "fp32" else {self.dtype: True}
        self.config = TransformerConfig(
            **{
                "num_layers": LAYERS,
                "hidden_size": WIDTH,
                "num_attention_heads": 8,
                "num_query_groups": 4,
                "ffn_hidden_size": 48,
                "use_cpu_initialization": True,
                "tensor_model_parallel_size": sizes.get_tensor_model_parallel_world_size(),
                "pipeline_model_parallel_size": sizes.get_pipeline_model_parallel_world_size(),
                "virtual_pipeline_model_parallel_size": sizes.get_virtual_pipeline_model_parallel_world_size(),
                "pipeline_dtype": DTYPES[self.dtype],
                "params_dtype": DTYPES[self.dtype],
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "gradient_accumulation_fusion": False,
                "bias_dropout_fusion": False,
                "bias_activation_fusion": False,
                "masked_softmax_fusion": False,
                "persist_layer_norm": False,
                **low,
                **more,
            }
        )
        parts = range(sizes.get_virtual_pipeline_model_parallel_world_size() or 1)
        self.gpts = [self.part(i if len(parts) > 1 else None, vocabulary, tied) for i in parts]
        first = self.gpts[0]
        if frozen and first.pre_process:
            first.decoder.layers[0].requires_grad_(False)
        if small:
            first.requires_grad_(False)
            first.decoder.final_layernorm.requires_grad_(True)
        self.models = [Float16Module(self.config, gpt) if low else gpt for gpt in self.gpts]
        grads = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap, "grad_reduce_in_fp32": True}
        how = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **grads)
        self.ddps = [
            DistributedDataParallel(self.config, how, model, disable_bucketing=i > 0)
            for i, model in enumerate(self.models)
        ]
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            params_dtype=DTYPES[self.dtype],
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap,
            clip_grad=1.0,
            initial_loss_scale=2.0**20,  # overflows at first
            loss_scale_window=2,
            hysteresis=1,
            **low,
        )
        self.optimizer = get_megatron_optimizer(settings, self.ddps)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if overlap:
            self.config.no_sync_func = self.ddps[0].no_sync
        self.schedule = OptimizerParamScheduler(
            self.optimizer, 0.0, 1e-2, 1e-3, 3, 100, "linear", 0.01, 0.02, 100, "linear"
        )

    def part(self, number: int | None, vocabulary: int, tied: bool) -> GPTModel:
        """Return this rank's part of the model, or one of several parts."""
        of_rank = {} if number is None else {"ignore_virtual": False, "vp_stage": number}
        experts = self.config.num_moe_experts
        return GPTModel(
            self.config,
            get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="LayerNorm"),
            vocab_size=vocabulary,
            max_sequence_length=LENGTH,
            share_embeddings_and_output_weights=tied,
            pre_process=sizes.is_pipeline_first_stage(**of_rank),
            post_process=sizes.is_pipeline_last_stage(**of_rank),
            vp_stage=number,
        )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return this rank's parameters by their names in the whole model."""
        for gpt in self.gpts:
            for name, p in gpt.named_parameters():
                yield name_in_whole(gpt, name), p

    def train(self, step: int) -> float:
        for ddp in self.ddps:
            ddp.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.run(step, forward_only=False)
        self.optimizer.step()
        self.schedule.step(1)
        return loss

    def run(self, step: int, forward_only: bool) -> float:
        """The mean loss of a batch, on all ranks."""
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        mine = tokens[sizes.get_data_parallel_rank() :: sizes.get_data_parallel_world_size()]
        micro = mine.split(1 if len(mine) < 4 else 2)
        said = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro) for _ in self.ddps] if len(self.ddps) > 1 else iter(micro),
            model=self.ddps,
            num_microbatches=len(micro),
            seq_length=LENGTH,
            micro_batch_size=len(micro[0]),
            forward_only=forward_only,
        )
        last = sizes.is_pipeline_last_stage()
        sums = torch.tensor([sum(float(one["loss"]) for one in said) / len(micro) if last else 0.0, float(last)])
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def evaluated(self) -> float:
        for ddp in self.ddps:
            ddp.eval()
        with torch.no_grad():
            return self.run(1000, forward_only=True)

    # -- what this rank holds --

    def held(self) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
        """Return for each parameter the elements that this rank has, from Megatron's own data."""
        for part in self.optimizer.chained_optimizers:
            for p in part.model_param_gbuf_map:
                found = part._get_main_param_and_optimizer_states(p)
                yield p, part._get_model_param_range_map(p)["param"].start, found

    def gather(self) -> None:
        """Gather the model weights, if Megatron leaves that to the next forward pass."""
        for ddp in self.ddps:
            if ddp.ddp_config.overlap_param_gather:
                ddp.start_param_sync(force_sync=True)

    def digest(self) -> str:
        """Return a digest of the state of all ranks: masters, moments, model weights, settings, random numbers."""
        self.gather()
        own = hashlib.sha256()
        for _, start, found in self.held():
            own.update(b"%d" % start)
            for key in ("param", "exp_avg", "exp_avg_sq", "step"):
                none = torch.zeros(()) if key == "step" else torch.zeros_like(found["param"])
                own.update(found.get(key, none).detach().numpy().tobytes())  # none: each step has overflowed till now
        for name, p in self.parameters():
            own.update(name.encode() + p.detach().float().numpy().tobytes())
        for group in self.optimizer.param_groups:
            own.update(repr((group["lr"], group["weight_decay"])).encode())
        own.update(repr((self.scale(), self.schedule.num_steps)).encode())
        own.update(torch.get_rng_state().numpy().tobytes())
        for name, state in sorted(tensor_parallel.get_cuda_rng_tracker().get_states().items()):
            own.update(name.encode() + state.numpy().tobytes())
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own.hexdigest())
        return hashlib.sha256("".join(every).encode()).hexdigest()[:16]

    def counts(self) -> list[Any]:
        """The steps that the optimizer has made, by any rank's parameters, and what its schedule has set."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, {float(found.get("step", 0)) for _, _, found in self.held()})
        settings = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        return [sorted(set().union(*every)), settings, self.schedule.num_steps, self.scale()]

    def scale(self) -> float:
        return float(self.optimizer.get_loss_scale())

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """This tensor parallel rank's part, as Megatron's linear layers divide them."""
        rank, size = sizes.get_tensor_model_parallel_rank(), sizes.get_tensor_model_parallel_world_size()
        if name.endswith(FIRST):
            return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2 if self.gated else 1)])
        if name.endswith(BY_COLUMNS):
            return whole.chunk(size)[rank]
        return whole.chunk(size, 1)[rank] if name.endswith(BY_ROWS) else whole

    def differences(self, run: str, step: int) -> list[str]:
        """Return differences between any rank and `ckpt.load`, by name, and entries that were not compared."""
        self.gather()
        saved, wrong = ckpt.load(run, step=step), []
        names = {p: name for name, p in self.parameters()}
        looked_at = set()
        for p, start, found in self.held():
            for key, saved_key in (
                ("param", f"model.{names[p]}"),
                *((k, f"optim.state.{names[p]}.{k}") for k in MOMENTS),
            ):
                expected = self.part_of(names[p], saved[saved_key]).reshape(-1)[start : start + found[key].numel()]
                if not torch.equal(found[key].detach(), expected):
                    wrong.append(f"{saved_key} from {start}")
                looked_at.add(saved_key)
        for p, name in names.items():
            if not torch.equal(p.detach(), self.part_of(name, saved[f"model.{name}"]).to(p.dtype)):
                wrong.append(f"model.{name} as it computes")
            looked_at.add(f"model.{name}")
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (wrong, looked_at))
        missed = {name for name in saved if name.startswith(("model.", "optim."))} - set().union(*(s for _, s in every))
        return [*(one for some, _ in every for one in some), *(f"{name} is nowhere" for name in sorted(missed))]

    def attach(self, run: str) -> ckpt.Checkpointer:
        tiers = [ckpt.Tier(run, every=2)]
        return ckpt.megatron.attach(self.ddps, self.optimizer, tiers, state={"sched": self.schedule})


MOMENTS = ("exp_avg", "exp_avg_sq")


def forward(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    tokens = next(batches)
    x, labels = tokens[:, :-1], tokens[:, 1:]
    mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    output = model(x, torch.arange(LENGTH).expand_as(x), mask, labels=labels)

    def reduce(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, reduce


def say(**words: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(words), flush=True)


def kill(folder: str, cases: list[str]) -> None:
    for case in cases:
        job = Job(case)
        for step in range(STEPS):
            loss = job.train(step)
            say(case=case, step=step + 1, loss=loss, scale=job.scale(), digest=job.digest())
    kept = []
    for case in cases:
        job = Job(case)
        cp = job.attach(f"{folder}/{case}")
        cp.restore(default=0)
        for step in range(KILLED):
            job.train(step)
            cp.step(step + 1)
        job.train(KILLED)  # not saved
        kept.append(cp)
        say(case=case, killed=KILLED)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(folder: str, cases: list[str]) -> None:
    for case in cases:
        job = Job(case)
        with job.attach(f"{folder}/{case}") as cp:
            start = cp.restore()
            say(case=case, restored=start, tier=cp.last_restore.tier, digest=job.digest())
            for step in range(start, STEPS):
                loss = job.train(step)
                cp.step(step + 1)
                say(case=case, step=step + 1, loss=loss, scale=job.scale(), digest=job.digest())
        wrong = job.differences(f"{folder}/{case}", STEPS)
        say(case=case, wrong=wrong, evaluated=job.evaluated(), counts=job.counts())


def take_over(folder: str, pairs: list[str]) -> None:
    for pair in pairs:
        case, _, divided = pair.partition("=")
        job = Job(case, tuple(map(int, divided.split("x"))))
        with job.attach(f"{folder}/{case}") as cp:
            start = cp.restore()
            wrong, evaluated = job.differences(f"{folder}/{case}", start), job.evaluated()
            say(case=case, restored=start, wrong=wrong, evaluated=evaluated, counts=job.counts())
            job.train(start)
            cp.step(start + 1)
        wrong = job.differences(f"{folder}/{case}", start + 1)
        say(case=case, step=start + 1, wrong=wrong, evaluated=job.evaluated(), counts=job.counts())


def refuse(folder: str, _: list[str]) -> None:
    experts = {"num_moe_experts": 2, "moe_router_load_balancing_type": "none", "add_bias_linear": False}
    say_error("experts", Job("tensor-fp32", (1, 1), **experts))
    say_error("optimizer", Job("tensor-fp32", (1, 1), distributed=False))
    job = Job("tensor-fp32", (1, 1))
    say_error("names", job, state={"optim": {}})
    say_error("random", job, state={"numbers": ckpt.RNG()})
    say_error("chunks", job, chunks=job.gpts)
    (part,) = job.optimizer.chained_optimizers
    for what, settings, name, value in (
        ("fp8", job.config, "fp8", "hybrid"),  # each of these needs a GPU, or what is made for one
        ("precision", part.config, "use_precision_aware_optimizer", True),
        ("offloaded", part.config, "optimizer_cpu_offload", True),
        ("instances", job.ddps[0].ddp_config, "num_distributed_optimizer_instances", 2),
    ):
        before = getattr(settings, name)
        setattr(settings, name, value)
        say_error(what, job)
        setattr(settings, name, before)
    if dist.get_rank() == dist.get_world_size() - 1:
        job.gpts[0].register_buffer("seen", torch.zeros(2))
    say_error("buffer", job)
    with Job("tensor-fp32", (1, 1), vocabulary=VOCABULARY + 8).attach(f"{folder}/tensor-fp32") as cp:
        try:
            cp.restore()
        except ckpt.errors.MismatchError as error:
            say(case="vocabulary", error=str(error))


def say_error(what: str, job: Job, *, chunks: Any = None, state: Any = None) -> None:
    try:
        ckpt.megatron.attach(chunks or job.ddps, job.optimizer, "nowhere", state=state)
    except ckpt.errors.UsageError as error:
        say(case=what, error=str(error))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    action, folder, *cases = sys.argv[1:]
    {"kill": kill, "go_on": go_on, "take_over": take_over, "refuse": refuse}[action](folder, cases)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # some of gloo's threads do not leave
