from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.lifecycle import ProcessState
from cortex.processes.codec import NEWER, decode, encode, newer


def check_even(number: int) -> int:
    if number % 2:
        raise ValueError("an even number expected")
    return number


@dataclass(frozen=True)
class Part:
    name: str
    state: ProcessState


@dataclass(frozen=True)
class Message:
    number: int
    share: float
    is_new: bool
    kind: Literal["a", "b"]
    even: Annotated[int, check_even]
    parts: tuple[Part, ...]
    first: Part | None = None
    names: frozenset[str] = frozenset()
    counts: Mapping[str, dict[int, int]] = field(default_factory=dict)
    anything: Any = None
    plain: dict[str, Any] = field(default_factory=dict)
    recent: tuple[str, ...] = newer(("a",))
    recent_counts: dict[str, int] = field(default_factory=dict, metadata=NEWER)


MESSAGE = Message(1, 0.5, True, "a", 2, ())
DATA: dict[str, Any] = {"number": 1, "share": 0.5, "is_new": True, "kind": "a", "even": 2, "parts": []}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
PARTS = st.builds(Part, st.text(), st.sampled_from(ProcessState))
MESSAGES = st.builds(
    Message,
    number=st.integers(),
    share=st.floats(allow_nan=False),
    is_new=st.booleans(),
    kind=st.sampled_from(["a", "b"]),
    even=st.integers().map(lambda number: number * 2),
    parts=st.lists(PARTS).map(tuple),
    first=st.none() | PARTS,
    names=st.frozensets(st.text()),
    counts=st.dictionaries(st.text(), st.dictionaries(st.integers(), st.integers())),
    anything=JSON_VALUES,
    plain=st.dictionaries(st.text(), JSON_VALUES),
    recent=st.lists(st.text()).map(tuple),
)


@given(MESSAGES)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert decode(Message, json.loads(json.dumps(encode(message)))) == message


@given(JSON_VALUES | st.dictionaries(st.sampled_from([*DATA, "first", "counts"]), JSON_VALUES).map(lambda x: DATA | x))
def test_other_data_is_either_a_message_or_a_value_error(data: Any) -> None:
    try:
        message = decode(Message, data)
    except ValueError:
        return
    assert decode(Message, encode(message)) == message


def test_keys_of_a_newer_version_are_ignored_unless_they_must_be_refused() -> None:
    assert decode(Message, DATA | {"newer": 1}) == MESSAGE
    with pytest.raises(ValueError, match="newer: unknown"):
        decode(Message, DATA | {"newer": 1}, refuse_unknown=True)
    part = {"name": "a", "state": "ready", "newer": 1}
    with pytest.raises(ValueError, match="first: newer: unknown"):
        decode(Message, DATA | {"first": part}, refuse_unknown=True)


def test_a_key_that_older_versions_refuse_is_left_out_at_its_default() -> None:
    assert encode(MESSAGE).keys().isdisjoint({"recent", "recent_counts"})
    changed = replace(MESSAGE, recent=(), recent_counts={"a": 1})
    assert encode(changed).items() >= {"recent": [], "recent_counts": {"a": 1}}.items()
    assert decode(Message, encode(changed)) == changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": True}, "number: int expected, got bool"),
        ({"number": 1.0}, "number: int expected, got float"),
        ({"number": None}, "number: int expected, got NoneType"),
        ({"share": "1"}, "share: float expected, got str"),
        ({"share": 10**400}, "share: float expected"),
        ({"is_new": 1}, "is_new: bool expected"),
        ({"kind": "c"}, "kind: one of .* expected, got str"),
        ({"kind": []}, "kind: one of"),
        ({"even": 3}, "even: an even number expected"),
        ({"parts": {}}, "parts: list expected"),
        ({"parts": [{"name": "a", "state": "odd"}]}, "parts: state: 'odd' is not a valid"),
        ({"parts": [{"name": "a", "state": []}]}, "parts: state: "),
        ({"parts": [{}]}, "parts: name, state: missing"),
        ({"counts": {"a": {"x": 1}}}, "counts: "),
        ({"plain": []}, "plain: dict expected"),
    ],
)
def test_an_invalid_value_is_named_with_its_key(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(Message, DATA | change)


def test_an_integer_is_a_valid_float() -> None:
    assert repr(decode(Message, DATA | {"share": 1}).share) == "1.0"
