"""Negative controls: if any single wait of a copy is removed, a test fails on the simulated device."""

from __future__ import annotations

import re
from typing import Any

import pytest

from without import WAITS

GPU, COPYING = "tests/promises/test_gpu.py", "tests/device/test_copying.py"
RED = {
    "copy_behind_the_kernels_of_the_step": (GPU, "test_the_copy_begins_after_the_kernels_of_the_step"),
    "caller_behind_the_copy_of_buffers": (GPU, "test_buffers_may_be_overwritten_immediately"),
    "update_behind_the_copy": (GPU, "test_updates_wait_for_the_copy_and_the_host_does_not"),
    "other_streams_behind_the_copy": (GPU, "test_every_stream_that_updates_waits"),
    "update_until_the_copy_is_queued": (COPYING, "test_an_update_waits_until_its_copy_is_queued"),
    "step_until_the_copy_of_buffers_is_queued": (COPYING, "test_step_waits_until_the_copy_of_buffers_is_queued"),
    "update_until_the_gate_is_open": (COPYING, "test_an_update_waits_while_the_gate_is_held"),
    "seal_until_the_copy_has_ended": (COPYING, "test_snapshot_is_sealed_when_it_is_complete"),
    "failure_until_the_copy_has_ended": (COPYING, "test_slot_is_free_after_a_failed_copy_ends"),
    "other_work_until_copies_have_ended": (COPYING, "test_snapshot_is_sealed_when_it_is_complete"),
    "end_until_copies_have_ended": (COPYING, "test_close_waits_for_copies_in_progress"),
    "slot_until_copies_have_ended": (COPYING, "test_more_steps_ahead_than_slots_succeed"),
    "tensors_kept_until_the_copy_has_ended": (COPYING, "test_tensors_are_kept_until_their_copy_has_ended"),
    "samples_kept_until_they_are_fetched": (COPYING, "test_compared_samples_are_kept_until_fetched"),
}
# The expected error if the test fails by another error than its own assertion.
NOTICED = r"ckpt\.errors\.SaveError: .* changed outside"
WHY = {
    "copy_behind_the_kernels_of_the_step": NOTICED,
    "update_behind_the_copy": NOTICED,
    "other_streams_behind_the_copy": NOTICED,
    "update_until_the_copy_is_queued": NOTICED,
    "seal_until_the_copy_has_ended": NOTICED,
    "slot_until_copies_have_ended": r"ckpt\.errors\.DeadlineError: .* no slot became free in time",
    "tensors_kept_until_the_copy_has_ended": r"ckpt\.errors\.SaveError: .* model\.weight, .* changed outside",
    "samples_kept_until_they_are_fetched": r"ckpt\.errors\.SaveError: .* changed outside an optimizer step",
}


@pytest.mark.parametrize("name", WAITS)
def test_a_test_fails_without_this_wait(name: str, run_tests: Any) -> None:
    file, test = RED[name]
    outcome = run_tests(file, "-k", test, "-p", "without", "--without", name, knobs="clock_ghz=4")
    # A thread that still waits for a device may abort the interpreter after the tests.
    assert outcome.code in (1, -6) and len(outcome.red) == 1 and outcome.red[0].startswith(test), outcome.text
    assert re.search(f"^E +({WHY.get(name, 'assert')}|assert|AssertionError)", outcome.text, re.M), outcome.text


def test_every_wait_has_a_test() -> None:
    assert RED.keys() == WAITS.keys()
