"""Continue trainings whose Trainer, callbacks or adapters keep state of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import AdaLoraConfig, LoraConfig, TrainableTokensConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ckpt
from ckpt.errors import MismatchError
from ckpt.transformers import CheckpointCallback
from ckpt.transformers.pretrained import trained
from ckpt.transformers.trainer_internals import LogHistory
from run_files import data_files


class Stop(Exception):
    """End a training by an exception."""


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Stop


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int = 48) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def arguments(out: Path, **more: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(out), "per_device_train_batch_size": 8, "num_train_epochs": 2, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3, "logging_steps": 4,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **more})


def callback(run: str, **more: Any) -> CheckpointCallback:
    return CheckpointCallback([ckpt.Tier(run, every=1)], memory=None, **more)


def train(trainer: Trainer) -> Trainer:
    try:
        trainer.train()
    except Stop:
        trainer.train_ended = False  # type: ignore[attr-defined]
    return trainer


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


# -- batch sizes that the Trainer finds --


class Fits(Trainer):
    """A trainer whose device has room for `most` examples from step `since` on."""

    most, since = 2, 0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if len(inputs["input_ids"]) > self.most and self.state.global_step >= self.since:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *rest, **more)


def test_found_batch_size_is_kept_after_restart(tmp_path: Path) -> None:
    class Roomier(Fits):
        most = 6  # found before 2: each size that is too large costs a garbage collection

    args, run = arguments(tmp_path, auto_find_batch_size=True), str(tmp_path / "run")
    whole = train(Roomier(llama(), args, train_dataset=Tokens()))
    train(Roomier(llama(), args, train_dataset=Tokens(), callbacks=[callback(run), StopAt(9)]))
    again = train(Roomier(llama(), args, train_dataset=Tokens(), callbacks=[callback(run)]))
    assert again.state.global_step == whole.state.global_step == 16
    assert equal(again.model, whole.model)


def test_batch_size_that_shrinks_in_mid_training_continues_the_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 1 to 4 take 8 examples each. The 16 remaining examples of the epoch are trained in batches of 2."""
    data = Tokens()
    trainer = Fits(
        llama(),
        arguments(tmp_path, auto_find_batch_size=True, num_train_epochs=1),
        train_dataset=data,
        callbacks=[callback(str(tmp_path / "run"))],
    )
    trainer.since = 4
    train(trainer)
    assert trainer.state.global_step == 4 + 8
    assert trainer.state.epoch == 1.0
    assert "auto_find_batch_size chose a batch size of 2, but the run had 8" in caplog.text


