"""Cost per step of the callback for Hugging Face's Trainer, without that of `Checkpointer.step`.

    python benchmarks/callbacks_hf.py [--steps 300] [--json]

All events of the callback in a step are timed; the time inside `Checkpointer.step` is subtracted, and shown
separately. The model is tiny, as the callback does nothing that depends on its size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckpt.transformers

EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log")
WARM = 20  # steps before the measured ones


class Clock:
    """Seconds of each step, in all events, and in saving."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self._all = self._saving = 0.0

    def around(self, call: Callable[..., Any], *, saving: bool = False, last: bool = False) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                if saving:
                    self._saving += took
                else:
                    self._all += took
                if last:
                    self.steps.append((self._all - self._saving, self._saving))
                    self._all = self._saving = 0.0

        return timed


def measure(steps: int) -> dict[str, float]:
    """Return milliseconds per step of the callback, and of `Checkpointer.step`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    rows = torch.randint(0, 64, (512, 12))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        callback = ckpt.transformers.CheckpointCallback(f"{folder}/run", every=100)
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps + WARM,
                per_device_train_batch_size=2,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                log_level="error",
                use_cpu=True,
            ),
            train_dataset=TensorDataset(rows),
            data_collator=lambda found: (
                {"input_ids": torch.stack([row for (row,) in found])}
                | {"labels": torch.stack([row for (row,) in found])}
            ),
            callbacks=[callback],
        )
        ours = [one for one in trainer.callback_handler.callbacks if type(one).__module__ == "ckpt.transformers"]
        for one in ours:
            for name in EVENTS:
                last = one is ours[-1] and name == "on_step_end"
                setattr(one, name, clock.around(getattr(one, name), last=last))
        begin = callback.on_train_begin

        def began(*args: Any, **kwargs: Any) -> None:
            begin(*args, **kwargs)
            assert callback.checkpointer is not None
            vars(callback.checkpointer)["step"] = clock.around(callback.checkpointer.step, saving=True)

        vars(callback)["on_train_begin"] = began
        trainer.remove_callback(
            next(one for one in trainer.callback_handler.callbacks if "Printer" in type(one).__name__)
        )
        trainer.train()
    own = sorted(1000 * own for own, _ in clock.steps[WARM:])
    saving = sorted(1000 * saving for _, saving in clock.steps[WARM:])
    return {
        "callback_ms_median": statistics.median(own),
        "callback_ms_p99": own[int(len(own) * 0.99)],
        "checkpointer_step_ms_median": statistics.median(saving),
        "checkpointer_step_ms_p99": saving[int(len(saving) * 0.99)],
        "steps": float(len(own)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.steps)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'per step, in ms':<24}{'median':>10}{'p99':>10}")
    for name, what in (("callback", "the callback itself"), ("checkpointer_step", "Checkpointer.step")):
        print(f"{what:<24}{found[f'{name}_ms_median']:>10.3f}{found[f'{name}_ms_p99']:>10.3f}")


if __name__ == "__main__":
    main()
