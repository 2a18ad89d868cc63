"""The chi-square law against published tables."""

from __future__ import annotations

import pytest

from cortex.operator.monitoring.chi_square import chi_square_quantile, chi_square_tail


@pytest.mark.parametrize(
    ("tail", "degrees", "quantile"),
    [
        (0.05, 1, 3.841), (0.01, 1, 6.635), (0.001, 1, 10.828), (0.95, 10, 3.940), (0.5, 4, 3.357),
        (0.05, 9, 16.919), (0.001, 9, 27.877), (0.05, 30, 43.773), (0.001, 100, 149.449), (0.99, 100, 70.065),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(tail: float, degrees: int, quantile: float) -> None:
    assert chi_square_quantile(tail, degrees) == pytest.approx(quantile, abs=0.0006)


@pytest.mark.parametrize("tail", [1e-12, 1e-6, 0.3, 0.999999])
@pytest.mark.parametrize("degrees", [1, 2, 29, 500])
def test_quantile_and_tail_are_inverse(tail: float, degrees: int) -> None:
    assert chi_square_tail(chi_square_quantile(tail, degrees), degrees) == pytest.approx(tail, rel=1e-3)


def test_nothing_is_less_than_zero() -> None:
    assert chi_square_tail(0, 3) == chi_square_tail(-1, 3) == 1
