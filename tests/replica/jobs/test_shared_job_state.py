from __future__ import annotations

from cortex.replica.jobs.shared_state import HOOK, SharedJobState


def test_batch_is_inside_from_its_beginning_to_its_end() -> None:
    cells = SharedJobState()
    assert (cells.inside, cells.after) == ("", "")
    cells.enter_job("7fff", 30)
    assert cells.after == ""
    cells.begin(12, deadline_ns=5, timeout_ns=2_500_000_000)
    assert (cells.inside, cells.after) == ("7fff:12", "")
    assert (cells.deadline_ns, cells.timeout_s) == (5, 2.5)
    cells.end()
    assert (cells.inside, cells.after) == ("", "7fff:12")
    assert cells.deadline_ns == 0
    cells.begin(HOOK)
    assert (cells.inside, cells.after) == ("7fff:hook", "")
    assert cells.deadline_ns == 0
    cells.enter_job("6fff", 30)
    assert (cells.inside, cells.after) == ("", "")


def test_leases_are_known_with_how_long_they_hold() -> None:
    cells = SharedJobState()
    cells.enter_job("7fff", 0.5)
    cells.hold(["a" * 32, "b"])
    cells.tend(77)
    assert cells.tokens == ("a" * 32, "b")
    assert (cells.lease_s, cells.tended_ns) == (0.5, 77)
    cells.hold([])
    assert cells.tokens == ()


def test_more_leases_than_fit_are_cut_between_two() -> None:
    cells = SharedJobState()
    cells.hold(f"{number:064}" for number in range(100))
    assert cells.tokens == tuple(f"{number:064}" for number in range(len(cells.tokens)))
    assert len(cells.tokens) > 50


def test_a_new_process_begins_with_nothing() -> None:
    cells = SharedJobState()
    cells.enter_job("7fff", 30)
    cells.begin(1)
    cells.hold(["a"])
    cells.clear()
    assert (cells.inside, cells.tokens, cells.lease_s) == ("", (), 0.0)
