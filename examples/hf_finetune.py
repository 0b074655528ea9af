"""Fine-tune a small language model with Hugging Face's Trainer. One line saves and resumes it.

    pip install -e '.[transformers]'
    python examples/hf_finetune.py runs/hf                   # to the end
    python examples/hf_finetune.py runs/hf-2 --kill-at 70    # kills itself, with SIGKILL, after step 70
    python examples/hf_finetune.py runs/hf-2                 # continues: the same losses, the same weights
    python -m ckpt.transformers runs/hf-2 --to exports/hf-2  # a folder for AutoModelForCausalLM.from_pretrained()

The model is tiny and its text is the source of Python's argparse module, in bytes, so nothing is downloaded.
Several ranks: torchrun --nproc-per-node 2 examples/hf_finetune.py runs/hf-ddp
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import signal
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ckpt.transformers

LENGTH = 64


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """A text in pieces of a fixed number of bytes."""

    def __init__(self, text: bytes) -> None:
        count = len(text) // LENGTH
        self.rows = torch.frombuffer(bytearray(text[: count * LENGTH]), dtype=torch.uint8).view(count, LENGTH).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Show(TrainerCallback):
    """Print the first step and the logged losses, and kill the process on request."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.started = kill_at, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.started and state.is_world_process_zero:
            print(f"starts at step {state.global_step}", flush=True)
        self.started = True
        if state.global_step == self.kill_at and self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            print(f"loss after step {state.global_step}: {logs['loss']!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder or URL of the checkpoints")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4, attention_dropout=0.1)  # fmt: skip
    text = inspect.getsource(argparse).encode("ascii", "replace")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=8,
                learning_rate=3e-3,
                gradient_accumulation_steps=2,
                logging_steps=10,
                eval_strategy="steps",
                eval_steps=25,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                log_level="error",
                use_cpu=not torch.accelerator.is_available(),
            ),
            train_dataset=Bytes(text[4096:]),
            eval_dataset=Bytes(text[:4096]),
            callbacks=[
                ckpt.transformers.CheckpointCallback(options.run, every=20),  # the one line
                Show(options.kill_at),
            ],
        )
        trainer.train()
    if trainer.is_world_process_zero():
        total = hashlib.sha256()
        for tensor in trainer.model.state_dict().values():
            total.update(tensor.cpu().contiguous().numpy().tobytes())
        print(f"weights: {total.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        os._exit(0)
