from __future__ import annotations

from cortex.worker.jobs.operator_client import MAX_BATCHES, LeaseSizer


def sizer_after(*leases: tuple[int, float]) -> LeaseSizer:
    sizer = LeaseSizer()
    for batches, seconds in leases:
        sizer.record(batches, seconds)
    return sizer


def test_the_first_lease_is_one_batch() -> None:
    assert LeaseSizer().batches == 1


def test_a_lease_is_about_a_quarter_of_a_second_of_work() -> None:
    assert sizer_after((20, 0.2)).batches == 25
    assert sizer_after((1, 0.2)).batches == 1
    assert sizer_after((1, 60.0)).batches == 1


def test_leases_grow_stepwise_up_to_a_limit() -> None:
    assert sizer_after((1, 1e-6)).batches == 16
    assert sizer_after((1, 1e-6), (16, 1e-5)).batches == 256
    assert sizer_after((1, 0.0), (256, 0.0)).batches == MAX_BATCHES


def test_a_lease_without_finished_batches_is_ignored() -> None:
    assert sizer_after((0, 5.0)).batches == 1


def test_the_next_lease_is_prefetched_only_if_the_rest_is_quick() -> None:
    assert not LeaseSizer().is_quick(1)
    assert sizer_after((10, 0.1)).is_quick(50)
    assert not sizer_after((10, 0.1)).is_quick(100)
    assert not sizer_after((1, 0.6)).is_quick(1)
