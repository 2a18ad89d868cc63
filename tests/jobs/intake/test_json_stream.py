"""JSON values are found in chunks of any size, and invalid JSON is reported with its position."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cortex.errors import SubmissionError
from cortex.jobs.intake.json_stream import JsonStream

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(['"', "\\", '\\"', "[{", "}]\n", "é漢😀", "\u2028", "\x7f"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=15,
)
#: Separators between values; numbers and literals need at least one character.
GAPS = st.sampled_from(["\n", "\n", "\r\n", " ", "\t", "\n\n", " \n ", "\r\n\r\n", ""])
INDENTS = st.sampled_from([None, None, 0, 2, "\t"])


@st.composite
def written(draw: st.DrawFn) -> tuple[list[Any], bytes]:
    """Draw values and the content of a file with them."""
    values, parts = draw(st.lists(VALUES, max_size=8)), [draw(GAPS)]
    for value in values:
        text = json.dumps(value, indent=draw(INDENTS), ensure_ascii=draw(st.booleans()))
        parts += [text if draw(st.booleans()) else text.replace("\n", "\r\n"), draw(GAPS) or _gap_after(value)]
    return values, "".join(parts).encode("utf-8", "surrogatepass")


def _gap_after(value: Any) -> str:
    return "" if isinstance(value, list | dict | str) else "\n"


def in_pieces(content: bytes, cuts: Sequence[int], limit: int = 10**6) -> list[bytes]:
    stream, found, begin = JsonStream("file", limit), list[bytes](), 0
    for cut in sorted(cut % (len(content) + 1) for cut in cuts):
        found += stream.feed(content[begin:cut])
        begin = cut
    return found + stream.feed(content[begin:]) + stream.end()


@given(written(), st.lists(st.integers(0, 10**6), max_size=12))
@example(([{"a": "é"}], b'{"a": "\xc3\xa9"}'), [8])
@example((["a\\", "b"], rb'"a\\""b"'), [2, 3, 4, 5])
@example(([1, 12], b"1\n12"), [1, 2, 3])
def test_any_chunks_give_the_written_values(source: tuple[list[Any], bytes], cuts: list[int]) -> None:
    values, content = source
    found = in_pieces(content, cuts)
    assert [json.loads(value) for value in found] == values
    assert not any(b"\n" in value or b"\r" in value for value in found)


@given(written())
def test_single_bytes_give_the_written_values(source: tuple[list[Any], bytes]) -> None:
    values, content = source
    assert [json.loads(value) for value in in_pieces(content, range(len(content)))] == values


@given(st.binary(max_size=60), st.lists(st.integers(0, 10**6), max_size=5))
def test_any_input_gives_values_or_an_error(content: bytes, cuts: list[int]) -> None:
    try:
        found = in_pieces(content, cuts)
    except SubmissionError as error:
        assert str(error).startswith("file: ")
        assert "\n" not in str(error)
    else:
        for value in found:
            json.loads(value)


@given(st.lists(st.sampled_from('{}[]",:\\ \n1a'), max_size=12).map("".join), st.lists(st.integers(0, 50), max_size=4))
def test_chunks_do_not_affect_which_input_is_rejected(text: str, cuts: list[int]) -> None:
    def outcome(cuts: Sequence[int]) -> list[bytes] | None:
        try:
            return in_pieces(text.encode(), cuts)
        except SubmissionError:
            return None

    assert outcome(cuts) == outcome([])


def test_numbers_keep_their_text() -> None:
    content = b"[1.0, 1e2, 123456789012345678901234567890]\n"
    assert in_pieces(content, []) == [content.strip()]


def test_a_byte_order_mark_is_skipped() -> None:
    assert in_pieces(b"\xef\xbb\xbf1\n2", [1, 2]) == [b"1", b"2"]
    assert in_pieces(b"\xef\xbb\xbf", [1]) == []


MISTAKES = [
    (b'{"a": 1}\n{"a": }\n', 'file: invalid JSON at byte 15 ({"a": 1} {"a": }'),
    (b"1\n2\n3,4\n", "file: invalid JSON at byte 5 (1 2 3,4"),
    (b'{"a": 1}, {"a": 2}', "file: invalid JSON at byte 8"),
    (b"NaN\n", "file: invalid JSON at byte 0 (NaN"),
    (b"1 2 x", "file: invalid JSON at byte 4 (x)"),
    (b'{"a": 1\n{"a": 2}\n', "file: invalid JSON at byte 8"),
    (b'["\xff"]', 'file: invalid JSON at byte 2 (["\ufffd"]): it is no UTF-8'),
    (b'{"a": [1, 2', 'file: invalid JSON at byte 0 ({"a": [1, 2): the file ends before this value does'),
    (b'"abc', 'file: invalid JSON at byte 0 ("abc): the file ends before this value does'),
    (b'"a\nb"', "file: invalid JSON at byte 2"),
    (gzip.compress(b"1\n2\n", mtime=0), "the file is compressed or binary; store it as plain JSON"),
    (b"name,age\nada,36\n", "file: invalid JSON at byte 0 (name,age ada,36"),
    ("é\n".encode() + b"1", "file: invalid JSON at byte 0"),
    ('"é" ?'.encode(), "file: invalid JSON at byte 5"),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES)
def test_rejects_invalid_json_with_its_position(content: bytes, message: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        in_pieces(content, [])
    assert message in str(caught.value)
    with pytest.raises(SubmissionError):
        in_pieces(content, range(len(content)))


def test_rejects_a_value_over_the_limit_before_reading_all_of_it() -> None:
    stream = JsonStream("file", 1000)
    with pytest.raises(SubmissionError, match=r"^file: the value at byte 4 has at least 2,007 bytes \(.*x…\), which"):
        stream.feed(b'1\n2\n{"a": "' + b"x" * 2000)
    with pytest.raises(SubmissionError, match=r"^file: the value has 1,002 bytes \(.x+…\), which exceeds the limit"):
        JsonStream("file", 1000).feed(b'1\n"' + b"x" * 1000 + b'"\n')
    stream = JsonStream("file", 1000)
    with pytest.raises(SubmissionError, match="write the items one after another, not as one list"):
        for _ in range(100):
            stream.feed(b"[" + b"1,\n" * 100)


def test_the_limit_applies_to_a_value_not_to_a_line() -> None:
    values = in_pieces(b'{"a":1}' * 1000, [3, 500, 2000], limit=100)
    assert values == [b'{"a":1}'] * 1000


def test_rejects_deeply_nested_values() -> None:
    with pytest.raises(SubmissionError):
        in_pieces(b"[" * 100_000 + b"]" * 100_000, [])
