"""The access log of one machine's gateway as a stream, wherever who reads it is: the lines of one API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from cortex.gateway.access import ACCESS_LOG_FILE

_POLL_S = 0.2
_READ_BYTES = 1024 * 1024

Fields = Mapping[str, Any]


class AccessSource(Protocol):
    """Where lines of access logs come from."""

    def access(self, api: str, request: str | None, tail: int, follow: bool) -> AsyncGenerator[list[Fields], None]:
        """Go through the lines of an API, or of one of its requests, the oldest first.

        First, and perhaps empty, come the last `tail` of those that are there. With `follow`, others come as they are
        written, until nobody listens.
        """


class LocalAccess:
    """The access log in one folder of logs."""

    def __init__(self, logs_dir: Path) -> None:
        self._path = logs_dir / ACCESS_LOG_FILE

    async def access(
        self, api: str, request: str | None, tail: int, follow: bool
    ) -> AsyncGenerator[list[Fields], None]:
        """Go through lines; see `AccessSource`."""
        reader = _Reader(self._path, api, request)
        yield await asyncio.to_thread(reader.last, tail)
        while follow:
            found = await asyncio.to_thread(reader.poll)
            yield found
            if not found:
                await asyncio.sleep(_POLL_S)


class _Reader:
    """Reads what there is, then what is appended.

    A file that has become large is copied to the older one and emptied, under HAProxy's pen.
    """

    def __init__(self, path: Path, api: str, request: str | None) -> None:
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._api = api
        self._request = request
        self._position = 0
        self._rest = b""

    def last(self, tail: int) -> list[Fields]:
        """Return the last lines that there are."""
        found = deque(self._read(self._older), maxlen=tail)
        self._position, self._rest = 0, b""
        found.extend(self._read(self._path))
        return list(found)

    def poll(self) -> list[Fields]:
        """Return what was written since the last call."""
        found: list[Fields] = []
        if self._size() < self._position:
            found += self._read(self._older)
            self._position, self._rest = 0, b""
        return found + list(self._read(self._path))

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def _read(self, path: Path) -> Iterator[Fields]:
        """Yield what is in a file beyond our position."""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._position)
            while data := file.read(_READ_BYTES):
                self._position += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    fields = _parse(line, self._api, self._request)
                    if fields is not None:
                        yield fields


def _parse(line: bytes, api: str, request: str | None) -> Fields | None:
    """Return a line; None if it is of another API, or another request, or cut off."""
    if api.encode() not in line:
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("api") != api:
        return None
    return fields if request in (None, fields.get("request_id")) else None
