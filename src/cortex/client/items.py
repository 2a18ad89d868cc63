"""The items of a job as the lines of JSON that are uploaded, a block at a time, whatever they come from."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from cortex.errors import InputError

BLOCK_BYTES = 256 * 1024
#: Items that are written at once; more would be no faster, and large ones hold much memory.
_GROUP = 128


class Readable(Protocol):
    """A binary file."""

    def read(self, size: int, /) -> bytes:
        """Read up to `size` bytes; none at the end."""


Items = Iterable[Any] | Readable | str | os.PathLike[str]


@contextmanager
def as_blocks(items: Items) -> Iterator[Iterator[bytes]]:
    """Give blocks of lines of JSON: from Python objects, or as they are in a file or at a path.

    Raises: InputError, also from the iterator: a file that can't be read, an object that JSON has no form for.
    """
    if isinstance(items, str | os.PathLike):
        with _opened(Path(items)) as file:
            yield _read(file, str(items))
    elif hasattr(items, "read"):
        stream = cast(Readable, items)
        yield _read(stream, str(getattr(stream, "name", "the items")))
    elif isinstance(items, bytes | bytearray | Mapping) or not isinstance(items, Iterable):
        raise ValueError(f"`items` must be an iterable of items, a path or a file (got {type(items).__name__})")
    else:
        yield _written(items)


@contextmanager
def _opened(path: Path) -> Iterator[Readable]:
    try:
        stream = path.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(str(path), error) from None
    with stream:
        yield stream


def _read(stream: Readable, name: str) -> Iterator[bytes]:
    # What a pipe has now is sent now.
    read = getattr(stream, "read1", stream.read)
    while True:
        try:
            block = read(BLOCK_BYTES)
        except OSError as error:
            raise _unreadable(name, error) from None
        if not block:
            return
        yield block.encode() if isinstance(block, str) else block


def _written(items: Iterable[Any]) -> Iterator[bytes]:
    # Loaded here, because every command loads this module, and hardly one writes items.
    orjson: Any = importlib.import_module("orjson")
    dumps = partial(orjson.dumps, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    left = iter(items)
    count = size = 0
    parts: list[bytes] = []
    while group := list(islice(left, _GROUP)):
        lines: list[bytes] = []
        try:
            lines.extend(map(dumps, group))
        except TypeError as error:
            raise InputError(f"item {count + len(lines) + 1} can't be written as JSON: {error}") from None
        parts.append(b"\n".join(lines) + b"\n")
        count += len(group)
        size += len(parts[-1])
        if size >= BLOCK_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _unreadable(name: str, error: OSError) -> InputError:
    return InputError(f"{name}: can't be read: {(error.strerror or str(error)).lower()}")
