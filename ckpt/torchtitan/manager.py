"""A checkpoint manager for torchtitan. Its Config replaces that of torchtitan's own manager, and has all its fields."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from ckpt.checkpointer import Checkpointer
from ckpt.core.ranks.world import made_together
from ckpt.events import log
from ckpt.tiers import Memory, Tier
from ckpt.torchtitan import initial
from ckpt.torchtitan.internals import BaseCheckpointManager, Job, filesystem, tyro


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Stages every step in memory that outlives the trainer. Saves every `interval`-th step to its folder and `also`.

        checkpoint=ckpt.torchtitan.CheckpointManager.Config(enable=True, interval=500, also=["s3://bucket/run1"])

    A restarted job resumes at its last step. torchtitan's trainer calls all methods. The constructor raises UsageError
    for state that cannot be saved, and `load` for data that cannot be divided among this number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The fields of torchtitan's `BaseCheckpointManager.Config`, and the following ones."""

        also: list[str] = field(default_factory=list)
        """Further folders or URLs to which every `interval`-th step is saved."""

        memory: Annotated[Memory, tyro.conf.Suppress] = field(default_factory=Memory)
        """Memory for the snapshots of every step; see `ckpt.Memory`."""

        arguments: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Further arguments of `ckpt.Checkpointer`, for example {"options": ckpt.Options(metrics=9100)}."""

    def __init__(self, config: Config, *, base_folder: str = "", **given: Any) -> None:
        self.enable, self.save_future = config.enable, None
        if not self.enable:
            return
        self._config, self._folder = config, filesystem.join(base_folder, config.folder)
        self._job = made_together("attach", partial(Job, config, self._folder, given))
        self._checkpointer = None
        if not config.load_only:
            keep = config.keep_latest_k or "all"
            places = [Tier(url, every=config.interval, keep=keep) for url in (self._folder, *config.also)]
            self._checkpointer = Checkpointer(self._job.state, places, memory=config.memory, **config.arguments)

    def _load(self, step: int = -1) -> bool:
        """Load the last step, or the requested one. If there is none, load the initial state in the config."""
        wanted = None if step == -1 else step
        with self._job.loading():
            if self._checkpointer is not None:
                found = self._checkpointer.restore(default=None, step=wanted) is not None
            elif found := wanted is not None or initial.is_run(self._folder):
                initial.fill(self._job.state, self._folder, wanted)
            return found or self._begin()

    def _begin(self) -> bool:
        config, path = self._config, self._config.initial_load_path
        if path and not config.initial_load_in_hf and initial.is_run(path):
            only = config.initial_load_model_only
            done = initial.fill(self._job.model if only else self._job.state, path, only=only)
            log.info("starting from %sstep %s of %s", "the weights of " if only else "", done.step, path)
            return True
        return bool(path or config.initial_load_in_hf) and self._job.load_from_theirs()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save a step. Return True if it is saved to a folder. On return, the job's last step is complete there."""
        config, checkpointer = self._config, self._checkpointer
        if checkpointer is None:
            return False
        self._job.refresh()
        checkpointer.step(curr_step)
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if first or last_step:
            save = checkpointer.save()
            if last_step:
                save.wait_durable()
        if last_step and config.last_save_in_hf:
            self._job.export(curr_step, f"{self._folder}-hf")
        return first or last_step or curr_step % config.interval == 0

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing, because an optimizer's step itself waits for copies of the tensors that it changes."""

    def _wait_for_saving(self) -> None:
        """Do nothing, because training does not wait for uploads."""

    def _close(self) -> None:
        """Close the Checkpointer. While an exception propagates, do not wait for other ranks."""
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.__exit__(*sys.exc_info())
