"""Cut items into batches: a list, lines of JSON while they arrive, or raw JSON values.

A batch's payload is the JSON array of its items. Raw values are joined unchanged, so that their text is preserved. The
limit of a batch counts its items as JSON and the commas between them, but not the brackets around them, so that an item
may be exactly as large as the limit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import orjson

from cortex.errors import SubmissionError
from cortex.jobs.intake.json_stream import BYTE_ORDER_MARK, PACKED, count_good, on_one_line, reason, shown, stripped
from cortex.jobs.spec import NewBatch
from cortex.payloads.json_bodies import dump_json

#: Size of the pieces that are split in one step: even with lines of one digit, the resulting objects stay small.
_PIECE_BYTES = 512 * 1024

_BRACKETS = len("[]")
#: Maximum number of batches yielded together, so that storing them does not delay other operations.
_PORTION = 2000


def split_items(items: Sequence[Any], batch_size: int, max_bytes: int) -> Iterator[NewBatch]:
    """Yield the batches of a list of items. Raises: SubmissionError if an item, or a batch, is too large."""
    for first in range(0, len(items), batch_size):
        some = items[first : first + batch_size]
        try:
            payload = dump_json(some)
        except (TypeError, ValueError) as error:
            last = first + len(some) - 1
            raise SubmissionError(
                f"item_list.items: items {first} to {last} can't be written as JSON: {error}"
            ) from None
        if len(payload) - _BRACKETS > max_bytes:
            raise too_large(first, list(map(dump_json, some)), max_bytes)
        yield NewBatch(len(some), payload)


async def split_lines(chunks: AsyncIterator[bytes], batch_size: int, max_bytes: int) -> AsyncIterator[list[NewBatch]]:
    """Yield the batches of lines of JSON while they arrive; blank lines are ignored.

    Raises: SubmissionError with the number of a line that is invalid or too large.
    """
    lines = _Lines(max_bytes)
    batcher = BatchBuilder(batch_size, max_bytes)
    async for piece in _pieces(chunks):
        batches = await asyncio.to_thread(_batches_of, piece, lines, batcher)
        for first in range(0, len(batches), _PORTION):
            yield batches[first : first + _PORTION]
    if batches := batcher.add(lines.end()) + batcher.rest():
        yield batches


def _batches_of(piece: bytes, lines: _Lines, batcher: BatchBuilder) -> list[NewBatch]:
    return batcher.add(lines.feed(piece))


class BatchBuilder:
    """Joins consecutive values into batches."""

    def __init__(self, batch_size: int, max_bytes: int) -> None:
        self._batch_size = batch_size
        self._max_bytes = max_bytes
        self._waiting: list[bytes] = []
        self._count = 0  #: of the items that are in batches

    def add(self, values: Sequence[bytes]) -> list[NewBatch]:
        """Add values and return the batches that are full. Raises: SubmissionError if one is too large."""
        values, size = [*self._waiting, *values] if self._waiting else values, self._batch_size
        full = len(values) // size * size
        batches = [self._batch(values[first : first + size]) for first in range(0, full, size)]
        self._waiting = list(values[full:])
        # A batch that is already too large is rejected before it is full.
        if len(self._waiting) > 1 and sum(map(len, self._waiting)) > self._max_bytes:
            self._batch(self._waiting)
        return batches

    def rest(self) -> list[NewBatch]:
        """Return the last, incomplete batch, if there is one."""
        waiting, self._waiting = self._waiting, []
        return [self._batch(waiting)] if waiting else []

    def _batch(self, values: Sequence[bytes]) -> NewBatch:
        payload = b"[" + b",".join(values) + b"]"
        if len(payload) - _BRACKETS > self._max_bytes:
            raise too_large(self._count, values, self._max_bytes)
        self._count += len(values)
        return NewBatch(len(values), payload)


def too_large(first: int, values: Sequence[bytes], max_bytes: int) -> SubmissionError:
    """Return the error for a batch beyond the limit whose first item has the number `first`."""
    for number, value in enumerate(values, first):
        if len(value) > max_bytes:
            return _item_too_large(f"item {number}", len(value), max_bytes)
    size = sum(map(len, values)) + len(values) - 1
    return SubmissionError(
        f"cannot enqueue message because its size of {size} bytes exceeds the {max_bytes} bytes limit; use a smaller"
        " batch size or reduce the size of each of item in the batch, or raise networking.max_batch_size of the API;"
        " the size is that of its items as JSON with the commas between them"
    )


def _item_too_large(item: str, size: int, max_bytes: int) -> SubmissionError:
    return SubmissionError(
        f"{item} has size {size} bytes which exceeds the limit ({max_bytes} bytes); reduce its size, or raise"
        " networking.max_batch_size of the API; the size is that of its JSON"
    )


class _Lines:
    """Splits a text, given piece by piece, into lines, each of which must be one JSON value."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._count = 0  #: of the lines before `_rest`

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in this piece, without blank ones."""
        if not self._count and not self._rest:
            piece = piece.removeprefix(BYTE_ORDER_MARK)
        cut = piece.rfind(b"\n")
        if cut < 0:
            self._rest += piece
            self._check_length([self._rest.strip()], [self._rest])
            return []
        text, self._rest = self._rest + piece[:cut], piece[cut + 1 :]
        return self._values(text)

    def end(self) -> list[bytes]:
        """Return the last line, which needs no line break."""
        text, self._rest = self._rest, b""
        return self._values(text)

    def _values(self, text: bytes) -> list[bytes]:
        raw = lines = text.split(b"\n")
        try:
            deque(map(orjson.loads, raw), 0)
        except orjson.JSONDecodeError:
            good = count_good(raw)
            if good < len(raw):
                raise self._refusal(good, raw[good].strip()) from None
            lines = stripped(raw)
        if b"\r" in text:
            lines = list(map(on_one_line, stripped(lines)))
        self._check_length(lines, raw)
        self._count += len(raw)
        return lines

    def _check_length(self, lines: list[bytes], raw: list[bytes]) -> None:
        if lines and max(map(len, lines)) > self._max_bytes:
            for number, line in enumerate(raw, self._count + 1):
                size = len(line.strip())
                if size > self._max_bytes:
                    raise _item_too_large(f"line {number}", size, self._max_bytes)

    def _refusal(self, index: int, line: bytes) -> SubmissionError:
        try:
            orjson.loads(line)
        except orjson.JSONDecodeError as error:
            why = reason(error)
        number = self._count + index + 1
        if number == 1 and line.startswith(PACKED):
            why = "it is compressed or binary"
        return SubmissionError(
            f"line {number} is invalid JSON ({shown(line, 0)}): {why}; each line must be one JSON value by itself"
        )


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks of any size as pieces large enough to be worth a thread's turn, and no larger."""
    waiting: list[bytes] = []
    size = 0
    async for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= _PIECE_BYTES:
            whole, waiting, size = b"".join(waiting), [], 0
            for begin in range(0, len(whole), _PIECE_BYTES):
                yield whole[begin : begin + _PIECE_BYTES]
    if size:
        yield b"".join(waiting)
