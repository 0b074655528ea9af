"""Tests that unchanged tensors are skipped only with proof: every snapshot equals its step, bit for bit.

The first half runs whole trainings, read back from shared memory after each step. The second tests `SlotDigests`
alone, with plain tensors as slots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt
from boundaries import Run, check_boundaries, close, gradients, memory_ready, read_back
from ckpt.core.format.digest import chunk_digest
from ckpt.core.format.layout import Layout, pages
from ckpt.core.format.manifest import CheckpointId
from ckpt.core.ipc.arena import Arena
from ckpt.core.snapshot import fill as fill_module
from ckpt.core.snapshot.fill import LARGE, SlotDigests, SlotFiller
from ckpt.core.snapshot.snapshot import NewSnapshot
from ckpt.core.snapshot.stage import Stager
from ckpt.core.state.capture import Capture
from ckpt.errors import SaveError
from toy_states import State, differences, freeze

SIDE = 600  # a square of this size is just large enough to be considered
CALM = 8  # steps after which every slot is known


@pytest.fixture
def open_run() -> Iterator[Callable[..., ckpt.Checkpointer]]:
    """Open a Checkpointer in memory only, and always close it at the end."""
    with contextlib.ExitStack() as stack:

        def open_run(state: State, *, every: int = 1, **settings: Any) -> ckpt.Checkpointer:
            options = ckpt.Options(name="frozen", **settings)
            cp = ckpt.Checkpointer(state, memory=ckpt.Memory(every=every, keep=4), options=options)
            stack.callback(close, cp)
            cp.restore(default=0)
            memory_ready(cp)
            return cp

        yield open_run


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digest a tensor again soon after it has changed, so that more is skipped in a short run."""
    monkeypatch.setattr(fill_module, "PAUSE", 4)


def adapter(*, all_params: bool = False, **optim: Any) -> State:
    """Return a frozen model and a small trained one."""
    base, lora = nn.Linear(SIDE, SIDE).requires_grad_(False), nn.Linear(16, 16)
    params = [*base.parameters(), *lora.parameters()] if all_params else list(lora.parameters())
    return {"base": base, "lora": lora, "optim": torch.optim.AdamW(params, lr=0.1, **optim)}


def train(state: State, step: int) -> None:
    gradients(state["lora"], step)
    state["optim"].step()


def follow(cp: ckpt.Checkpointer, state: State, twin: State, steps: range, move: Callable[[State, int], None]) -> Any:
    """Change, save and read back; return the differences from the training state."""
    found: list[str] = []
    for step in steps:
        move(state, step)
        save = cp.step(step)
        assert save is not None
        try:
            save.wait_staged(30.0)
        except ckpt.errors.SkippedError:  # more memory, for optimizer state, is being allocated
            memory_ready(cp)
            continue
        found += [f"step {step}: {d}" for d in differences(read_back(cp, step, twin), freeze(state))]
    return found


def slots(cp: ckpt.Checkpointer) -> int:
    assert cp._run.stager.arena is not None
    return cp._run.stager.arena.slots


def large(state: State) -> int:
    tensors = (p for m in state.values() if isinstance(m, nn.Module) for p in (*m.parameters(), *m.buffers()))
    return sum(t.nbytes for t in tensors if t.nbytes >= LARGE and not t.requires_grad)


# -- whole runs --


@pytest.mark.parametrize("all_params", [False, True], ids=["eager", "guarded"])
def test_frozen_weights_are_copied_once_per_slot(all_params: bool, open_run: Any) -> None:
    """Once in every slot they are skipped, also if an optimizer owns them but never updates them."""
    state, twin = adapter(all_params=all_params), adapter(all_params=all_params)
    train(state, 1)
    cp = open_run(state)
    assert follow(cp, state, twin, range(1, 21), train) == []
    # The first fill finds the initial values; each slot is then filled once.
    assert cp._run.stager._filler.digests.skipped_bytes == (20 - 1 - slots(cp)) * large(state) > 0


def by_data(state: State) -> None:
    state["base"].weight.data.add_(1.0)


def by_last_byte(state: State) -> None:
    state["base"].weight.numpy().reshape(-1).view("u1")[-1] ^= 1


def by_foreach(state: State) -> None:
    torch._foreach_add_(list(state["base"].parameters()), 1.0)


def by_storage(state: State) -> None:
    torch.tensor([], dtype=torch.uint8).set_(state["base"].weight.data.untyped_storage()).bitwise_xor_(1)


