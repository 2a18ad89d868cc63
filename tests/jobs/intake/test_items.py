"""Batches contain all items in order and within the limits."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cortex.errors import SubmissionError
from cortex.jobs.intake.items import BatchBuilder, split_items, split_lines
from cortex.jobs.spec import NewBatch

VALUES = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=10,
)


def lines(content: bytes, cuts: Sequence[int] = (), batch_size: int = 2, limit: int = 10**6) -> list[NewBatch]:
    async def chunks() -> AsyncIterator[bytes]:
        begin = 0
        for cut in sorted(cut % (len(content) + 1) for cut in cuts):
            yield content[begin:cut]
            begin = cut
        yield content[begin:]

    async def collect() -> list[NewBatch]:
        return [batch async for batches in split_lines(chunks(), batch_size, limit) for batch in batches]

    return asyncio.run(collect())


def items_of(batches: Sequence[NewBatch]) -> list[Any]:
    assert all(batch.items == len(json.loads(batch.payload)) for batch in batches)
    assert not any(b"\n" in batch.payload or b"\r" in batch.payload for batch in batches)
    return [item for batch in batches for item in json.loads(batch.payload)]


@given(st.lists(VALUES, min_size=1, max_size=20), st.integers(1, 7))
def test_a_list_is_split_into_batches(items: list[Any], batch_size: int) -> None:
    batches = list(split_items(items, batch_size, 10**6))
    assert items_of(batches) == items
    assert all(batch.items == batch_size for batch in batches[:-1])


@given(
    st.lists(VALUES, max_size=20),
    st.integers(1, 7),
    st.sampled_from(["\n", "\r\n", "\n\n", " \n", "\n \r\n"]),
    st.booleans(),
    st.lists(st.integers(0, 10**6), max_size=5),
)
@example([1, 2], 2, "\r\n", False, [2])
def test_lines_are_split_into_batches(
    items: list[Any], batch_size: int, end: str, is_ended: bool, cuts: list[int]
) -> None:
    content = end.join(map(json.dumps, items)).encode() + (end.encode() if is_ended else b"")
    batches = lines(content, cuts, batch_size)
    assert items_of(batches) == items
    assert all(batch.items == batch_size for batch in batches[:-1])


def test_lines_from_many_chunks_keep_their_order() -> None:
    content = b"".join(b"%d\n" % number for number in range(300_000))
    batches = lines(content, range(0, len(content), 65_536), 100)
    assert items_of(batches) == list(range(300_000))
    assert len(batches) == 3000


def test_an_empty_upload_has_no_batches() -> None:
    assert lines(b"") == lines(b"\n\n \r\n") == []


def test_a_byte_order_mark_is_skipped() -> None:
    assert items_of(lines(b"\xef\xbb\xbf1\n2")) == [1, 2]


LINES = [
    (b"1\n\n2,3\n", "line 3 is invalid JSON (2,3): "),
    (b"[1,\n2]\n", "line 1 is invalid JSON ([1,): "),
    (b'{"a": 1}\n{"a": }\n', 'line 2 is invalid JSON ({"a": }): '),
    (b"1\r\nNaN", "line 2 is invalid JSON (NaN): "),
    (b'1\n"\xff"', 'line 2 is invalid JSON ("\ufffd"): it is no UTF-8; each line must be one JSON value by itself'),
    (b"1\n" * 100_000 + b"x", "line 100001 is invalid JSON (x): "),
    (b"1\n" * 100_000 + b"x\n" + b"1\n" * 100_000, "line 100001 is invalid JSON (x): "),
    (
        b'1\n\n"' + b"x" * 1000 + b'"\n',
        "line 3 has size 1002 bytes which exceeds the limit (1000 bytes); reduce its size",
    ),
    (b"1\n" + b"x" * 1_000_000, "line 2 has size 1000000 bytes"),
]


@pytest.mark.parametrize(("content", "message"), LINES)
def test_rejects_an_invalid_line_with_its_number(content: bytes, message: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        lines(content, limit=1000)
    assert str(caught.value).startswith(message)


def test_rejects_compressed_lines_with_a_hint() -> None:
    with pytest.raises(
        SubmissionError, match=r"^line 1 is invalid JSON \(.*\): it is compressed or binary; each line must"
    ):
        lines(gzip.compress(b"1\n2\n"))


def test_rejects_an_item_over_the_limit() -> None:
    with pytest.raises(SubmissionError, match=r"item 2 has size 102 bytes which exceeds the limit \(100 bytes\)"):
        list(split_items([1, 2, "x" * 100, 3], 2, 100))
    with pytest.raises(SubmissionError, match="item 5 has size 102 bytes"):
        BatchBuilder(3, 100).add([b"1", b"2", b"3", b"4", b"5", b'"' + b"x" * 100 + b'"'])


def test_rejects_a_batch_over_the_limit() -> None:
    message = (
        "cannot enqueue message because its size of 159 bytes exceeds the 100 bytes limit; use a smaller batch size"
    )
    with pytest.raises(SubmissionError, match=message):
        list(split_items(["x" * 77] * 2, 2, 100))
    with pytest.raises(SubmissionError, match="cannot enqueue message because its size of"):
        lines(b"12345678\n" * 20, batch_size=1000, limit=100)


def test_accepts_items_of_exactly_the_limit() -> None:
    item, half = "x" * 98, "x" * 47  # with quotes, 100 and 49 bytes; the latter twice and a comma: 99
    assert items_of(list(split_items([item], 1, 100))) == [item]
    assert items_of(list(split_items([half, half], 2, 99))) == [half, half]
    assert items_of(lines(f'"{item}"\n"{item}"'.encode(), batch_size=1, limit=100)) == [item, item]
    assert items_of(BatchBuilder(2, 99).add([f'"{half}"'.encode()] * 2)) == [half, half]


def test_rejects_items_of_one_byte_more() -> None:
    item, half = "x" * 99, "x" * 47
    for make in (lambda: list(split_items([item], 1, 100)), lambda: lines(f'"{item}"'.encode(), limit=100)):
        with pytest.raises(SubmissionError, match=r"has size 101 bytes .*; the size is that of its JSON$"):
            make()
    with pytest.raises(SubmissionError, match="its size of 99 bytes exceeds the 98 bytes limit"):
        list(split_items([half, half], 2, 98))


def test_rejects_a_batch_over_the_limit_before_reading_the_rest() -> None:
    batcher = BatchBuilder(10**9, 1000)
    with pytest.raises(SubmissionError, match="cannot enqueue message"):
        for _ in range(100):
            batcher.add([b"12345678"] * 10)


def test_numbers_keep_their_text() -> None:
    [batch] = lines(b"1.0\n12345678901234567890123\n1e2\n", batch_size=3)
    assert batch.payload == b"[1.0,12345678901234567890123,1e2]"


def test_rejects_nan_and_infinity() -> None:
    with pytest.raises(SubmissionError, match=r"item_list\.items: items 2 to 3 can't be written as JSON"):
        list(split_items([1, 2, 3, object()], 2, 100))
