"""Access log: the rules by which HAProxy writes one JSON line per request, and a reader of the lines of one API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from cortex.gateway.routes import ApiBackend, RoutingTable

#: Status in logs and metrics of a request whose client disconnected before the response. Nobody receives it.
CLIENT_CLOSED_REQUEST = 499
#: HAProxy's standard output, in the folder of logs.
ACCESS_LOG_FILE = "access.log"
_LINE_MAX_BYTES = 8192
_POLL_S = 0.2
_READ_BYTES = 1024 * 1024

_TIME = (
    '%[unique-id,field(1,-),div(1000),utime("%Y-%m-%dT%H:%M:%S")]'
    ".%[unique-id,bytes(10,3)]Z"  # the id begins with 13 digits
)
_LINE = (
    '{"time":"' + _TIME + '","request_id":"%ID","api":"%[var(txn.api)]","method":"%HM","path":"%[var(txn.path)]",'
    '"status":%[var(txn.status)],"bytes":%B,"queue_ms":%Tw,"total_ms":%Ta,"client":"%ci","termination":"%ts"'
)
#: Id of the request's trace, from its header `traceparent` (https://www.w3.org/TR/trace-context/); `-` without one.
_TRACE = ',"trace_id":"%[var(txn.trace_id)]"'
_VERSION, _IDS = "([1-9a-f][0-9a-e]|0[1-9a-f]|[1-9a-e]f)", "-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
_VALID_TRACE = (
    f"{{ req.fhdr(traceparent) -m reg '^(00{_IDS}|{_VERSION}{_IDS}(-.*)?)$' }}"
    f" ! {{ req.fhdr(traceparent) -m sub -- -{'0' * 32}- }} ! {{ req.fhdr(traceparent) -m sub -- -{'0' * 16}- }}"
)
#: Id of the caller's key; `-` where no key is required.
_KEY = ',"key":"%[var(txn.key_id)]"'

Fields = Mapping[str, Any]


def frontend_log(table: RoutingTable) -> str:
    """Return the logging rules of the frontend; empty if no API has an access log, because each line costs time."""
    if not any(backend.access_log for backend in table.backends):
        return ""
    return f"""\
  log stdout len {_LINE_MAX_BYTES} format raw local0 notice
  log-format '{_LINE}{_TRACE}{_KEY if table.requires_keys else ""}}}'
  http-request set-log-level silent
"""


def section_log(backend: ApiBackend) -> str:
    """Return the logging rules of an API's backend."""
    if not backend.access_log:
        return ""
    return f"""\
  http-request set-log-level notice
  http-request set-var(txn.api) str({backend.api})
  http-request set-var(txn.path) path,json(utf8ps)
  # Until there is a response: the status of a request whose client disconnects before.
  http-request set-var(txn.status) int({CLIENT_CLOSED_REQUEST})
  http-request set-var(txn.trace_id) req.fhdr(traceparent),field(2,-) if {_VALID_TRACE}
"""


def final_status(backend: ApiBackend) -> str:
    """Return the rule that takes the status of a response for the log; those that change it come before."""
    return "  http-after-response set-var(txn.status) status\n" if backend.access_log else ""


class AccessSource(Protocol):
    """Source of access log lines: this machine's log, or those of all nodes of a cluster."""

    def access(self, api: str, request: str | None, tail: int, follow: bool) -> AsyncGenerator[list[Fields], None]:
        """Yield the lines of an API, or of one of its requests, oldest first.

        The first list holds the last `tail` existing lines; it may be empty. With `follow`, lists of new lines follow
        until the generator is closed.
        """


class LocalAccess:
    """The access log in one folder of logs."""

    def __init__(self, logs_dir: Path) -> None:
        self._path = logs_dir / ACCESS_LOG_FILE

    async def access(
        self, api: str, request: str | None, tail: int, follow: bool
    ) -> AsyncGenerator[list[Fields], None]:
        """Yield lines; see `AccessSource`."""
        reader = _AccessLogReader(self._path, api, request)
        yield await asyncio.to_thread(reader.last, tail)
        while follow:
            found = await asyncio.to_thread(reader.poll)
            yield found
            if not found:
                await asyncio.sleep(_POLL_S)


class _AccessLogReader:
    """Reader of existing and appended lines; handles rotation, which copies the file to `.1` and truncates it."""

    def __init__(self, path: Path, api: str, request: str | None) -> None:
        self._path = path
        self._older = path.with_name(f"{path.name}.1")
        self._api = api
        self._request = request
        self._position = 0
        self._rest = b""

    def last(self, tail: int) -> list[Fields]:
        """Return the last `tail` existing lines."""
        found = deque(self._read(self._older), maxlen=tail)
        self._position, self._rest = 0, b""
        found.extend(self._read(self._path))
        return list(found)

    def poll(self) -> list[Fields]:
        """Return the lines written since the last call."""
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
        """Yield the matching lines of a file after the current position."""
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
    """Parse a line; return None if it belongs to another API or request, or is truncated."""
    if api.encode() not in line:
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("api") != api:
        return None
    return fields if request in (None, fields.get("request_id")) else None