def test_changed_batch_size_is_refused_without_auto_find(tmp_path: Path) -> None:
    """Negative control: the batch size stays a setting of the script."""
    run = str(tmp_path / "run")
    train(Trainer(llama(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[callback(run), StopAt(3)]))
    other = arguments(tmp_path, per_device_train_batch_size=4)
    with pytest.raises(ckpt.errors.MismatchError, match="examples_per_step"):
        Trainer(llama(), other, train_dataset=Tokens(), callbacks=[callback(run)]).train()


# -- objects outside the Trainer --


class Average(TrainerCallback):
    """Average the weights after each step, as many training scripts do."""

    def __init__(self, model: nn.Module) -> None:
        self.ema = copy.deepcopy(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.ema.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)


def test_object_in_state_is_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def start(run: str | None, stop: int = -1) -> Average:
        model = llama()
        average = Average(model)
        ours = [] if run is None else [callback(run, state={"ema": average.ema})]
        train(Trainer(model, arguments(tmp_path), train_dataset=Tokens(), callbacks=[average, *ours, StopAt(stop)]))
        return average

    run = str(tmp_path / "run")
    whole = start(None)
    start(run, 5)
    assert equal(start(run).ema, whole.ema)
    assert "which the checkpoint does not contain" not in caplog.text


class Late(TrainerCallback):
    """Create the averages when training begins, in one of the common forms."""

    def __init__(self, form: str) -> None:
        self.form, self.written = form, form != "untouched"

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        copies = {name: param.detach().clone() for name, param in model.named_parameters()}
        forms = {"module": copy.deepcopy(model), "untouched": [*copies.values()]}
        self.ema: Any = forms.get(self.form, copies)
        self.live, self.losses = list(model.parameters()), [torch.zeros(())]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.losses = [torch.zeros(())]
        for name, theirs in model.named_parameters():
            if self.form == "replaced":
                self.ema[name] = self.ema[name].lerp(theirs.detach(), 0.1)
        parts = self.ema.parameters() if self.form == "module" else ()
        with torch.no_grad():
            for mine, theirs in zip(parts, model.parameters(), strict=False):
                mine.lerp_(theirs, 0.1)


@pytest.mark.parametrize("form", ["module", "replaced", "untouched"])
def test_averages_that_a_callback_makes_later_are_named_once(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = [Late(form), callback(str(tmp_path / "run"))]
    train(Trainer(llama(), arguments(tmp_path, max_steps=5), train_dataset=Tokens(), callbacks=ours))
    warnings = [one.getMessage() for one in caplog.records if "does not contain" in one.getMessage()]
    assert len(warnings) == (form != "untouched") and all("Late.ema" in one for one in warnings)


class Measuring(Trainer):
    """A trainer with metrics of types that JSON lacks."""

    def evaluation_loop(self, *given: Any, **more: Any) -> Any:
        found = super().evaluation_loop(*given, **more)
        array, key = np.array([0.5, 0.25]), ("a", 1)
        values = {"f1": array, "tensor": torch.ones(2), "one": np.float32(0.5), "other": {1}, "keys": {key: 1}}
        found.metrics.update({f"eval_{name}": value for name, value in values.items()})
        return found


def test_metrics_that_json_lacks_are_logged_and_restored(tmp_path: Path) -> None:
    def start(run: str, stop: int = -1) -> list[dict[str, Any]]:
        args = arguments(tmp_path, eval_strategy="steps", eval_steps=3)
        ours = [callback(run), StopAt(stop)]
        trainer = Measuring(llama(), args, train_dataset=Tokens(), eval_dataset=Tokens(8), callbacks=ours)
        return [one for one in train(trainer).state.log_history if "eval_loss" in one]

    run = str(tmp_path / "run")
    start(run, 5)
    first, *rest = start(run)
    assert len(rest) == 3 and first["eval_keys"] == "{('a', 1): 1}"
    assert LogHistory.parse(LogHistory().read([{"a": np.eye(2), "b": np.int64(3), "c": torch.ones(2), "d": {1}}])) == [
        {"a": [[1.0, 0.0], [0.0, 1.0]], "b": 3, "c": [1.0, 1.0], "d": "{1}"}
    ]


# -- TRL --


class Reusing(Trainer):
    """Keep the attributes of TRL's GRPOTrainer: generations that several steps reuse, counters, metrics."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._step, self._total_train_tokens, self._current_train_step_time = 0, 0, 0.0
        self.entropy_coef, self._last_world_entropy = 0.0, float("inf")
        self._buffered_inputs: Any = None
        self._metrics: dict[str, dict[str, list[float]]] = {"train": {}, "eval": {}}

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if self._step % 4 == 0 or self._buffered_inputs is None:
            tokens = torch.randint(0, 64, (4, 6 + self._step % 3))
            self._buffered_inputs = [{"input_ids": row[None], "labels": row[None], "images": None} for row in tokens]
        inputs = self._buffered_inputs[self._step % 4]
        self._step += 1
        self._total_train_tokens += inputs["input_ids"].numel()
        self._last_world_entropy = 1 / self._step
        self.entropy_coef += 0.001 * self._last_world_entropy
        loss = super().training_step(model, inputs, *rest, **more)
        self._metrics["train"].setdefault("loss_again", []).append(float(loss))
        return loss

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        rows = self._metrics["train"]
        logs.update({key: sum(values) / len(values) for key, values in rows.items()}, tokens=self._total_train_tokens)
        rows.clear()
        super().log(logs, *rest)


Reusing.__module__ = "trl.trainer.grpo_trainer"


def test_trl_generations_counters_and_metrics_are_restored(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    whole = train(Reusing(llama(), arguments(tmp_path), train_dataset=Tokens()))
    for stop in (3, 6, 11):
        train(Reusing(llama(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[callback(run), StopAt(stop)]))
    again = train(Reusing(llama(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[callback(run)]))
    assert equal(again.model, whole.model)
    for name in ("_total_train_tokens", "entropy_coef", "_last_world_entropy"):
        assert getattr(again, name) == getattr(whole, name)

    def kept(trainer: Trainer) -> list[tuple[Any, ...]]:
        return [(one["loss_again"], one["tokens"]) for one in trainer.state.log_history if "loss_again" in one]

    assert kept(again) == kept(whole)


def test_reference_model_that_is_synchronised_is_restored(tmp_path: Path) -> None:
    class Referring(Reusing):
        """Move the reference model towards the model, as TRL does with `sync_ref_model=True`."""

        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.ref_model = copy.deepcopy(self.model)
            self.args.sync_ref_model = True

        def training_step(self, *given: Any, **more: Any) -> Any:
            with torch.no_grad():
                for mine, theirs in zip(self.ref_model.parameters(), self.model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.5)
            return super().training_step(*given, **more)

    run = str(tmp_path / "run")
    whole = train(Referring(llama(), arguments(tmp_path), train_dataset=Tokens()))
    train(Referring(llama(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[callback(run), StopAt(7)]))
    again = train(Referring(llama(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[callback(run)]))
    assert equal(again.ref_model, whole.ref_model)


# -- PEFT --


class Allocate(TrainerCallback):
    """Call AdaLoRA's allocator as its documentation says: after backward, before zero_grad."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.base_model.update_and_allocate(state.global_step)


def adapted(folder: Path, config: Any, run: str | None, stop: int) -> Trainer:
    """Train an adapter until a step, or to the end. `run` None: without our callback."""
    model = get_peft_model(llama(), config)
    ours = [] if run is None else [callback(run)]
    callbacks = [Allocate(), *ours, StopAt(stop)]
    return train(Trainer(model, arguments(folder), train_dataset=Tokens(), callbacks=callbacks))


def test_adalora_allocator_is_restored(tmp_path: Path) -> None:
    def start(run: str | None, stop: int = -1) -> Trainer:
        config = AdaLoraConfig(
            init_r=4, target_r=2, tinit=2, tfinal=2, deltaT=1, total_step=12, target_modules=["q_proj", "v_proj"]
        )
        return adapted(tmp_path, config, run, stop)

    run = str(tmp_path / "run")
    whole = start(None)
    start(run, 5)
    start(run, 11)
    again = start(run)
    assert equal(again.model, whole.model)
    patterns = [one.model.peft_config["default"].rank_pattern for one in (again, whole)]
    assert patterns[0] == patterns[1] and patterns[0]


@pytest.mark.parametrize("kind", ["head", "second adapter", "token", "other base"])
def test_random_weights_that_peft_freezes_are_accepted(tmp_path: Path, kind: str) -> None:
    """A new head's frozen original and a reference adapter differ in each process, since no seed precedes them."""

    def start(number: int, stop: int = -1) -> Trainer:
        model = llama()
        with torch.no_grad():
            if kind in ("head", "other base"):
                torch.manual_seed(number)
                (model.lm_head if kind == "head" else model.model.layers[0].mlp.up_proj).weight.normal_()
        saved = {"modules_to_save": ["lm_head"]} if kind == "head" else {}
        torch.manual_seed(5)
        config = LoraConfig(r=2, target_modules=["q_proj"], **saved)
        model = get_peft_model(model, TrainableTokensConfig(token_indices=[1, 2]) if kind == "token" else config)
        if kind == "second adapter":
            torch.manual_seed(number)
            model.add_adapter("ref", config)
        return train(Trainer(model, arguments(tmp_path), train_dataset=Tokens(), callbacks=[ours(), StopAt(stop)]))

    def ours() -> CheckpointCallback:
        return callback(str(tmp_path / "run"))

    first = start(1, 5)
    if kind == "other base":
        with pytest.raises(MismatchError, match="frozen base model differs"):
            start(2)
        return
    again = start(2)
    assert again.state.global_step == 12
    references = [[p for n, p in one.model.named_parameters() if ".ref." in n] for one in (first, again)]
    assert bool(references[0]) == (kind == "second adapter")
    assert all(torch.equal(x, y) for x, y in zip(*references, strict=True))


def test_base_that_peft_rewrites_at_random_is_restored(tmp_path: Path) -> None:
    """Each process draws other numbers for it. A reproducible base is not stored."""

    def start(number: int, run: str | None, stop: int = -1) -> Trainer:
        model = llama()
        torch.manual_seed(number)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa_niter_4"))
        ours = [] if run is None else [callback(run)]
        return train(Trainer(model, arguments(tmp_path), train_dataset=Tokens(), callbacks=[*ours, StopAt(stop)]))

    run = str(tmp_path / "run")
    whole = start(1, None)
    start(1, run, 5)
    again = start(2, run)
    assert again.state.global_step == 12 and equal(again.model, whole.model)
    assert sum("base_layer" in name for name in ckpt.load(run, only="model.*")) == 1
    same = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    assert not any("base_layer" in name for name in trained(same))


# -- parameters that callbacks freeze and unfreeze --


class Switch(TrainerCallback):
    """Freeze or unfreeze the first layer once, as fine-tuning scripts do."""

    def __init__(self, flag: bool, at: int, *, begins: bool = False, back: int = -1) -> None:
        self.flag, self.at, self.begins, self.back = flag, at, begins, back

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.begins:
            model.model.layers[0].requires_grad_(not self.flag)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.begins and state.global_step < 6:  # also in the epoch that a restart repeats
            model.model.layers[0].requires_grad_(not self.flag)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in (self.at, self.back):
            model.model.layers[0].requires_grad_(self.flag == (state.global_step == self.at))


def ours_of(trainer: Trainer) -> CheckpointCallback:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, CheckpointCallback))


