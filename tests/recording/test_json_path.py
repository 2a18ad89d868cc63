"""Paths in JSON: what they match, and what they remove."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.recording.json_path import JsonPath, Step, shown

NAMES = st.text("abc .$'\"[]*é", min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)
PATHS = st.lists(st.sampled_from([".a", ".b", "..c", "..a", "[*]", ".*", "[0]", "['b']"]), min_size=1, max_size=3).map(
    lambda parts: "$" + "".join(parts)
)


def all_steps(value: Any, steps: tuple[Step, ...] = ()) -> list[tuple[Step, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [steps, *(found for step, child in children for found in all_steps(child, (*steps, step)))]


@pytest.mark.parametrize(
    ("path", "steps", "expected"),
    [
        ("$.user.email", ("user", "email"), True),
        ("$.user.email", ("user",), False),
        ("$.user.email", ("user", "email", "domain"), False),
        ("$.items[*].id", ("items", 3, "id"), True),
        ("$.items[3].id", ("items", 3, "id"), True),
        ("$.items[2].id", ("items", 3, "id"), False),
        ("$.items.*.id", ("items", "x", "id"), True),
        ("$..token", ("a", 0, "token"), True),
        ("$..token", ("token",), True),
        ("$..a.b", ("a", "a", "b"), True),
        ("$['a b'].c", ("a b", "c"), True),
        ('$["a.b"]', ("a.b",), True),
        ("$.größe", ("größe",), True),
    ],
)
def test_a_path_matches_the_steps_to_a_value(path: str, steps: tuple[Step, ...], expected: bool) -> None:
    assert JsonPath.parse(path).matches(steps) is expected


@pytest.mark.parametrize(
    "text", ["", "$", "user", "$user", "$.", "$..", "$.a..", "$[a]", "$[-1]", "$.a[?(@.b)]", "$.a "]
)
def test_other_text_is_no_path(text: str) -> None:
    with pytest.raises(ValueError, match="is not a path"):
        JsonPath.parse(text)


@pytest.mark.parametrize(
    ("path", "value", "left", "removed"),
    [
        ("$.a", {"a": 1, "b": 2}, {"b": 2}, 1),
        ("$.a.b", {"a": {"b": 1, "c": 2}}, {"a": {"c": 2}}, 1),
        ("$.a[*]", {"a": [1, 2]}, {"a": [None, None]}, 2),
        ("$.a[1]", {"a": [1, 2]}, {"a": [1, None]}, 1),
        ("$.a[*].id", {"a": [{"id": 1, "x": 2}, {"x": 3}, 4]}, {"a": [{"x": 2}, {"x": 3}, 4]}, 1),
        ("$..id", [{"id": {"id": 1}}, {"x": {"id": 2}}], [{}, {"x": {}}], 2),
        ("$.*", {"a": 1, "b": [2]}, {}, 2),
        ("$.missing.deep", {"a": 1}, {"a": 1}, 0),
        ("$.a", "text", "text", 0),
    ],
)
def test_a_path_removes_members_and_replaces_elements(path: str, value: Any, left: Any, removed: int) -> None:
    assert JsonPath.parse(path).remove(value) == removed
    assert value == left


@given(VALUES, PATHS)
def test_what_a_path_matches_is_gone_or_null_after_a_removal(value: Any, text: str) -> None:
    path = JsonPath.parse(text)
    had_match = any(path.matches(steps) for steps in all_steps(value))
    before = copy.deepcopy(value)

    removed = path.remove(value)

    assert bool(removed) == had_match
    if not had_match:
        assert value == before
    for steps in all_steps(value):
        if path.matches(steps):
            found = value
            for step in steps:
                found = found[step]
            assert found is None  # an element of an array keeps its place
            assert isinstance(steps[-1], int)


@given(st.lists(NAMES | st.integers(0, 9), max_size=4))
def test_every_place_can_be_shown(steps: list[Step]) -> None:
    text = shown(steps)
    assert text.startswith("$")
    assert json.loads(json.dumps(text)) == text
    assert not any(f"[{step}]" in shown(steps, with_indexes=False) for step in steps if isinstance(step, int))
