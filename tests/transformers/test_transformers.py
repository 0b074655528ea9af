"""Tests of Hugging Face's Trainer with our callback: killed anywhere, training continues exactly."""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel import free_port, launch
from processes import PYTHONPATH, REPO, killed, run_python, warm

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from peft import LoraConfig, PeftModel, PromptEncoderConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback

import ckpt
import ckpt.transformers
import hf_toy
from ckpt.core.state.capture import Capture
from ckpt.tools.cli import app
from ckpt.transformers.__main__ import command
from ckpt.transformers.pretrained import adapter_tensors, export_pretrained, is_adapter, trained
from commands import stopped

pytestmark = pytest.mark.usefixtures("imported")
SAME = ("digest", "log", "loss", "step", "best")
TOY = REPO / "tests" / "lib" / "hf_toy.py"
EXAMPLES = REPO / "examples"


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    with warm("transformers.trainer", "peft"):
        yield


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return True if weights, optimizer, random numbers and logs are equal, bit for bit."""
    assert {k: found[k] for k in SAME} == {k: wanted[k] for k in SAME}
    return True


def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script in its own process."""
    environment = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *map(str, arguments)]
    return run_python(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Return the result of the toy without everystep."""
    return hf_toy.run(None)


def test_killed_training_continues_exactly_anywhere(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL at any of these does not change weights, logs, best metric and EarlyStopping."""
    setting: dict[str, Any] = {"patience": 4, "epochs": 3}
    first = random.randrange(2, 8)
    print(f"killed after step {first}")
    for where, step in (("step", first), ("substep", 10), ("eval", 12)):
        ended = start(TOY, json.dumps({"run": run_dir, "kill": [where, step], **setting}))
        assert killed(ended), ended.stdout + ended.stderr
    found = hf_toy.run(run_dir, **setting)
    assert found["started_at"] == 11  # the evaluation belongs to step 12, and is repeated with it
    assert same(found, hf_toy.run(None, **setting))
    assert found["step"] == 20 < 3 * hf_toy.EPOCH, "stopped early"
    assert found["read"] < 2 * hf_toy.EXAMPLES, "trained examples are not read again"
    again = hf_toy.run(run_dir, **setting)
    assert (again["read"], again["step"]) == (0, 20)
    assert torch.equal(again["weights"]["lm_head.weight"], found["weights"]["lm_head.weight"])
    assert "everystep continues at step 11 (from " in caplog.text and "finished at step 20" in caplog.text


def test_sigterm_saves_and_exits(run_dir: str) -> None:
    """SIGTERM between two saves: the process exits with 143, and no step is repeated."""
    ended = start(TOY, json.dumps({"run": run_dir, "every": 1000, "kill": ["term", 7], "epochs": 200}))
    assert ended.returncode == 128 + signal.SIGTERM, ended.stdout + ended.stderr
    step = ckpt.load(run_dir).step
    assert step >= 7
    found = hf_toy.run(run_dir, epochs=200, max_steps=1500)
    # Steps done until the exit are in memory, and may not be in the folder yet.
    assert step <= found["started_at"] < 1500 == found["step"]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Tokens from a dataset without a length."""

    def __iter__(self) -> Any:
        data = hf_toy.Tokens(hf_toy.EXAMPLES)
        return (data[i] for i in range(len(data)))


VARIANTS: dict[str, dict[str, Any]] = {
    "a sampler with a generator, two workers": {
        "accelerator_config": {"use_seedable_sampler": False}, "dataloader_num_workers": 2,
    },
    "grouped by length, logged rarely": {
        "train_sampling_strategy": "group_by_length", "logging_steps": 7, "gradient_accumulation_steps": 3, "stop": 7,
    },
    "every epoch, on a plateau": {
        "eval_strategy": "epoch", "logging_strategy": "epoch", "epochs": 3,
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0},
    },
    "a stream": {"data": Stream(), "max_steps": 12, "stop": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_interrupted_epoch_continues_exactly(run_dir: str, name: str) -> None:
    """With any sampler and any schedule, the run continues exactly where it was."""
    setting = dict(VARIANTS[name])
    at = setting.pop("stop", 11)
    assert hf_toy.run(run_dir, kill=("stop", at), **setting) == {}
    found = hf_toy.run(run_dir, **setting)
    assert found["started_at"] == at
    assert same(found, hf_toy.run(None, **setting))


def test_finished_run_continues_with_more_epochs(run_dir: str) -> None:
    setting: dict[str, Any] = {"lr_scheduler_type": "constant", "eval_steps": 4, "logging_steps": 4}
    assert hf_toy.run(run_dir, kill=("stop", hf_toy.EPOCH), **setting) == {}
    assert hf_toy.run(run_dir, epochs=2, **setting)["step"] == 2 * hf_toy.EPOCH
    assert same(hf_toy.run(run_dir, epochs=3, **setting), hf_toy.run(None, epochs=3, **setting))


def test_random_numbers_of_dataset_log_warning(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """If the run cannot be bit for bit the same, one warning is logged; otherwise none."""

    class Noisy(hf_toy.Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            torch.rand(1)
            return super().__getitem__(index)

    hf_toy.run(f"{run_dir}-1", epochs=1)
    assert "draws random numbers" not in caplog.text
    hf_toy.run(f"{run_dir}-2", epochs=1, data=Noisy(hf_toy.EXAMPLES))
    assert caplog.text.count("draws random numbers") == 1


class Interrupt(TrainerCallback):
    """Raises KeyboardInterrupt at a step, as in a notebook, without closing anything."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 11:
            raise KeyboardInterrupt


def test_interrupted_training_restarts_in_one_process(run_dir: str, undisturbed: dict[str, Any]) -> None:
    """A training ended by an exception does not keep its run locked: the next one continues there, exactly."""
    with pytest.raises(KeyboardInterrupt):
        hf_toy.run(run_dir, more=(Interrupt(),))
    found = hf_toy.run(run_dir)
    assert found["started_at"] == 11 and same(found, undisturbed)


def test_nested_training_does_not_end_outer(run_dir: str) -> None:
    """The outer one of two active Trainers in a thread continues to save."""

    class Inner(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 10:
                assert hf_toy.run(f"{run_dir}-inner", epochs=1)["step"] == 8

    assert hf_toy.run(run_dir, more=(Inner(),))["step"] == 16
    assert (ckpt.load(run_dir).step, ckpt.load(f"{run_dir}-inner").step) == (16, 8)


def test_loading_best_model_keeps_last_step(run_dir: str, tmp_path: Path) -> None:
    """load_best_model_at_end overwrites the model at the end, after the last step was copied."""
    at = Weights(9)
    setting: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 4, "load_best_model_at_end": True, "output_dir": str(tmp_path / "out"),
        "metric_for_best_model": "eval_loss", "greater_is_better": True,
        "epochs": 1, "examples": 36, "width": 256,
    }  # fmt: skip
    found = hf_toy.run(run_dir, more=(at,), **setting)
    stored = ckpt.load(run_dir)
    assert stored.step == 9 and found["best"][1] < 9
    assert all(torch.equal(stored.sub("model")[name], tensor) for name, tensor in at.found.items())
    assert any(not torch.equal(found["weights"][name], tensor) for name, tensor in at.found.items())
    again = hf_toy.run(run_dir, **setting)
    assert again["started_at"] == 9
    assert all(torch.equal(again["weights"][name], tensor) for name, tensor in found["weights"].items())


def test_changed_data_or_model_is_rejected(run_dir: str, undisturbed: dict[str, Any]) -> None:
    """Other data or models raise an error which names the change, without loss; strict=False continues."""
    assert hf_toy.run(run_dir, kill=("stop", 7)) == {}
    for changed, words in (
        ({"examples": 32}, "examples: 30 then, 32 now"),
        ({"seed": 8}, "seed: 7 then, 8 now"),
        ({"per_device_train_batch_size": 4}, "examples_per_step: 4 then, 8 now"),
        ({"gradient_accumulation_steps": 1}, "steps_per_epoch: 8 then, 15 now"),
        ({"width": 16}, "has shape"),
    ):
        with pytest.raises(ckpt.errors.MismatchError, match=words) as caught:
            hf_toy.run(run_dir, **changed)
        ours = [f.name for f in traceback.extract_tb(caught.value.__traceback__) if "/ckpt/" in f.filename]
        assert ours == ["entered"], "only the wrapper's frame of ckpt"
    assert same(hf_toy.run(run_dir), undisturbed)
    found = hf_toy.run(run_dir, examples=32, epochs=3, callback={"strict": False})
    assert (found["started_at"], found["step"]) == (16, 24)


def test_second_callback_and_wrong_arguments_are_rejected(run_dir: str) -> None:
    """The error is raised before training and explains the remedy; `help()` names all arguments."""
    made: Any = ckpt.transformers.CheckpointCallback.__init__
    named = inspect.signature(made).parameters.keys() - {"self", "arguments"}
    assert len(named) > 5 and all(f"`{word}" in made.__doc__ for word in named)
    other = ckpt.transformers.CheckpointCallback(run_dir)
    with pytest.raises(ckpt.errors.UsageError, match="two CheckpointCallbacks"):
        hf_toy.run(run_dir, more=(other,))
    with pytest.raises(ckpt.errors.UsageError, match="use Tier"):
        ckpt.transformers.CheckpointCallback([ckpt.Tier(run_dir)], every=3, memory=None)
    for word, hint in (
        ("save_total_limit", "keep="),
        ("save_steps", "every="),
        ("on_bussy", r"options=ckpt\.Options\(on_busy="),
        ("monitor", "best="),
    ):
        with pytest.raises(ckpt.errors.UsageError, match=f"unknown keyword {word}=: did you mean {hint}"):
            ckpt.transformers.CheckpointCallback(run_dir, **{word: 3})
    for word in ("output_dir", "run"):
        with pytest.raises(ckpt.errors.UsageError, match=f"unknown keyword {word}=: did you mean the first argument"):
            ckpt.transformers.CheckpointCallback(**{word: run_dir})
    assert not Path(run_dir).exists()


def test_newer_of_own_and_trainer_checkpoint_wins(run_dir: str, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """The Trainer may also save and resume: the newer checkpoint wins, and without ours its own is used."""
    setting: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6, "output_dir": str(tmp_path / "out")}
    assert hf_toy.run(run_dir, kill=("stop", 14), **setting) == {}
    theirs = str(tmp_path / "out" / "checkpoint-12")
    assert same(hf_toy.run(run_dir, resume=theirs, **setting), undisturbed)
    assert hf_toy.run(f"{run_dir}-2", resume=theirs, kill=("stop", 14), **setting) == {}
    found = hf_toy.run(f"{run_dir}-2", **setting)
    assert (found["started_at"], found["step"]) == (14, 16)
    with pytest.raises(ckpt.errors.UsageError, match="restored step 12"):
        hf_toy.run(f"{run_dir}-3", kill=("stop", 7))
        hf_toy.run(f"{run_dir}-3", resume=theirs, **setting)


def test_lora_run_stores_only_adapter(run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter's run is small and exact, rejects another base model, and peft reads its export.
    `ckpt export` writes no adapter_config.json, and explains how to get one."""
    assert hf_toy.run(run_dir, lora=True, kill=("stop", 11)) == {}
    with pytest.raises(ckpt.errors.MismatchError, match="frozen base model differs"):
        hf_toy.run(run_dir, lora=True, base=1)
    found = hf_toy.run(run_dir, lora=True)
    assert same(found, hf_toy.run(None, lora=True))
    full, stored = found["bytes"]
    assert stored < full / 10
    names = list(ckpt.load(run_dir, only="model.*"))
    assert names and all("lora_" in name for name in names)

    assert app.main(["restore", run_dir, "--to", str(tmp_path / "weights")]) == 0
    assert "python -m ckpt.transformers RUN --to FOLDER" in " ".join(capsys.readouterr().out.split())
    export_pretrained(run_dir, tmp_path / "adapter")
    read = PeftModel.from_pretrained(hf_toy.model_of(0), tmp_path / "adapter").state_dict()
    assert read.keys() == found["weights"].keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in found["weights"].items())
    whole = hf_toy.run(f"{run_dir}-2", lora=True, epochs=1, callback={"only_trained": False})
    assert whole["bytes"] == [full, full]


PROMPTS: dict[str, dict[str, Any]] = {
    "PrefixTuningConfig": {"prefix_projection": True, "encoder_hidden_size": 8},
    "PromptEncoderConfig": {
        "encoder_reparameterization_type": "LSTM",
        "encoder_hidden_size": 8,
        "encoder_num_layers": 2,
        "encoder_dropout": 0.5,
    },
    "CPTConfig": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "CartridgeConfig": {"num_frozen_tokens": 1},
    "ShiraConfig": {"target_modules": ["q_proj"], "r": 2},
}


@pytest.mark.parametrize("kind", list(PROMPTS))
def test_adapters_with_computed_tensors_are_restored_and_exported(kind: str, tmp_path: Path) -> None:
    """Tensors that peft computes or keeps outside the module are exported, and saving them changes nothing. A restart
    continues from other initial values, which no seed has fixed."""

    def make(seed: int) -> Any:
        base = hf_toy.model_of(0)
        torch.manual_seed(seed)
        prompts = {} if "target_modules" in PROMPTS[kind] else {"num_virtual_tokens": 3}
        model = get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **prompts, **PROMPTS[kind]))
        if kind == "CPTConfig":  # starts with zeros, which its forward does not change
            torch.nn.init.normal_(model.prompt_encoder["default"].delta_embedding.weight)
        return model

    run, whole = str(tmp_path / "run"), make(1)
    wanted = hf_toy.run(None, model=whole, epochs=1)
    assert hf_toy.run(run, model=make(1), epochs=1, kill=("stop", 5)) == {}
    assert hf_toy.run(run, model=make(2), epochs=1)["digest"] == wanted["digest"]
    whole.eval().save_pretrained(tmp_path / "peft")
    export_pretrained(run, tmp_path / "ours")
    export_pretrained(run, tmp_path / "half", dtype="bf16")
    expected, found, half = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("peft", "ours", "half")
    )
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert all(
        half[key].dtype == (torch.bfloat16 if found[key].is_floating_point() else found[key].dtype) for key in half
    )


def test_adapter_that_only_peft_can_compute_is_not_exported_in_part(tmp_path: Path) -> None:
    """VB-LoRA's largest logits are computed when peft saves the adapter."""
    settings = {"target_modules": ["q_proj"], "num_vectors": 16, "vector_length": 8, "save_only_topk_weights": True}
    model = get_peft_model(hf_toy.model_of(0), peft.VBLoRAConfig(task_type="CAUSAL_LM", **settings))
    hf_toy.run(str(tmp_path / "run"), model=model, epochs=0.5)
    with pytest.raises(ckpt.errors.UsageError, match=r"_topk_indices.* cannot be exported.*call model.save_pretrained"):
        export_pretrained(str(tmp_path / "run"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prompt_encoder_around_a_compiled_model_is_saved_and_exported() -> None:
    """PEFT forwards attributes to its base model, which may be a wrapper or contain wrappers."""
    base = hf_toy.model_of(0)
    config = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, encoder_hidden_size=4)
    prompted = get_peft_model(torch.compile(base), config)
    layout = Capture({"m": prompted}).read().layout
    names = {*(spec.name for spec in layout.tensors), *layout.aliases}
    assert {f"m.{name}" for name, _ in prompted.named_parameters() if name.startswith("prompt_encoder")} <= names
    assert any(name.startswith("m.base_model.") for name in names) and not any("_orig_mod" in name for name in names)

    def adapted(compiled: bool) -> PeftModel:
        found = get_peft_model(hf_toy.model_of(0), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        if compiled:
            layer = next(m for m in found.modules() if isinstance(m, torch.nn.ModuleList))
            layer[0] = torch.compile(layer[0])
        return found

    assert is_adapter(adapted(True)) and not is_adapter(Forwards(adapted(False)))
    assert trained(adapted(True)).keys() == trained(adapted(False)).keys()
    assert adapter_tensors(adapted(True)).keys() == adapter_tensors(adapted(False)).keys()


class Forwards(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, torch.nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0")


class Weights(TrainerCallback):
    """Copies the weights at a step."""

    def __init__(self, step: int) -> None:
        self.step, self.found = step, dict[str, torch.Tensor]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            self.found = {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_reads_an_export(run_dir: str, tmp_path: Path, tied: bool) -> None:
    """It reads weights of any step, tied or not, cast or not, with config and tokenizer. No file is ever replaced."""
    at = Weights(5)
    found = hf_toy.run(run_dir, tied=tied, epochs=1, tokenizer=tokenizer(), more=(at,))
    for step, wanted in ((None, found["weights"]), (5, at.found)):
        folder = tmp_path / f"export-{step}"
        export_pretrained(run_dir, folder, step=step)
        model = AutoModelForCausalLM.from_pretrained(folder)
        read = model.state_dict()
        assert read.keys() == wanted.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in wanted.items())
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert AutoTokenizer.from_pretrained(folder)("w5 w7").input_ids == [5, 7]
    with pytest.raises(ckpt.errors.UsageError, match="exists and is never replaced"):
        export_pretrained(run_dir, tmp_path / "export-5")


NO_TRANSFORMERS = """import sys
sys.modules["transformers"] = None
import ckpt.transformers.__main__ as command
sys.exit(command.main())"""


def test_export_command_casts_and_reports_errors(run_dir: str, tmp_path: Path) -> None:
    """Errors are one line with exit code 2. Ctrl-C leaves no partial file. transformers is not needed."""
    hf_toy.run(run_dir, epochs=1)
    with ckpt.Checkpointer({"x": 1}, f"{run_dir}-2") as cp:
        cp.step(1)
    target = ("--to", tmp_path / "bf16", "--dtype", "bf16", "--step", "8")
    line = stopped("export.window@1", run_dir, *target, main="ckpt.transformers.__main__")
    assert line == "ckpt: stopped. Nothing was written yet: repeat the command to continue from here"
    ended = start("-c", NO_TRANSFORMERS, run_dir, *target)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert model.dtype == torch.bfloat16
    wanted = ckpt.load(run_dir)["model.lm_head.weight"].to(torch.bfloat16)
    assert torch.equal(model.lm_head.weight, wanted)
    for arguments, words in (
        ((f"{run_dir}-2", "--to", tmp_path / "no"), "was not saved by ckpt.transformers"),
        ((run_dir, "--to", tmp_path / "bf16"), "is never replaced"),
        ((run_dir, "--to", tmp_path / "no", "--step", "4"), "step 4"),
    ):
        with pytest.raises(ckpt.CheckpointError, match=words):
            command.main([str(a) for a in arguments], standalone_mode=False)
    assert not (tmp_path / "no").exists()


def test_two_ranks_continue_exactly(run_dir: str) -> None:
    """Two ranks with DDP are killed during accumulation in the second epoch; the result is the same."""
    setting = {"ddp_backend": "gloo"}

    def ranks(*runs: dict[str, Any]) -> list[subprocess.CompletedProcess[str]]:
        return launch(2, "import hf_toy; hf_toy.main()", *map(json.dumps, runs), port=free_port())

    ended = ranks({"run": run_dir, "kill": ["substep", 6], **setting})
    assert all(one.returncode for one in ended) and any(map(killed, ended)), ended
    found = []
    for ended in ranks({"run": run_dir, **setting}, {"run": None, **setting}):
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found.append([json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"')])
    for resumed, alone in found:
        assert resumed["started_at"] == found[0][0]["started_at"] in (5, 6) and alone["started_at"] is None
        assert (resumed["digest"], resumed["log"]) == (alone["digest"], alone["log"])


def lines(ended: subprocess.CompletedProcess[str], beginning: str) -> list[str]:
    return [line for line in ended.stdout.splitlines() if line.startswith(beginning)]


@pytest.mark.parametrize("script", ["lora.py", pytest.param("hf_finetune.py", marks=pytest.mark.long)])
def test_examples_continue_after_a_kill(run_dir: str, script: str) -> None:
    """Killed and restarted, they end with the weights of a run without kills."""
    short = ("--steps", "24")
    ended = start(EXAMPLES / script, run_dir, "--kill-at", "13", *short)
    assert killed(ended), ended.stderr
    resumed = start(EXAMPLES / script, run_dir, *short)
    assert resumed.returncode == 0, resumed.stderr
    (begun,) = lines(resumed, "starts at")
    assert begun in ("starts at step 12", "starts at step 13"), "at most the step being staged is lost"
    alone = start(EXAMPLES / script, f"{run_dir}-2", *short)
    assert lines(resumed, "weights") == lines(alone, "weights") != []
    assert lines(resumed, "loss")[-1] == lines(alone, "loss")[-1]


def best_of(log: list[dict[str, Any]], run: str, *, worst: bool = False) -> list[int]:
    """Return the two best steps of the Trainer's log, after checking that the run pins only these and their scores."""
    scores = {one["step"]: one["eval_loss"] for one in log if "eval_loss" in one and one["step"] > 0}
    first, second = sorted(scores, key=lambda step: scores[step], reverse=worst)[:2]
    assert len(scores) > 2 and {one.step: one.pinned for one in ckpt.Run(run).list() if one.pinned} == {
        first: f"best, eval_loss={scores[first]!r}",
        second: f"eval_loss={scores[second]!r}",
    }
    assert ckpt.load(run, best=True).step == first
    return [first, second]


def test_best_steps_by_evaluation_stay(run_dir: str) -> None:
    """The best by the Trainer's log stay, whatever `keep` is. An evaluation before the first step does not count."""
    best = {"monitor": "eval_loss", "mode": "max", "keep": 2}
    found = hf_toy.run(run_dir, every=1, best=best, callback={"keep": 2}, eval_on_start=True)
    assert best_of(found["log"], run_dir, worst=True)


def test_best_steps_survive_kills(run_dir: str) -> None:
    """Kills in a step and in an evaluation, with unscheduled best steps: the weights are the evaluated ones."""
    constant = {"lr_scheduler_type": "constant"}
    setting: dict[str, Any] = {
        "every": 7,
        "best": {"monitor": "eval_loss", "keep": 2},
        "callback": {"keep": 2},
    } | constant
    for where, step in (("step", 9), ("eval", 16)):
        ended = start(TOY, json.dumps({"run": run_dir, "kill": [where, step], **setting}))
        assert killed(ended), ended.stdout + ended.stderr
    found = hf_toy.run(run_dir, **setting)
    assert found["started_at"] > 0
    best, _ = best_of(found["log"], run_dir)
    whole = hf_toy.run(None, max_steps=best, **constant)["weights"]
    kept = ckpt.load(run_dir, best=True)
    assert all(torch.equal(kept[f"model.{name}"], tensor) for name, tensor in whole.items())
    model = hf_toy.model_of(1)  # as in the guide, instead of load_best_model_at_end
    model.load_state_dict(ckpt.load(run_dir, best=True).sub("model").all())
    export_pretrained(f"{run_dir}@best", f"{run_dir}-best")
    exported = AutoModelForCausalLM.from_pretrained(f"{run_dir}-best").state_dict()
    for found_again in (model.state_dict(), exported):
        assert all(torch.equal(found_again[name], tensor) for name, tensor in whole.items())