class AllStepped(Trainer):
    def create_optimizer(self, *rest: Any, **more: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return self.optimizer


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        ("frozen", 9),
        ("unfrozen", 9),
        ("unfrozen after on_train_begin", 5),
        ("only trained, back", 9),
        ("only trained, older", 9),
    ],
)
def test_parameters_frozen_by_a_callback_stay_frozen(tmp_path: Path, kind: str, stop: int) -> None:
    """Restarts happen in the epoch of the change and in the next one."""

    def start(run: str | None, stop: int = -1) -> Trainer:
        model = llama()
        only_trained = kind.startswith("only trained")
        if kind == "unfrozen" or only_trained:
            model.model.layers[0].requires_grad_(False)
        back = 5 if kind == "only trained, back" else -1
        switch = Switch(kind != "frozen", 3, begins=kind == "unfrozen after on_train_begin", back=back)
        ours = [] if run is None else [callback(run, only_trained=only_trained)]
        args = arguments(tmp_path)
        return train(AllStepped(model, args, train_dataset=Tokens(), callbacks=[switch, *ours, StopAt(stop)]))

    run = str(tmp_path / "run")
    whole = start(None)
    first = ours_of(start(run, stop)).checkpointer
    assert first is not None
    if kind == "only trained, older":  # the next start finds only an older step, from before the change
        first.close()
        for path in [path for step in range(3, 10) for path in data_files(tmp_path / "run", step)]:
            path.write_bytes(bytes(path.stat().st_size))
    again = start(run)
    assert again.state.global_step == 12 and equal(again.model, whole.model)
    restored = ours_of(again).restored
    assert restored is not None and restored.step == (2 if kind == "only trained, older" else stop)
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad
    saved = ckpt.load(run)
    for name, parameter in again.model.named_parameters():
        assert torch.equal(saved[f"model.{name}"], parameter)


def test_restart_adds_no_evaluation_before_its_first_step(tmp_path: Path) -> None:
    def start(run: str | None, stop: int = -1) -> list[tuple[int, bool]]:
        args = arguments(tmp_path, eval_on_start=True, eval_strategy="steps", eval_steps=5)
        ours = [] if run is None else [callback(run)]
        trainer = Trainer(
            llama(), args, train_dataset=Tokens(), eval_dataset=Tokens(8), callbacks=[*ours, StopAt(stop)]
        )
        return [(entry["step"], "eval_loss" in entry) for entry in train(trainer).state.log_history]

    run = str(tmp_path / "run")
    whole = start(None)
    start(run, 7)
    assert start(run) == whole and (0, True) in whole and (10, True) in whole