def by_other_parameter(state: State) -> None:
    state["base"].weight = nn.Parameter(state["base"].weight + 1.0, requires_grad=False)


def by_other_memory(state: State) -> None:
    state["base"].weight.data = state["base"].weight.data + 1.0


def by_zero_sign(state: State) -> None:
    """Swap 0.0 and -0.0, which compare equal."""
    weight = state["base"].weight.data
    weight.copy_(torch.where(weight == 0, -weight, 0.0))


WRITES = [
    by_data, by_last_byte, by_foreach, by_storage, by_other_parameter, by_other_memory, by_zero_sign,
]  # fmt: skip


def written(how: Callable[[State], None], open_run: Any) -> list[str]:
    """Alternate unchanged steps with one and two writes; return the differences from the training state."""
    state, twin = adapter(), adapter()
    train(state, 1)

    def move(state: State, step: int) -> None:
        train(state, step)
        if step in (CALM + 2, 2 * CALM + 5, 2 * CALM + 6):
            how(state)

    cp = open_run(state)
    found = follow(cp, state, twin, range(1, 3 * CALM + 6), move)
    assert cp._run.stager._filler.digests.skipped_bytes > 0
    return found


@pytest.mark.parametrize("how", WRITES, ids=lambda how: how.__name__)
def test_written_frozen_tensor_is_copied(how: Any, open_run: Any) -> None:
    """Any kind of write is detected, whether or not torch counts it."""
    assert written(how, open_run) == []


