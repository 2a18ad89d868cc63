"""Truncated repr of values of any size and type."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from cortex.worker.requests.calls import MAX_CHARACTERS, short_repr


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("never mind")


class Exits:
    def __repr__(self) -> str:
        raise SystemExit(3)


class Lines:
    def __repr__(self) -> str:
        return "one\ntwo"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, 2.5, None]}, "{'a': [1, 2.5, None]}"),
        (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]"),
        ({"a": list(range(11))}, "{'a': [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]}"),
        (b"abc", "b'abc'"),
        ("one\ntwo", "'one\\ntwo'"),
        (Lines(), "one\\ntwo"),
        (Hostile(), "<Hostile instance at "),
        (Exits(), "<Exits, whose repr raises SystemExit>"),
        (10**5000, "<int, whose repr raises ValueError>"),
    ],
    ids=["nested", "list", "list in a dict", "bytes", "text", "lines", "hostile", "exits", "int"],
)
def test_short_repr(value: Any, text: str) -> None:
    assert short_repr(value).startswith(text)


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, b"\0" * 10_000, {"k" * 400: "v" * 400}, [["x" * 100] * 20] * 20, np.zeros((300, 300))],
    ids=["text", "bytes", "dict", "lists", "array"],
)
def test_truncates_long_values_to_one_line(value: Any) -> None:
    shown = short_repr(value)

    assert len(shown) <= MAX_CHARACTERS
    assert "…" in shown or "..." in shown
    assert "\n" not in shown


def test_a_large_body_is_not_formatted_completely() -> None:
    body = bytes(20_000_000)
    tracemalloc.start()
    try:
        short_repr({"body": body})
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
