"""Print new lines of all log files of a home: operator, gateway, replicas, job workers, agents.

The files are followed, so that nothing that writes a log ever waits for the reader of this output.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from cortex import telemetry
from cortex.engine.logs import parse_lines
from cortex.gateway.access_log import ACCESS_LOG_FILE
from cortex.operator.http.log_format import line_fields
from cortex.terminal import is_terminal, shown, without_overwritten

_POLL_S = 0.2
#: Maximum that one poll reads from one file.
_READ_BYTES = 1024 * 1024
_JOIN_TIMEOUT_S = 5.0
#: Logs that rotation copies to a file with another name and truncates. All others are renamed.
_TRUNCATED = frozenset({"gateway.log", ACCESS_LOG_FILE})
_FILE = re.compile(r"(?P<name>.+)\.log(?:\.\d+)?")
_HAPROXY = re.compile(r"\[(?P<level>\w+)\]\s*\(\d+\) : (?P<message>.*)")
#: Prefix of the last line of an operator that could not start.
_ERROR = "error: "
#: Keys of a printed line in the order in which they are useful to a reader; others follow.
_FIRST = ("time", "source", "level", "message")

Fields = dict[str, Any]


class LogFiles:
    """The log files below a folder; `poll` returns what was written since the construction or the last poll."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = {inode: size for _, inode, size in self._files()}

    def poll(self) -> list[Fields]:
        """Return new complete lines, ordered by time."""
        lines: list[Fields] = []
        offsets: dict[int, int] = {}
        for path, inode, size in self._files():
            offset = self._offsets.get(inode, 0)
            offset = 0 if size < offset else offset  # truncated
            if size > offset:
                data = _read(path, inode, offset)
                offset += len(data)
                lines += _parse(path.relative_to(self._folder), data)
            offsets[inode] = offset
        self._offsets = offsets
        return sorted(lines, key=lambda line: str(line["time"]))

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """Yield path, inode and size of each log; a file that is renamed meanwhile only once."""
        seen: set[int] = set()
        # The newest files first: one that rotation renames meanwhile is seen twice, never missed.
        for pattern in ("*.log", "*/*.log", "*/*/*.log", "*.log.*", "*/*.log.*", "*/*/*.log.*"):
            for path in self._folder.glob(pattern):
                try:
                    status = path.stat()
                except OSError:  # deleted meanwhile
                    continue
                if status.st_ino not in seen and path.stem not in _TRUNCATED:
                    seen.add(status.st_ino)
                    yield path, status.st_ino, status.st_size


class LogOutput:
    """Prints the lines of `LogFiles` on a thread of its own, as JSON or as text."""

    def __init__(self, folder: Path, stream: TextIO, is_json: bool) -> None:
        self._files = LogFiles(folder)
        self._stream = stream
        self._format = _as_json if is_json else _as_text
        self._others: deque[Fields] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log output", daemon=True)

    def start(self) -> None:
        """Print from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Print what was written until now, unless the reader of the output is stuck."""
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def write(self, level: str, message: str, **fields: object) -> None:
        """Print a line that is in no file, soon: a reader that is stuck must not block the caller."""
        self._others.append({"time": _now(), "source": "up", "level": level, "message": message, **fields})

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(_POLL_S)
            while lines := self._files.poll():
                self._print(lines)
            while self._others:
                self._print([self._others.popleft()])

    def _print(self, lines: list[Fields]) -> None:
        try:
            text = "".join(f"{self._format(line)}\n" for line in lines)
            self._stream.write(shown(text) if is_terminal(self._stream) else text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader has ended or the disk is full: the files have all lines
            pass


def _read(path: Path, inode: int, offset: int) -> bytes:
    """Return the next complete lines of a file; nothing if rotation has just moved it."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != inode:
                return b""
            file.seek(offset)
            data = file.read(_READ_BYTES)
    except OSError:
        return b""
    end = data.rfind(b"\n") + 1
    return data[:end] if end or len(data) < _READ_BYTES else data


def _parse(path: Path, data: bytes) -> Iterator[Fields]:
    """Yield the lines of one file; `path` is relative to the folder of logs."""
    match = _FILE.fullmatch(path.name)
    name, folders = match["name"] if match else path.name, path.parts[:-1]
    lines = data.split(b"\n")  # not at carriage returns, behind which callers could write lines of others
    if folders:
        where = dict(zip(("api", "job"), folders, strict=False))
        for line in parse_lines(name, lines):
            yield _ordered({"source": "replica", **where, **line_fields(line)})
        return
    for text in filter(None, (line.decode(errors="replace") for line in lines)):
        fields: Fields
        if path.name == ACCESS_LOG_FILE:
            fields = {"source": "access", **_json_object(text)}
        elif name == "gateway" and (parts := _HAPROXY.fullmatch(text)):
            level = {"alert": "error", "notice": "info"}.get(parts["level"].lower(), parts["level"].lower())
            fields = {"source": name, "level": level, "message": parts["message"]}
        elif text.startswith(_ERROR):
            fields = {"source": name, "level": "error", "message": text.removeprefix(_ERROR)}
        else:
            fields = {"source": name, **telemetry.parse(text)}
        yield _ordered({"time": _now(), **fields})


def _json_object(text: str) -> Fields:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": text}


def _ordered(fields: Fields) -> Fields:
    return {name: fields[name] for name in _FIRST if name in fields} | fields


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


def _as_json(line: Fields) -> str:
    return json.dumps(line, ensure_ascii=False)


def _as_text(line: Fields) -> str:
    """Return `time source level message key=value`, for replicas with the API and the end of the replica's id."""
    fields = dict(line)
    source = str(fields.pop("source"))
    if source == "replica":
        job = f"/{fields.pop('job')}" if "job" in fields else ""
        source = f"{fields.pop('api')}{job}/{str(fields.pop('replica')).rsplit('-', 1)[-1]}"
        for name in ("process", "stream"):
            fields.pop(name, None)
    if "message" in fields:
        fields["message"] = without_overwritten(str(fields["message"]))
    first = [fields.pop("time"), source, *(fields.pop(name) for name in ("level", "message") if name in fields)]
    return " ".join([*map(str, first), *(f"{name}={value}" for name, value in fields.items())])
