"""The files of a recording: one after the other per process, read as a stream in the order of their requests."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from cortex.errors import InputError
from cortex.recording.exchange import MAX_BODY_BYTES, Exchange, parse_exchange, parse_head

SUFFIX = ".ndjson"
#: Longer lines are damaged: both bodies, of `MAX_BODY_BYTES` each, may have six characters per byte.
MAX_LINE_BYTES = 32 * MAX_BODY_BYTES


@dataclass(frozen=True)
class RecordingFile:
    """One file, by its first line."""

    path: Path
    head: dict[str, Any] = field(compare=False)
    started_s: float  #: UNIX time
    share: float  #: of the requests

    @property
    def api(self) -> str:
        """Return the name of the API."""
        return str(self.head.get("api", ""))

    def exchanges(self) -> Iterator[Exchange]:
        """Yield the exchanges, but not an unfinished last line: its process was killed. Raises: InputError."""
        with _opened(self.path) as file:
            for number in itertools.count(1):
                line = _line(file, f"{self.path}:{number}")
                if not line.endswith(b"\n"):
                    return
                if number > 1:
                    yield parse_exchange(line, f"{self.path}:{number}", self.share)

    def has_unfinished_line(self) -> bool:
        """Return whether the last line was cut off when its process was killed. Raises: InputError."""
        with _opened(self.path) as file:
            if not file.seek(0, 2):
                return False
            file.seek(-1, 2)
            return file.read(1) != b"\n"


@dataclass(frozen=True)
class Recording:
    """A file, or all files below a folder."""

    files: tuple[RecordingFile, ...]  #: in the order of their beginnings
    empty: int = 0  #: files without a complete first line

    @classmethod
    def open(cls, path: Path) -> Recording:
        """Find the files of a recording. Raises: InputError."""
        if path.is_dir():
            paths = sorted(path.rglob(f"*{SUFFIX}"))
            if not paths:
                raise InputError(f"{path}: this folder has no recording: no file of it ends in {SUFFIX}")
        else:
            paths = [path]
        found = [file for each in paths if (file := _read_head(each)) is not None]
        return cls(tuple(sorted(found, key=lambda file: (file.started_s, file.path))), len(paths) - len(found))

    @property
    def apis(self) -> list[str]:
        """Return the names of the APIs, sorted."""
        return sorted({file.api for file in self.files})

    def of(self, api: str) -> Recording:
        """Return the files of one API."""
        return Recording(tuple(file for file in self.files if file.api == api), self.empty)

    def exchanges(self) -> Iterator[Exchange]:
        """Yield all exchanges by the end of their requests, with one open file per process. Raises: InputError."""
        waiting = list(reversed(self.files))
        heap: list[tuple[float, int, Exchange, Iterator[Exchange]]] = []
        numbers = iter(range(len(waiting)))

        def push(number: int, rest: Iterator[Exchange]) -> None:
            exchange = next(rest, None)
            if exchange is not None:
                heapq.heappush(heap, (exchange.started_s + exchange.duration_ms / 1000, number, exchange, rest))

        while waiting or heap:
            while waiting and (not heap or waiting[-1].started_s <= heap[0][0]):
                push(next(numbers), waiting.pop().exchanges())
            if heap:
                _, number, exchange, rest = heapq.heappop(heap)
                yield exchange
                push(number, rest)


def _read_head(path: Path) -> RecordingFile | None:
    """Read the first line of a file; None if its process was killed before the line was complete."""
    with _opened(path) as file:
        line = _line(file, f"{path}:1")
    if not line.endswith(b"\n"):
        if line and not line.startswith(b"{"):
            parse_head(line, f"{path}:1")
        return None
    head = parse_head(line, f"{path}:1")
    share = head.get("share")
    if not (isinstance(share, int | float) and 0 < share <= 1):
        share = 1.0  # versions of cortex before this field: not known
    try:
        return RecordingFile(path, head, datetime.fromisoformat(head["started"]).timestamp(), share)
    except (KeyError, ValueError, TypeError):
        raise InputError(f'{path}:1: this line of the recording is damaged: it has no valid "started"') from None


def _line(file: BinaryIO, place: str) -> bytes:
    """Read a line with its end, which only an unfinished one lacks. Raises: InputError."""
    try:
        line = file.readline(MAX_LINE_BYTES)
    except OSError as error:
        raise InputError(f"{place}: can't be read: {(error.strerror or str(error)).lower()}") from None
    if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
        raise InputError(
            f"{place}: this line of the recording is damaged: it is longer than {MAX_LINE_BYTES // 2**20} MiB"
        )
    return line


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: can't be read: {(error.strerror or str(error)).lower()}") from None
