"""Train a LoRA adapter with PEFT and Hugging Face's Trainer. Checkpoints contain only trained parameters.

    pip install -e '.[transformers]' peft
    python examples/lora.py runs/lora --kill-at 70    # kills itself, with SIGKILL, after step 70
    python examples/lora.py runs/lora                 # continues from there

The run does not contain the frozen base, which `from_pretrained` loads again. It contains a digest of the base, so that
a restart with another base is refused. Finally the adapter is exported as a folder, and peft loads it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ckpt.transformers


class Sums(Dataset[dict[str, torch.Tensor]]):
    """Rows of digits, each the sum of the two digits before it."""

    def __init__(self, count: int) -> None:
        digits = torch.randint(10, (count, 2), generator=torch.Generator().manual_seed(1))
        rows = [digits[:, 0], digits[:, 1]]
        for _ in range(14):
            rows.append((rows[-1] + rows[-2]) % 10)
        self.rows = torch.stack(rows, 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Show(TrainerCallback):
    """Print the first step and the logged losses, and kill the process on request."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.started = kill_at, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.started:
            print(f"starts at step {state.global_step}", flush=True)
        self.started = True
        if state.global_step == self.kill_at and self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            print(f"loss after step {state.global_step}: {logs['loss']!r}", flush=True)


def base(folder: str) -> Any:
    """Create the model that stands in for a downloaded one, equal each time."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder or URL of the checkpoints")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        model = get_peft_model(
            base(folder), LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"])
        )
        saving = ckpt.transformers.CheckpointCallback(options.run, every=20)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=16,
                learning_rate=1e-2,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                log_level="error",
                use_cpu=not torch.accelerator.is_available(),
            ),
            train_dataset=Sums(400),
            callbacks=[saving, Show(options.kill_at)],
        )
        trainer.train()
        print(f"a checkpoint stores {saving.stored_bytes:,} of the model's {saving.full_bytes:,} bytes", flush=True)

        adapter = Path(folder) / "adapter"
        command = [sys.executable, "-m", "ckpt.transformers", options.run, "--to", str(adapter)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        read = PeftModel.from_pretrained(base(folder), adapter)
    total = hashlib.sha256()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].cpu())
        total.update(tensor.contiguous().numpy().tobytes())
    print(f"weights: {total.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