@pytest.mark.parametrize("how", [by_data, by_zero_sign], ids=lambda how: how.__name__)
def test_negative_control_version_counters_miss_writes(
    how: Any, open_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the version counter were the proof, uncounted writes would be missing in the snapshots."""
    monkeypatch.setattr(fill_module, "chunk_digest", lambda data: b"")
    assert any("base" in line for line in written(how, open_run))


def woken(settings: dict[str, Any], open_run: Any) -> list[str]:
    """Train weights without gradients, then with some for two steps, then without."""

    def build() -> State:
        model = nn.Linear(SIDE, SIDE)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, **settings)}

    state, twin = build(), build()
    for one in (state, twin):
        gradients(one["model"], 1)
        one["optim"].step()

    def move(state: State, step: int) -> None:
        for p in state["model"].parameters():
            p.grad = torch.full_like(p, step) if step in (CALM + 2, CALM + 4, CALM + 5) else None
        state["optim"].step()

    cp = open_run(state)
    found = follow(cp, state, twin, range(1, 2 * CALM + 6), move)
    assert cp._run.stager._filler.digests.skipped_bytes > 0
    return found


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": False}], ids=str)
def test_weights_that_receive_gradients_are_copied(settings: Any, open_run: Any) -> None:
    """A resuming optimizer is detected, in the weights and in its own state, also a fused one."""
    assert woken(settings, open_run) == []


def test_negative_control_versions_miss_fused_updates(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With versions as proof, updates of a fused optimizer are lost."""
    monkeypatch.setattr(fill_module, "chunk_digest", lambda data: b"")
    monkeypatch.setattr(
        NewSnapshot, "check_copies", lambda self, slot: None
    )  # else the snapshot is detected and dropped
    assert woken({"fused": True}, open_run)


def test_layer_frozen_unfrozen_and_frozen_again(open_run: Any) -> None:
    """The optimizer adds a layer, trains it and removes it: layouts change, and every snapshot is exact."""
    state, twin = adapter(fused=True), adapter(fused=True)
    train(state, 1)
    cp = open_run(state)

    def trains(state: State, step: int) -> None:
        gradients(state["base"], step)
        train(state, step)

    assert follow(cp, state, twin, range(1, 10), train) == []
    for one in (state, twin):
        one["base"].requires_grad_(True)
        one["optim"].add_param_group({"params": list(one["base"].parameters())})
    assert follow(cp, state, twin, range(10, 16), trains) == []
    before = cp._run.stager._filler.digests.skipped_bytes
    for one in (state, twin):
        for p in one["base"].requires_grad_(False).parameters():
            p.grad = None
    assert follow(cp, state, twin, range(16, 40), train) == []
    assert cp._run.stager._filler.digests.skipped_bytes > before


def test_trained_weights_are_rarely_digested(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that changes without a counted write is digested twice, and then not during the pause."""
    digested: list[int] = []
    monkeypatch.setattr(fill_module, "PAUSE", 64)
    monkeypatch.setattr(fill_module, "chunk_digest", lambda data: digested.append(data.nbytes) or chunk_digest(data))

    def build() -> State:
        model = nn.Linear(SIDE, SIDE)
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)}

    def move(state: State, step: int) -> None:
        gradients(state["model"], abs(step))
        state["optim"].step()

    run = Run(build, move)
    cp = open_run(run.state)
    assert check_boundaries(cp, run, 40) == []
    assert cp._run.stager._filler.digests.skipped_bytes == 0
    assert len(digested) <= 2 * 3  # weights and two moments


def test_tensors_of_all_kinds_are_exact(open_run: Any) -> None:
    """Transposed, conjugate, negated, tied, overlapping and empty tensors, arrays, and tensors of inference mode."""

    def build() -> State:
        whole, numbers = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.complex64)
        with torch.inference_mode():
            inferred = torch.randn(SIDE, SIDE)
        tied = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)).requires_grad_(False)
        tied[1].weight = tied[0].weight
        tensors = {
            "turned": whole.clone().t(), "conj": numbers.conj(), "neg": numbers.clone().conj().imag,
            "top": whole[:-10], "rest": whole[10:], "empty": torch.zeros(0, SIDE), "inferred": inferred,
            "half": torch.randn(SIDE, SIDE).to(torch.bfloat16).repeat(2, 1), "array": torch.randn(SIDE, SIDE).numpy(),
            "columns": torch.randn(SIDE, SIDE).numpy()[:, :500],
        }  # fmt: skip
        return {**adapter(), "tied": tied, "tensors": tensors}

    def move(state: State, step: int) -> None:
        train(state, step)
        if step in (CALM, CALM + 7):
            state["tensors"]["array"][-1, -1] += 1
            state["tensors"]["columns"][3, 3] += 1
            state["tensors"]["top"].data[20:30] += 1
            state["tensors"]["conj"].data[0, 0] += 1
            state["tied"][1].weight.data[5] += 1

    state, twin = build(), build()
    train(state, 1)
    cp = open_run(state)
    assert follow(cp, state, twin, range(1, 20), move) == []
    assert cp._run.stager._filler.digests.skipped_bytes > 0


def given_up_and_taken_again(open_run: Any) -> list[str]:
    state, twin = adapter(), adapter()
    train(state, 1)
    cp = open_run(state)
    found = follow(cp, state, twin, range(1, 12), train)
    before = dict(cp._run.stager.slots._pinned)
    assert cp._run.stager.give_up_slot() > 0
    (pin,) = cp._run.stager.slots._pinned.keys() - before.keys()
    found += follow(cp, state, twin, range(12, 18), train)
    cp._run.stager.slots.unpin(*pin)
    return found + follow(cp, state, twin, range(18, 24), train)


def test_freed_and_reused_slot_is_filled(open_run: Any) -> None:
    """Its memory was returned to the system: it has zeros, and nothing is known about it."""
    assert given_up_and_taken_again(open_run) == []


def test_negative_control_freed_slot_is_not_forgotten(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the knowledge about that slot were kept, its snapshots would have zeros for the frozen weights."""
    monkeypatch.setattr(SlotDigests, "forget", lambda self, slot: None)
    assert any("base" in line for line in given_up_and_taken_again(open_run))


def failing(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every fifth fill overwrite the slot with garbage and fail."""
    state, twin = adapter(), adapter()
    train(state, 1)
    cp = open_run(state, on_error="warn")
    copy, failed = SlotFiller.copy, list[int]()

    def rubbish(self: SlotFiller, pairs: Any, streams: Any, *more: Any) -> None:
        copy(self, pairs, streams)
        if failed and failed[-1] > 0:
            failed.append(0)
            for target, _, _ in pairs:
                target.fill_(3.0)
            raise OSError("no memory, say")

    monkeypatch.setattr(SlotFiller, "copy", rubbish)
    found = follow(cp, state, twin, range(1, 10), train)
    for step in (10, 20, 30):
        train(state, step)
        failed.append(step)
        save = cp.step(step)
        assert save is not None
        with pytest.raises(SaveError, match="no memory, say"):
            save.wait_staged(30.0)
        found += follow(cp, state, twin, range(step + 1, step + 10), train)
    return found


def test_failed_fill_does_not_affect_next_snapshot(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it left in the slot, the next snapshot there is complete."""
    assert failing(open_run, monkeypatch) == []


def test_negative_control_failed_fill_is_not_forgotten(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the knowledge about a slot outlived the start of its next fill, garbage would count as weights."""

    def lenient(self: SlotDigests, slot: int, layout: Layout) -> None:
        self._layout = layout
        self._now = self._known.setdefault(slot, {})
        self._before = dict(self._now)

    monkeypatch.setattr(SlotDigests, "open", lenient)
    assert any("base" in line for line in failing(open_run, monkeypatch))


def test_restore_of_older_step_is_staged(open_run: Any) -> None:
    """Changes by restore() to frozen weights are staged like any other change."""
    state, twin = adapter(), adapter()
    train(state, 1)
    cp = open_run(state)
    assert follow(cp, state, twin, range(1, 10), train) == []
    state["base"].weight.data.add_(1.0)
    assert follow(cp, state, twin, range(10, 12), train) == []
    cp.restore(step=9)
    assert follow(cp, state, twin, range(10, 24), train) == []


def test_write_during_overlapped_copy_is_detected(open_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped weights of an optimizer are guarded like copied ones."""
    opened, fill = threading.Event(), SlotFiller.fill_guarded
    opened.set()

    def held(self: SlotFiller, *slot_and_job: Any) -> None:
        assert opened.wait(30.0)
        fill(self, *slot_and_job)

    monkeypatch.setattr(SlotFiller, "fill_guarded", held)
    state, twin = adapter(all_params=True), adapter(all_params=True)
    train(state, 1)
    cp = open_run(state, on_error="warn")
    assert follow(cp, state, twin, range(1, 12), train) == []
    before = cp._run.stager._filler.digests.skipped_bytes
    assert before > 0
    train(state, 12)
    opened.clear()
    save = cp.step(12)
    with torch.no_grad():
        state["base"].weight.mul_(0.5)
    opened.set()
    assert save is not None
    with pytest.raises(SaveError, match=r"base\.weight"):
        save.wait_staged(30.0)
    assert follow(cp, state, twin, range(13, 30), train) == []


def in_two_arenas() -> list[bool]:
    """Stage one state into an arena until all slots are known, then into another. Return which snapshots are exact."""
    reading, exact = Capture({"base": torch.randn(SIDE, SIDE)}).read(), list[bool]()
    size = reading.layout.arrangement.data_size
    stager = Stager()
    try:
        for number in range(2):
            arena = Arena.create(3, pages(size) + 4096)
            stager.use(arena, lambda: None)
            for step in range(1, 9):
                job = NewSnapshot(CheckpointId(1, 10 * number + step, "0badcafe"), reading, b"[]")
                stager.submit(job)
                assert job.copied.wait(30.0) and job.place is not None, job.error
                wanted = freeze(reading.tensors[0])[2]
                exact.append(bytes(arena.data(job.place[1], len(wanted))) == wanted)
            arena.close()
        assert stager._filler.digests.skipped_bytes > 0
    finally:
        stager.stop()
    return exact


def test_slots_of_another_arena_are_filled() -> None:
    """After a move to other memory, every slot is filled again."""
    assert all(in_two_arenas())


def test_negative_control_arena_change_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """If knowledge about the first arena's slots applied to the second's, they would have zeros."""
    monkeypatch.setattr(SlotDigests, "clear", lambda self: None)
    assert not all(in_two_arenas())


# -- SlotDigests alone --


def some_layout(size: int = 1) -> Layout:
    """Return a layout of which only the identity matters here."""
    return Layout((), {}, [{"size": size}])


def fill(digests: SlotDigests, slot: int, layout: Layout, targets: list[Tensor], sources: list[Tensor]) -> None:
    digests.open(slot, layout)
    for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
        digests.put(number, target, source)
    digests.close(slot)


def test_tensor_with_counted_writes_is_not_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is skipped once its version counter stands still."""
    digested: list[int] = []
    monkeypatch.setattr(fill_module, "chunk_digest", lambda data: digested.append(data.nbytes) or chunk_digest(data))
    one, layout, source, target = SlotDigests(), some_layout(), torch.zeros(100_000), torch.empty(100_000)
    for _ in range(10):
        source.add_(1.0)
        fill(one, 0, layout, [target], [source])
    assert digested == []
    for _ in range(3):
        fill(one, 0, layout, [target], [source])
    assert one.skipped_bytes == 2 * source.nbytes and torch.equal(target, source)
