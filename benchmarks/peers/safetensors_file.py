"""`safetensors.torch.save_file`, and fsync; read back by name into existing tensors.

Tensors and plain values are separate, as in every library that uses safetensors: the optimizer's parameter groups are
JSON in the metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from peers import Peer, nothing
from workload import Training


class SafetensorsFile(Peer):
    def save(self, step: int) -> Callable[[], None]:
        path = self.path(step, ".safetensors")
        groups = self.training.optim.state_dict()["param_groups"]
        save_file(named(self.training), path, metadata={"param_groups": json.dumps(groups)})
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        return nothing

    def restore(self) -> None:
        tensors = named(self.training)
        with safe_open(self.newest(), "pt") as file, torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))


def named(training: Training) -> dict[str, Tensor]:
    """Return weights and the optimizer's state by name."""
    found = {f"model.{name}": p.detach() for name, p in training.model.named_parameters()}
    for name, p in training.model.named_parameters():
        found |= {f"optim.{name}.{key}": value for key, value in training.optim.state[p].items()}
    return found
