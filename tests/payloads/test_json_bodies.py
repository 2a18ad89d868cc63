"""Parsing JSON without the garbage collector."""

from __future__ import annotations

import gc

import orjson
import pytest

from cortex.payloads.json_bodies import parse_json

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
