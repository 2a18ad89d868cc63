"""The user's code of the comparison of batch jobs: the same function, whatever calls it."""

from __future__ import annotations


def total(numbers: list[int]) -> int:
    """Return their sum, which is next to nothing: what is measured is everything around it."""
    return sum(numbers)
