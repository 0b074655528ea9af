"""Hugging Face's Trainer with our callback: killed anywhere, it goes on as if nothing had been."""

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

from peft import LoraConfig, PeftModel, PromptEncoderConfig, get_peft_model
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

pytestmark = pytest.mark.usefixtures("one_thread", "imported")
SAME = ("digest", "log", "loss", "step", "best")
TOY = REPO / "tests" / "lib" / "hf_toy.py"
EXAMPLES = REPO / "examples"


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    with warm("transformers.trainer", "peft"):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As in the processes that are killed: OpenMP's threads starve each other where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Weights, optimizer, random numbers and logs, bit for bit."""
    assert {k: found[k] for k in SAME} == {k: wanted[k] for k in SAME}
    return True


def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A script."""
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
    """What becomes of the toy as it is, without us."""
    return hf_toy.run(None)


def test_killed_at_a_step_in_accumulation_and_in_evaluation(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL at any of these leaves weights, logs, best metric and EarlyStopping as if it had never been."""
    setting: dict[str, Any] = {"patience": 4, "epochs": 3}
    first = random.randrange(2, 8)
    print(f"killed after step {first}")
    for where, step in (("step", first), ("substep", 10), ("eval", 12)):
        ended = start(TOY, json.dumps({"run": run_dir, "kill": [where, step], **setting}))
        assert killed(ended), ended.stdout + ended.stderr
    found = hf_toy.run(run_dir, **setting)
    assert found["started_at"] == 11  # the evaluation belongs to step 12, and is done again with it
    assert same(found, hf_toy.run(None, **setting))
    assert found["step"] == 20 < 3 * hf_toy.EPOCH, "stopped early"
    assert found["read"] < 2 * hf_toy.EXAMPLES, "what was trained on is not read again"
    again = hf_toy.run(run_dir, **setting)
    assert (again["read"], again["step"]) == (0, 20)
    assert torch.equal(again["weights"]["lm_head.weight"], found["weights"]["lm_head.weight"])
    assert "everystep continues at step 11 (from " in caplog.text and "finished at step 20" in caplog.text


