"""Parsing JSON: exact numbers, without the garbage collector."""

from __future__ import annotations

import gc
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.payloads.json_bodies import dump_json, parse_json

LARGE = b"[" + b"[1]," * 200_000 + b"[1]]"


@pytest.mark.parametrize("body", [b"[[1]]", LARGE])
def test_json_is_parsed_and_the_collector_is_as_before(body: bytes) -> None:
    assert parse_json(body)[-1] == [1]
    assert gc.isenabled()
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(body[:-1])
    assert gc.isenabled()


def test_a_collector_that_the_user_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        parse_json(LARGE)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_does_not_run_hundreds_of_times_for_a_large_body() -> None:
    runs: list[str] = []
    gc.callbacks.append(lambda phase, info: runs.append(phase))
    try:
        parsed = parse_json(LARGE)
    finally:
        gc.callbacks.pop()
    assert len(parsed) == 200_001
    assert runs.count("start") <= 2, "once it is enabled again, it may run"


NUMBERS = [2**63, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**19, 10**20, -(10**19), 2**200, -(10**300)]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("form", ["%d", " %d ", "[%d]", "[1, %d, 2]", '{"a":%d}', '{"a": %d}', "[\n%d\n]", "[[0],%d]"])
def test_whole_numbers_of_any_size_are_exact(number: int, form: str) -> None:
    text = form % number
    assert parse_json(text.encode()) == json.loads(text)
    assert json.loads(dump_json(parse_json(text.encode()))) == json.loads(text)


@given(st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_any_integers_round_trip(value: Any) -> None:
    assert parse_json(dump_json(value)) == value


@pytest.mark.parametrize("text", ["1e30", "1.5e300", "12345678901234567890123.0", '"12345678901234567890123"', "[1.0]"])
def test_other_values_are_those_of_orjson(text: str) -> None:
    assert repr(parse_json(text.encode())) == repr(orjson.loads(text))


@pytest.mark.parametrize(
    "text",
    ["9" * 400, "[NaN, 123456789012345678901]", "[123456789012345678901", "[" * 1000 + "9" * 30 + "]" * 1000, "0" * 30],
)
def test_numbers_do_not_make_invalid_json_valid(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(text.encode())


def test_a_value_that_nothing_can_write_is_a_value_error() -> None:
    value = parse_json(b"[" * 1020 + b"]" * 1020)
    with pytest.raises(ValueError, match="nested too deeply"):
        dump_json(value)
