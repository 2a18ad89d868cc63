"""What counts as a difference between a recorded answer and the answer of now."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.recording.exchange import Exchange, RecordedBody
from cortex.recording.json_path import JsonPath
from cortex.replay.comparison import ComparisonRules, Difference, ReplayedAnswer, compare

RULES = ComparisonRules()
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


def exchange(response: RecordedBody, status: int = 200) -> Exchange:
    return Exchange("id-1", 0.0, 1.0, None, "POST", "", "", (), RecordedBody(), status, response, "f:2")


def compared(recorded: Any, now: Any, rules: ComparisonRules = RULES) -> list[Difference]:
    answer = ReplayedAnswer(200, json.dumps(now).encode(), {"x-cortex-request-id": "id-2"})
    return compare(exchange(RecordedBody("json", recorded)), answer, rules)


def places(recorded: Any, now: Any, rules: ComparisonRules = RULES) -> list[tuple[str, str]]:
    return [(each.place, each.kind) for each in compared(recorded, now, rules)]


@pytest.mark.parametrize(
    ("recorded", "now", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": 0.1}, {"a": 0.1 + 1e-9}, []),
        ({"a": 1e9}, {"a": 1e9 + 1}, []),
        ({"a": 1e-9}, {"a": 2e-9}, []),
        ({"a": 0.1}, {"a": 0.2}, [("$.a", "value")]),
        ({"a": True}, {"a": 1}, [("$.a", "type")]),
        ({"a": 1}, {"a": "1"}, [("$.a", "type")]),
        ({"a": None}, {"a": 0}, [("$.a", "type")]),
        ({"a": None}, {}, [("$.a", "missing")]),
        ({}, {"a b": []}, [('$["a b"]', "extra")]),
        ([1, 2], [1, 2, 3], [("$", "length")]),
        ([1, 2], [1, 3], [("$[1]", "value")]),
        ({"a": [{"b": "x"}]}, {"a": [{"b": "y"}]}, [("$.a[0].b", "value")]),
        ({"a": {}}, {"a": []}, [("$.a", "type")]),
        ("setosa", "virginica", [("$", "value")]),
    ],
)
def test_json_is_compared_value_by_value(recorded: Any, now: Any, expected: list[tuple[str, str]]) -> None:
    assert places(recorded, now) == expected


def test_a_difference_names_the_field_the_place_and_the_distance() -> None:
    [found] = compared({"items": [{"p": 0.5}, {"p": 0.5}]}, {"items": [{"p": 0.5}, {"p": 0.75}]})
    assert found == Difference("$.items[*].p", "value", "$.items[1].p", "0.5", "0.75", 0.25)


@pytest.mark.parametrize(
    ("tolerance", "recorded", "now", "is_same"),
    [(0.0, 1.0, 1.0, True), (0.0, 1.0, 1.0 + 1e-15, False), (0.1, 1.0, 1.09, True), (0.1, 0.0, 0.11, False)],
)
def test_numbers_are_equal_within_the_tolerance(tolerance: float, recorded: float, now: float, is_same: bool) -> None:
    assert (not compared(recorded, now, ComparisonRules(tolerance))) is is_same


@pytest.mark.parametrize("path", ["$.items[*].id", "$.items[1]", "$.items", "$..id", "$.items[*]['id']"])
def test_ignored_values_are_not_compared(path: str) -> None:
    rules = ComparisonRules(ignored=(JsonPath.parse(path),))
    assert not compared({"items": [{"id": 1}, {"id": 2}]}, {"items": [{"id": 1}, {"id": 3}]}, rules)


def test_ignored_members_may_be_missing_or_extra() -> None:
    rules = ComparisonRules(ignored=(JsonPath.parse("$.old"), JsonPath.parse("$.new")))
    assert not compared({"old": 1}, {"new": 2}, rules)


def test_ids_of_the_two_requests_are_the_same_text() -> None:
    assert not compared({"request_id": "id-1", "text": "see id-1"}, {"request_id": "id-2", "text": "see id-2"})
    assert compared({"request_id": "id-1"}, {"request_id": "id-3"})


def test_redacted_values_are_not_extra() -> None:
    recorded = RecordedBody("json", {"a": 1}, is_redacted=True)
    rules = ComparisonRules(redacted=(JsonPath.parse("$.secret"),))
    assert not compare(exchange(recorded), ReplayedAnswer(200, b'{"a":1,"secret":2}', {}), rules)


@pytest.mark.parametrize(
    ("recorded", "now", "kinds"),
    [
        (RecordedBody("base64", b"\x89PNG"), b"\x89PNG", []),
        (RecordedBody("base64", b"\x89PNG"), b"\x89PNH", ["bytes"]),
        (RecordedBody("text", "data: 1\n\n"), b"data: 1\n\n", []),
        (RecordedBody("text", "data: 1\n\n"), b"data: 2\n\n", ["text"]),
        (RecordedBody("text", "answer to id-1"), b"answer to id-2", []),
        (RecordedBody(), b"", []),
        (RecordedBody(), b"x", ["bytes"]),
        (RecordedBody("json", [1]), b"<html>", ["type"]),
        (RecordedBody("text", "beginn", is_truncated=True), b"beginning", []),
        (RecordedBody("text", "beginn", is_truncated=True), b"begun", ["text"]),
        (RecordedBody(is_omitted=True), b"anything", []),
    ],
)
def test_other_bodies_are_compared_by_their_bytes(recorded: RecordedBody, now: bytes, kinds: list[str]) -> None:
    found = compare(exchange(recorded), ReplayedAnswer(200, now, {"x-cortex-request-id": "id-2"}), RULES)
    assert [each.kind for each in found] == kinds


def test_compressed_bodies_are_compared_without_their_compression() -> None:
    recorded = RecordedBody("base64", gzip.compress(b"text", mtime=1), content_encoding="gzip")
    assert not compare(exchange(recorded), ReplayedAnswer(200, b"text", {}), RULES)
    again = ReplayedAnswer(200, gzip.compress(b"text", mtime=2), {"content-encoding": "gzip"})
    assert not compare(exchange(recorded), again, RULES)


def test_only_the_status_is_compared_if_it_differs() -> None:
    [found] = compare(exchange(RecordedBody("json", {"a": 1})), ReplayedAnswer(500, b'{"error":"x"}', {}), RULES)
    assert (found.kind, found.recorded, found.now) == ("status", "200", "500")


def test_deep_and_long_answers_are_compared_in_bounded_space() -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    assert not compared(deep, deep)
    assert compared([deep], [1])[0].recorded == "(nested deeply)"
    assert len(compared([0] * 5000, [1] * 5000)) == 1000


@given(JSON_VALUES)
def test_an_answer_does_not_differ_from_itself(value: Any) -> None:
    assert not compared(value, value)


@given(JSON_VALUES, JSON_VALUES)
def test_differences_are_found_in_both_directions(one: Any, other: Any) -> None:
    opposite = {"missing": "extra", "extra": "missing"}
    there, back = sorted(places(one, other)), sorted(places(other, one))
    assert there == sorted((place, opposite.get(kind, kind)) for place, kind in back)


@given(JSON_VALUES, JSON_VALUES)
def test_ignoring_all_differences_leaves_none(one: Any, other: Any) -> None:
    found = [each.place for each in compared(one, other)]
    if "$" not in found:
        rules = ComparisonRules(ignored=tuple(map(JsonPath.parse, found)))
        assert not compared(one, other, rules)