def test_sigterm_saves_and_leaves(run_dir: str) -> None:
    """SIGTERM between two saves: the process leaves with 143, and nothing is done twice."""
    ended = start(TOY, json.dumps({"run": run_dir, "every": 1000, "kill": ["term", 7], "epochs": 200}))
    assert ended.returncode == 128 + signal.SIGTERM, ended.stdout + ended.stderr
    step = ckpt.load(run_dir).step
    assert step >= 7
    found = hf_toy.run(run_dir, epochs=200, max_steps=step + 50)
    # Steps that were done until it left are in memory, and perhaps not in the folder yet.
    assert step <= found["started_at"] < step + 50 and found["step"] == step + 50


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Tokens without a length."""

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
def test_interrupted_in_the_second_epoch(run_dir: str, name: str) -> None:
    """However batches are drawn, and whatever is due when, the run goes on exactly where it was."""
    setting = dict(VARIANTS[name])
    at = setting.pop("stop", 11)
    assert hf_toy.run(run_dir, kill=("stop", at), **setting) == {}
    found = hf_toy.run(run_dir, **setting)
    assert found["started_at"] == at
    assert same(found, hf_toy.run(None, **setting))


def test_stopped_at_the_end_of_an_epoch_and_prolonged(run_dir: str) -> None:
    """A run that is finished goes on when it is to be longer, as if it had been so from the beginning."""
    setting: dict[str, Any] = {"lr_scheduler_type": "constant", "eval_steps": 4, "logging_steps": 4}
    assert hf_toy.run(run_dir, kill=("stop", hf_toy.EPOCH), **setting) == {}
    assert hf_toy.run(run_dir, epochs=2, **setting)["step"] == 2 * hf_toy.EPOCH
    assert same(hf_toy.run(run_dir, epochs=3, **setting), hf_toy.run(None, epochs=3, **setting))


def test_random_numbers_of_a_dataset_are_warned_of(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the run cannot be the same bit for bit, that is said, once; and not where it can."""

    class Noisy(hf_toy.Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            torch.rand(1)
            return super().__getitem__(index)

    hf_toy.run(f"{run_dir}-1", epochs=1)
    assert "draws random numbers" not in caplog.text
    hf_toy.run(f"{run_dir}-2", epochs=1, data=Noisy(hf_toy.EXAMPLES))
    assert caplog.text.count("draws random numbers") == 1


class Interrupt(TrainerCallback):
    """As Ctrl-C does in a notebook, at a step: nobody closes anything."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 11:
            raise KeyboardInterrupt


def test_interrupted_and_started_again_in_one_process(run_dir: str, undisturbed: dict[str, Any]) -> None:
    """A training that an exception has ended does not hold its place: the next one goes on there, exactly."""
    with pytest.raises(KeyboardInterrupt):
        hf_toy.run(run_dir, more=(Interrupt(),))
    found = hf_toy.run(run_dir)
    assert found["started_at"] == 11 and same(found, undisturbed)


def test_a_training_inside_of_another_ends_only_itself(run_dir: str) -> None:
    """Two Trainers in one thread, both under way: the outer one goes on saving."""

    class Inner(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 10:
                assert hf_toy.run(f"{run_dir}-inner", epochs=1)["step"] == 8

    assert hf_toy.run(run_dir, more=(Inner(),))["step"] == 16
    assert (ckpt.load(run_dir).step, ckpt.load(f"{run_dir}-inner").step) == (16, 8)


def test_the_best_weights_do_not_take_the_place_of_the_last(run_dir: str, tmp_path: Path) -> None:
    """load_best_model_at_end writes over the model when all is done: the last step is copied by then."""
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


def test_what_has_changed_is_refused(run_dir: str, undisturbed: dict[str, Any]) -> None:
    """Other data or another model: an error that says what, and nothing is lost; strict=False goes on."""
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
        assert ours == ["entered"], "none of our frames except the wrapper's"
    assert same(hf_toy.run(run_dir), undisturbed)
    found = hf_toy.run(run_dir, examples=32, epochs=3, callback={"strict": False})
    assert (found["started_at"], found["step"]) == (16, 24)


def test_two_callbacks_and_wrong_arguments_are_refused(run_dir: str) -> None:
    """Before anything is trained, with an error that says what to do; `help()` names all arguments."""
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


def test_beside_the_trainers_own_checkpoints(run_dir: str, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """The Trainer may save and resume by itself: what is newer wins, and with nothing of ours its own is taken."""
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


def test_lora_stores_what_is_trained(run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter's run is small, exact, refuses another base, and peft reads what is exported. `ckpt export`, which
    makes no adapter_config.json, says how to have one."""
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


def test_prompt_encoder_around_a_compiled_model_is_saved_and_exported() -> None:
    """PEFT forwards attributes to its base model. That one may be a wrapper, or have wrappers in it."""
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
    """Copies them at a step."""

    def __init__(self, step: int) -> None:
        self.step, self.found = step, dict[str, torch.Tensor]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            self.found = {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_reads_an_export(run_dir: str, tmp_path: Path, tied: bool) -> None:
    """Weights of any step, tied or not, cast or not, with config and tokenizer; nothing is ever replaced."""
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


def test_the_export_command(run_dir: str, tmp_path: Path) -> None:
    """It casts, and its errors are one line and exit code 2. Ctrl-C leaves nothing half. It needs no transformers."""
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


def test_two_ranks(run_dir: str) -> None:
    """Two ranks with DDP: killed in the middle of accumulation in the second epoch, and the same in the end."""
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
def test_the_examples(run_dir: str, script: str) -> None:
    """Killed and started again, they end with the weights that they have when they were never killed."""
    short = ("--steps", "24")
    ended = start(EXAMPLES / script, run_dir, "--kill-at", "13", *short)
    assert killed(ended), ended.stderr
    resumed = start(EXAMPLES / script, run_dir, *short)
    assert resumed.returncode == 0, resumed.stderr
    (begun,) = lines(resumed, "starts at")
    assert begun in ("starts at step 12", "starts at step 13"), "at most the step that was being staged is lost"
    alone = start(EXAMPLES / script, f"{run_dir}-2", *short)
    assert lines(resumed, "weights") == lines(alone, "weights") != []
    assert lines(resumed, "loss")[-1] == lines(alone, "loss")[-1]


def best_of(log: list[dict[str, Any]], run: str, *, worst: bool = False) -> list[int]:
    """The two best steps by the Trainer's own log, checked: just these stay in the run, with what they scored."""
    scores = {one["step"]: one["eval_loss"] for one in log if "eval_loss" in one and one["step"] > 0}
    first, second = sorted(scores, key=lambda step: scores[step], reverse=worst)[:2]
    assert len(scores) > 2 and {one.step: one.pinned for one in ckpt.Run(run).list() if one.pinned} == {
        first: f"best, eval_loss={scores[first]!r}",
        second: f"eval_loss={scores[second]!r}",
    }
    assert ckpt.load(run, best=True).step == first
    return [first, second]


def test_the_best_by_evaluation_stay(run_dir: str) -> None:
    """Whatever `keep` says; by the numbers of the Trainer's own log. An evaluation before the first step is of none."""
    best = {"monitor": "eval_loss", "mode": "max", "keep": 2}
    found = hf_toy.run(run_dir, every=1, best=best, callback={"keep": 2}, eval_on_start=True)
    assert best_of(found["log"], run_dir, worst=True)


def test_the_best_survive_kills(run_dir: str) -> None:
    """In a step and in an evaluation, of steps that no cadence wanted; the weights are those that were evaluated."""
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
    model = hf_toy.model_of(1)  # as the guide has it, instead of load_best_model_at_end
    model.load_state_dict(ckpt.load(run_dir, best=True).sub("model").all())
    export_pretrained(f"{run_dir}@best", f"{run_dir}-best")
    exported = AutoModelForCausalLM.from_pretrained(f"{run_dir}-best").state_dict()
    for found_again in (model.state_dict(), exported):
        assert all(torch.equal(found_again[name], tensor) for name, tensor in whole.items())
