from __future__ import annotations

from cortex.jobs.spec import HOOK_SEQ
from cortex.worker.jobs.shared_state import SharedJobState


def test_a_batch_is_running_from_begin_to_end() -> None:
    state = SharedJobState()
    assert (state.running_batch, state.previous_batch) == ("", "")
    state.enter_job("7fff", 30)
    assert state.previous_batch == ""
    state.begin(12, deadline_ns=5, timeout_ns=2_500_000_000)
    assert (state.running_batch, state.previous_batch) == ("7fff:12", "")
    assert (state.deadline_ns, state.timeout_s) == (5, 2.5)
    state.end()
    assert (state.running_batch, state.previous_batch) == ("", "7fff:12")
    assert state.deadline_ns == 0
    state.begin(HOOK_SEQ)
    assert (state.running_batch, state.previous_batch) == ("7fff:hook", "")
    assert state.deadline_ns == 0
    state.enter_job("6fff", 30)
    assert (state.running_batch, state.previous_batch) == ("", "")


def test_stores_leases_and_their_duration() -> None:
    state = SharedJobState()
    state.enter_job("7fff", 0.5)
    state.set_tokens(["a" * 32, "b"])
    state.set_renewed(77)
    assert state.tokens == ("a" * 32, "b")
    assert (state.lease_s, state.renewed_ns) == (0.5, 77)
    state.set_tokens([])
    assert state.tokens == ()


def test_leases_over_the_capacity_are_dropped_completely() -> None:
    state = SharedJobState()
    state.set_tokens(f"{number:064}" for number in range(100))
    assert state.tokens == tuple(f"{number:064}" for number in range(len(state.tokens)))
    assert len(state.tokens) > 50


def test_clear_resets_the_state_for_a_new_process() -> None:
    state = SharedJobState()
    state.enter_job("7fff", 30)
    state.begin(1)
    state.set_tokens(["a"])
    state.clear()
    assert (state.running_batch, state.tokens, state.lease_s) == ("", (), 0.0)
