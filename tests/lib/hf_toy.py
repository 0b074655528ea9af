"""A tiny fine-tuning by Hugging Face's Trainer, that tests start, kill and start again.

    python hf_toy.py '{"run": "/tmp/run", "kill": ["step", 7]}'

Prints one JSON line at the end: a digest of everything that was trained, the log, and what the callback did.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import ckpt.transformers

EXAMPLES, EPOCH = 30, 8  # of one epoch: examples, and steps, of which the last is smaller
UNLIKE = ("runtime", "per_second")  # parts of names in the log that say how quick it was


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens. Counts which were read."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 64, (count, 12), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Stop(Exception):
    """Raised in the middle of training, where a process of its own to be killed would take long."""


class Kill(TrainerCallback):
    """Ends the training after some steps: SIGKILL ("step"), during gradient accumulation ("substep") or evaluation
    ("eval"); SIGTERM ("term"); an exception ("stop")."""

    def __init__(self, where: str, at: int, checkpointer: Any) -> None:
        self.where, self.at, self.checkpointer = where, at, checkpointer

    def _die(self) -> None:
        cp = self.checkpointer.checkpointer
        if cp is not None:
            cp.wait(60.0)
        os.write(1, b"\nkilled\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.where == "step" and state.global_step == self.at:
            self._die()
        if self.where == "term" and state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.where == "stop" and state.global_step == self.at:
            raise Stop

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.where == "substep" and state.global_step == self.at:
            self._die()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.where == "eval" and state.global_step >= self.at:
            self._die()


def model_of(seed: int = 0, *, lora: bool = False, tied: bool = False, width: int = 32, dropout: float = 0.1) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=dropout, tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    return model


def digest(trainer: Trainer) -> str:
    """Return a digest of every bit of the weights and of the optimizer."""
    total = hashlib.sha256()
    for name, tensor in trainer.model.state_dict().items():
        total.update(name.encode() + _bytes(tensor))
    for values in trainer.optimizer.state_dict()["state"].values():
        for value in values.values():
            total.update(_bytes(value) if isinstance(value, torch.Tensor) else str(value).encode())
    total.update(json.dumps(trainer.lr_scheduler.state_dict()["last_epoch"]).encode())
    total.update(torch.get_rng_state().numpy().tobytes())
    return total.hexdigest()


def _bytes(tensor: Any) -> bytes:
    """Return the bytes of this rank's part."""
    mine = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bytes(mine.detach().contiguous().numpy().tobytes())


def log_of(trainer: Trainer) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in entry.items() if not any(part in k for part in UNLIKE)} for entry in trainer.state.log_history
    ]


def run(
    run: str | None,
    *,
    kill: tuple[str, int] | None = None,
    every: int = 5,
    examples: int = EXAMPLES,
    epochs: float = 2,
    lora: bool = False,
    tied: bool = False,
    width: int = 32,
    base: int = 0,
    patience: int = 0,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    resume: str | None = None,
    best: dict[str, Any] | None = None,
    callback: dict[str, Any] | None = None,
    more: tuple[TrainerCallback, ...] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Train, and say what came of it. `run`: None trains without checkpoints."""
    callbacks: list[TrainerCallback] = list(more)
    ours = None
    if run is not None:
        scored = {} if best is None else {"best": ckpt.Best(**best)}
        ours = ckpt.transformers.CheckpointCallback(run, every=every, **(callback or {}), **scored)
        callbacks.append(ours)
    if kill is not None:
        callbacks.append(Kill(kill[0], kill[1], ours))
    if patience:
        callbacks.append(EarlyStoppingCallback(patience))
    data = Tokens(examples) if data is None else data
    with tempfile.TemporaryDirectory() as folder:
        chosen = {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": epochs,
            "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no", "report_to": [],
            "learning_rate": 1e-2, "disable_tqdm": True, "use_cpu": True, "seed": 7, "dataloader_pin_memory": False,
            "include_num_input_tokens_seen": "all",
            **settings,
        }  # fmt: skip
        if patience:
            chosen |= {"metric_for_best_model": "eval_loss", "greater_is_better": False, "save_strategy": "best"}
        arguments = TrainingArguments(**{"output_dir": folder, **chosen})
        trainer = Trainer(
            model=model if model is not None else model_of(base, lora=lora, tied=tied, width=width),
            args=arguments,
            train_dataset=data,
            eval_dataset=Tokens(6, seed=1),
            processing_class=tokenizer,
            data_collator=default_data_collator,
            callbacks=callbacks,
        )
        try:
            out = trainer.train(resume_from_checkpoint=resume)
        except Stop:
            assert ours is not None and ours.checkpointer is not None
            ours.checkpointer.close()
            return {}
        except Exception:
            if ours is not None and ours.checkpointer is not None:
                ours.checkpointer.close()
            raise
    return {
        "digest": digest(trainer),
        "log": log_of(trainer),
        "loss": out.training_loss,
        "step": trainer.state.global_step,
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "read": len(getattr(data, "read", ())),
        "started_at": None if ours is None or ours.restored is None else ours.restored.step,
        "bytes": None if ours is None else [ours.full_bytes, ours.stored_bytes],
        "weights": trainer.model.state_dict(),
    }


def main() -> None:
    """Run each requested run in turn. Ranks leave at the same time, because some threads of gloo do not end."""
    for text in sys.argv[1:]:
        found = run(**json.loads(text))
        found.pop("weights", None)
        os.write(1, f"\n{json.dumps(found)}\n".encode())  # whole, whatever other ranks print
    if torch.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
