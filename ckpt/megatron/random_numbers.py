"""Random states of a rank of Megatron: those that `ckpt.RNG` saves, and the streams of Megatron's tracker."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from ckpt.core.state.nodes import RNG


class RandomNumbers(RNG):
    """Outside the tracker's regions, all ranks of a tensor parallel group must draw the same numbers. So a rank must
    never get the streams of another rank. If the size of tensor or pipeline parallelism has changed since the save, all
    ranks keep the streams that Megatron has seeded."""

    def state_dict(self) -> dict[str, Any]:
        states = {name: _get(stream) for name, stream in get_cuda_rng_tracker().get_states().items()}
        return super().state_dict() | {"tracker": states, "place": list(place_of_rank())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if tuple(state["place"][:4]) == place_of_rank()[:4]:
            self._take(state)

    def load_state_dicts(self, states: list[dict[str, Any]], rank: int, world: int) -> None:
        """Restore after the number of ranks has changed: additional data parallel ranks reuse the saved states."""
        *here, replica = place_of_rank()
        alike = [state for state in states if state["place"][:4] == here]
        if alike:
            ordered = sorted(alike, key=lambda state: int(state["place"][4]))
            self._take(ordered[replica % len(ordered)])

    def _take(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        streams = get_cuda_rng_tracker().get_states()
        saved = {name: one.cpu() for name, one in state["tracker"].items() if name in streams}
        if any(isinstance(stream, torch.Generator) for stream in streams.values()):
            for name, one in saved.items():
                streams[name].set_state(one)
        elif streams:
            get_cuda_rng_tracker().set_states(streams | saved)


def _get(stream: Any) -> torch.Tensor:
    """Return the state of a stream, which may already be a tensor. With CUDA graphs, a stream is a generator."""
    found: torch.Tensor = stream.get_state() if isinstance(stream, torch.Generator) else stream
    return found


def place_of_rank() -> tuple[int, int, int, int, int]:
    """Return the sizes of tensor and pipeline parallelism, and the rank's position in them and among replicas."""
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
