from __future__ import annotations

from cortex.replica.jobs.operator_client import MAX_BATCHES, LeaseSizer


def after(*leases: tuple[int, float]) -> LeaseSizer:
    pace = LeaseSizer()
    for batches, seconds in leases:
        pace.record(batches, seconds)
    return pace


def test_first_lease_is_one_batch() -> None:
    assert LeaseSizer().batches == 1


def test_lease_is_about_a_quarter_of_a_second_of_work() -> None:
    assert after((20, 0.2)).batches == 25
    assert after((1, 0.2)).batches == 1
    assert after((1, 60.0)).batches == 1


def test_leases_grow_step_by_step_up_to_a_limit() -> None:
    assert after((1, 1e-6)).batches == 16
    assert after((1, 1e-6), (16, 1e-5)).batches == 256
    assert after((1, 0.0), (256, 0.0)).batches == MAX_BATCHES


def test_a_lease_of_which_nothing_was_done_says_nothing() -> None:
    assert after((0, 5.0)).batches == 1


def test_more_is_fetched_ahead_only_if_what_is_there_is_soon_done() -> None:
    assert not LeaseSizer().is_quick(1)
    assert after((10, 0.1)).is_quick(50)
    assert not after((10, 0.1)).is_quick(100)
    assert not after((1, 0.6)).is_quick(1)
