"""Read fields of a protobuf message in a file, without its schema and without reading values that are skipped.

The wire format is described at https://protobuf.dev/programming-guides/encoding/. Only what ONNX and SavedModel use is
accepted: groups are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MAX_TEXT_BYTES = 4096
_MAX_FIELDS = 5_000_000
_WINDOW_BYTES = 4096  #: read at once
_MAX_NUMBER = 2**29 - 1


class MessageError(ValueError):
    """The bytes are not a protobuf message."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field: a number, or the place of bytes in the file."""

    number: int
    value: int = 0  #: of a varint
    start: int = 0  #: offset of the bytes
    end: int = 0
    is_bytes: bool = False


def fields(file: BinaryIO, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message between two offsets. Raises: MessageError."""
    at, count = start, 0
    window, base = b"", start
    while at < end:
        count += 1
        if count > _MAX_FIELDS:
            raise MessageError("too many fields")
        if at - base + 2 * _MAX_VARINT_BYTES > len(window):
            file.seek(at)
            window, base = file.read(min(_WINDOW_BYTES, end - at)), at
        key, at = _varint(window, base, at)
        number, wire = key >> 3, key & 7
        if not 0 < number <= _MAX_NUMBER:  # parsers with 32 bits would drop the others of a longer one
            raise MessageError(f"field number {number}")
        if wire == _VARINT:
            value, at = _varint(window, base, at)
            yield Field(number, value)
            continue
        if wire == _LENGTH:
            length, at = _varint(window, base, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise MessageError(f"wire type {wire}")
        if length > end - at:
            raise MessageError(f"a field of {length} bytes, {end - at} bytes before the end")
        if wire == _LENGTH:
            yield Field(number, start=at, end=at + length, is_bytes=True)
        at += length


def text(file: BinaryIO, field: Field) -> str:
    """Return the text of a field. Raises: MessageError if it is not text, or long."""
    if not field.is_bytes or field.end - field.start > _MAX_TEXT_BYTES:
        raise MessageError("not a short text")
    file.seek(field.start)
    data = file.read(field.end - field.start)
    if b"\0" in data:  # libraries in C would end it there
        raise MessageError("a text with a zero byte")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MessageError("not UTF-8") from None


def _varint(window: bytes, base: int, at: int) -> tuple[int, int]:
    """Return the number at an offset of the file, and the offset behind it; `window` has the bytes from `base` on."""
    value = 0
    for index, byte in enumerate(window[at - base : at - base + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise MessageError("a number without an end")
