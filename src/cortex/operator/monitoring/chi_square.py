"""The chi-square law: how large a sum of squares becomes by chance. Standard library only."""

from __future__ import annotations

import math
from functools import lru_cache

_PRECISION = 1e-14
_MAX_TERMS = 10_000


def chi_square_tail(value: float, degrees: int) -> float:
    """Return the probability that a sum of the squares of `degrees` standard normal numbers exceeds `value`."""
    return _upper_gamma(degrees / 2, value / 2)


@lru_cache(maxsize=1024)
def chi_square_quantile(tail: float, degrees: int) -> float:
    """Return the value that is exceeded with probability `tail` (0 to 1, both excluded)."""
    low, high = 0.0, degrees + 10.0
    while chi_square_tail(high, degrees) > tail:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if chi_square_tail(middle, degrees) > tail:
            low = middle
        else:
            high = middle
    return high


def _upper_gamma(shape: float, x: float) -> float:
    """Return the regularized upper incomplete gamma function, by its series or its continued fraction."""
    if x <= 0:
        return 1.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    return 1 - scale * _series(shape, x) if x < shape + 1 else scale * _fraction(shape, x)


def _series(shape: float, x: float) -> float:
    term = total = 1 / shape
    for number in range(1, _MAX_TERMS):
        term *= x / (shape + number)
        total += term
        if term < total * _PRECISION:
            break
    return total


def _fraction(shape: float, x: float) -> float:
    # Lentz's method.
    b = x + 1 - shape
    c, d = math.inf, 1 / b
    result = d
    for number in range(1, _MAX_TERMS):
        a = -number * (number - shape)
        b += 2
        d = 1 / (a * d + b)
        c = b + a / c
        result *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return result
