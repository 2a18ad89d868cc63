"""What models are expected to take, whatever was measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.models.memory_budget import SizeEstimator

MIB = 1024 * 1024
SIZES = st.integers(0, 10_000 * MIB)
GROWN = st.integers(-10_000 * MIB, 10_000 * MIB)


def test_before_anything_was_loaded_twice_the_files_are_expected_at_the_peak() -> None:
    expected = SizeEstimator().estimate("a", 100 * MIB)
    assert expected.peak_bytes >= 200 * MIB
    assert 100 * MIB < expected.loaded_bytes < 200 * MIB


def test_what_was_measured_is_expected_of_the_same_content_and_in_proportion_of_others() -> None:
    sizes = SizeEstimator()
    assert sizes.record("a", 100 * MIB, 150 * MIB, 160 * MIB) == 150 * MIB
    assert sizes.estimate("a", 100 * MIB).loaded_bytes == 150 * MIB
    assert 300 * MIB <= sizes.estimate("b", 200 * MIB).loaded_bytes < 305 * MIB
    assert sizes.estimate("b", 200 * MIB).peak_bytes >= 320 * MIB


def test_one_measurement_that_is_far_too_high_is_forgotten() -> None:
    sizes = SizeEstimator()
    sizes.record("a", 20 * MIB, 150 * MIB, 150 * MIB)
    for number in range(16):
        sizes.record(f"m{number}", 20 * MIB, 20 * MIB, 21 * MIB)
    assert sizes.estimate("b", 20 * MIB).peak_bytes < 25 * MIB


def test_a_small_model_says_nothing_of_large_ones() -> None:
    sizes = SizeEstimator()
    sizes.record("a", 1000, 5 * MIB, None)
    assert sizes.estimate("b", 100 * MIB).loaded_bytes < 150 * MIB
    assert sizes.estimate("c", 1000).loaded_bytes >= 5 * MIB


@given(st.lists(st.tuples(SIZES, GROWN, st.none() | GROWN), max_size=30), SIZES)
def test_expectations_are_never_below_the_files_nor_beyond_reason(
    measured: list[tuple[int, int, int | None]], files_bytes: int
) -> None:
    sizes = SizeEstimator()
    for number, (size_bytes, grown_bytes, peak_bytes) in enumerate(measured):
        kept = sizes.record(f"m{number}", size_bytes, grown_bytes, peak_bytes)
        assert kept >= size_bytes / 2
    expected = sizes.estimate("new", files_bytes)
    assert files_bytes / 2 <= expected.loaded_bytes <= expected.peak_bytes <= 8 * files_bytes + 33 * MIB
