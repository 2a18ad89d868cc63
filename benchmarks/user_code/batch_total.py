"""User code of the comparison of batch jobs, the same for every system."""

from __future__ import annotations


def total(numbers: list[int]) -> int:
    """Return the sum of a batch; its cost is negligible."""
    return sum(numbers)
