"""Log files of replicas as the operator and the CLI read them: merged, followed, pruned.

`cortex.engine.log_writer` writes them and documents the form of a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import re
from collections import deque
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, Protocol

from cortex.engine.log_writer import SUPERVISOR
from cortex.errors import InputError
from cortex.processes.codec import newer

_FILE_NAME = re.compile(r"(?P<replica>.+)\.log(?:\.\d+)?")
_BLOCK_BYTES = 64 * 1024
#: File times come from a coarser clock than the times of lines.
_CLOCK_MARGIN_S = 60
#: Maximum that one poll of a follower reads from one replica.
_POLL_BYTES = 1024 * 1024
_READ_BYTES = 256 * 1024
_FOLLOW_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a replica's log."""

    at: str  #: UTC, ISO 8601 with microseconds; sorts as text
    replica: str
    process: int
    stream: str  #: STDOUT, STDERR or SUPERVISOR
    text: str
    request_id: str = ""  #: of the request that printed it; empty if unknown
    trace_id: str = newer("")  #: of the trace that the request belongs to, by its header `traceparent`

    @property
    def time(self) -> datetime:
        """The time of the line."""
        return datetime.fromisoformat(self.at)


_AT = attrgetter("at")


class LogSource(Protocol):
    """A machine whose logs can be read."""

    def logs(
        self, folder: str, replica: str | None, tail: int | None, follow: bool
    ) -> AsyncGenerator[list[LogLine], None]:
        """Yield the lines of a folder of logs in chunks, oldest first.

        `replica` is an id, or the short id shown in lines. `tail` limits the existing lines. With `follow`, new lines
        are yielded until the caller stops; an empty chunk means that there are no more for now.
        """


class LocalLogs:
    """The logs below one folder of this machine."""

    def __init__(self, logs_dir: Path) -> None:
        self._logs_dir = logs_dir

    async def logs(
        self, folder: str, replica: str | None, tail: int | None, follow: bool
    ) -> AsyncGenerator[list[LogLine], None]:
        """Yield lines; see `LogSource`. Raises: InputError if `folder` is not below the folder of logs."""
        api_dir = (self._logs_dir / folder).resolve()
        if not api_dir.is_relative_to(self._logs_dir.resolve()):
            raise InputError(f"{folder!r} is not a folder of logs")
        replica_id = replica
        if replica is not None and "-" not in replica:  # the short id that log lines show
            found = (name for name in _logged_replicas(api_dir, None) if name.endswith(f"-{replica}"))
            replica_id = next(found, replica)
        if not follow:
            yield await asyncio.to_thread(lambda: list(read_logs(api_dir, replica_id, tail=tail)))
            return
        follower = LogFollower(api_dir, replica_id, tail or 0)
        try:
            while True:
                lines = await asyncio.to_thread(follower.poll)
                yield lines
                if not lines:
                    await asyncio.sleep(_FOLLOW_POLL_S)
        finally:
            follower.close()


def read_logs(
    api_dir: Path, replica: str | None = None, *, tail: int | None = None, since: datetime | None = None
) -> Iterator[LogLine]:
    """Yield the lines of one replica or of all replicas of an API, past ones included, ordered by time.

    `tail` limits them to the last lines, `since` to those from that time on. Memory holds one line of each replica
    and `tail` lines.
    """
    if not tail and tail is not None:
        return
    logs = (_ReplicaLog(api_dir, name) for name in _logged_replicas(api_dir, replica))
    lines: Iterator[LogLine] = heapq.merge(*(log.read(tail, since) for log in logs), key=_AT)
    if since is not None:
        start = f"{since.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"
        lines = (line for line in lines if line.at >= start)
    yield from lines if tail is None else deque(lines, maxlen=tail)


class LogFollower:
    """Follows the logs of one replica, or of all replicas of an API, including those that start later.

    Holds one open file per replica; call `close` at the end.
    """

    def __init__(self, api_dir: Path, replica: str | None = None, tail: int = 100) -> None:
        self._api_dir = api_dir
        self._replica = replica
        self._tail = tail
        self._cursors: dict[str, _Cursor] | None = None

    def poll(self) -> list[LogLine]:
        """Return the lines since the last call, ordered by time; the first call returns the last `tail` lines.

        Never blocks. The size of a result is limited, so call again at once until the result is empty.
        """
        is_first = self._cursors is None
        cursors = self._cursors = self._cursors or {}
        names = _logged_replicas(self._api_dir, self._replica)
        for name in set(cursors) - set(names):
            cursors.pop(name).close()
        for name in names:
            if name not in cursors:
                cursors[name] = _Cursor(_ReplicaLog(self._api_dir, name), self._tail if is_first else None)
        lines = sorted((line for cursor in cursors.values() for line in cursor.read()), key=_AT)
        return lines[len(lines) - min(self._tail, len(lines)) :] if is_first else lines

    def close(self) -> None:
        """Close the files."""
        for cursor in (self._cursors or {}).values():
            cursor.close()
        self._cursors = None


def prune(logs_dir: Path, present: Collection[str], max_past: int = 20, max_bytes: int = 256 * 1024 * 1024) -> None:
    """Delete the logs of past replicas of each API, oldest first, beyond `max_past` replicas or `max_bytes`.

    `present` are the ids of running replicas; their writers bound their logs.
    """
    for api_dir in [entry for entry in _entries(logs_dir) if entry.is_dir()]:
        past: dict[str, list[tuple[Path, os.stat_result]]] = {}
        for entry in _entries(api_dir):
            match = _FILE_NAME.fullmatch(entry.name)
            if match and match["replica"] not in present:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()  # first: a replica without files must not be listed
                    past.setdefault(match["replica"], []).append((entry, status))
        newest_first = sorted(past.values(), key=lambda files: -max(status.st_mtime_ns for _, status in files))
        total_bytes = 0
        for position, files in enumerate(newest_first):
            total_bytes += sum(status.st_size for _, status in files)
            if position >= max_past or total_bytes > max_bytes:
                for file, _ in files:
                    file.unlink(missing_ok=True)


class _ReplicaLog:
    """The log files of one replica, current and rotated.

    Files are identified by inode, because rotation may rename them at any moment, also between two steps of a reader.
    """

    def __init__(self, api_dir: Path, replica: str) -> None:
        self.replica = replica
        self._path = api_dir / f"{replica}.log"

    def inodes(self) -> list[int]:
        """Return the inodes of the files, oldest first."""
        # Newest first: a file that rotation renames meanwhile is seen twice, never missed. Its last place counts: newer
        # files may have taken the first one.
        return list(dict.fromkeys(reversed([inode for inode, _ in self._files()])))

    def open(self, inode: int) -> BinaryIO | None:
        """Open the file, wherever rotation has moved it; return None if it is gone."""
        for _ in range(2):
            for found, path in self._files():
                if found == inode:
                    with contextlib.suppress(FileNotFoundError):
                        file = path.open("rb", buffering=_BLOCK_BYTES)
                        if os.fstat(file.fileno()).st_ino == inode:
                            return file
                        file.close()
        return None

    def read(self, tail: int | None, since: datetime | None) -> Iterator[LogLine]:
        """Yield lines, oldest first: at least the last `tail`, without files last written before `since`."""
        inodes = self.inodes()
        inode, offset = (None, 0) if tail is None else self.start_of_tail(inodes, tail)
        for number in inodes[inodes.index(inode) if inode is not None else 0 :]:
            file = self.open(number)
            if file is None:
                continue
            with file:
                last_write = os.fstat(file.fileno()).st_mtime
                if since is None or last_write + _CLOCK_MARGIN_S >= since.timestamp():
                    file.seek(offset)
                    yield from parse_lines(self.replica, file)
            offset = 0

    def start_of_tail(self, inodes: list[int], lines: int) -> tuple[int | None, int]:
        """Return the file and the offset in it where the last `lines` lines begin."""
        start: tuple[int | None, int] = (None, 0)
        for inode in reversed(inodes):
            file = self.open(inode)
            if file is None:
                break
            with file:
                offset, found = _offset_of_last_lines(file, lines)
            start = (inode, offset)
            lines -= found
            if lines <= 0:
                break
        return start

    def _files(self) -> Iterator[tuple[int, Path]]:
        missing = number = 0
        # A rotation in progress leaves one gap; two in a row are the end.
        while missing < 2:
            path = self._path.with_name(f"{self._path.name}.{number}") if number else self._path
            try:
                yield path.stat().st_ino, path
                missing = 0
            except FileNotFoundError:
                missing += number > 0
            number += 1


class _Cursor:
    """A position in one replica's log: an open file and an offset. The open file keeps its inode from being reused."""

    def __init__(self, log: _ReplicaLog, tail: int | None) -> None:
        """Start at the last `tail` lines, or at the first line."""
        self._log = log
        self._file: BinaryIO | None = None
        self._inode = -1
        self._rest = b""
        inodes = log.inodes()
        inode, offset = (inodes[0] if inodes else None, 0) if tail is None else log.start_of_tail(inodes, tail)
        if inode is not None:
            self._enter(inode, offset)

    def read(self) -> list[LogLine]:
        """Return the next lines, up to a limit, from as many files as there are."""
        lines: list[LogLine] = []
        budget = _POLL_BYTES
        while budget > 0:
            # List newer files before the last read of this one: once there is a newer file, this one is final.
            inodes = self._log.inodes()
            position = inodes.index(self._inode) + 1 if self._inode in inodes else 0
            while budget > 0 and self._file is not None and (data := self._file.read(_READ_BYTES)):
                budget -= len(data)
                complete, newline, self._rest = (self._rest + data).rpartition(b"\n")
                if newline:
                    lines += parse_lines(self._log.replica, complete.split(b"\n"))
            if position == len(inodes) or budget <= 0:
                break
            self._enter(inodes[position], 0)
        return lines

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _enter(self, inode: int, offset: int) -> None:
        self.close()
        self._inode = inode
        # The next file does not continue an incomplete last line.
        self._rest += b"\n" if self._rest else b""
        self._file = self._log.open(inode)
        if self._file is not None:
            self._file.seek(offset)


def parse_lines(replica: str, lines: Iterable[bytes]) -> Iterator[LogLine]:
    """Parse the lines of one file. A malformed line, torn by a full disk, gets the time of the line before it."""
    at = ""
    for line in lines:
        text = line.decode(errors="replace").rstrip("\n")
        parts = text.split(" ", 3)
        if len(parts) == 4 and len(parts[0]) == 27 and parts[1].isdecimal():
            at = max(at, parts[0])
            stream, _, owner = parts[2].partition(":")
            request_id, _, trace_id = owner.partition(":")
            yield LogLine(at, replica, int(parts[1]), stream, parts[3], request_id, trace_id)
        elif at and text:
            yield LogLine(at, replica, 0, SUPERVISOR, text)


def _offset_of_last_lines(file: BinaryIO, lines: int) -> tuple[int, int]:
    """Return the offset of the last `lines` complete lines of a file, and their number (at most `lines`)."""
    position = file.seek(0, os.SEEK_END)
    # One newline more than lines: the one that ends the line before them.
    wanted = lines + 1
    found = 0
    while position > 0:
        start = max(0, position - _BLOCK_BYTES)
        file.seek(start)
        block = file.read(position - start)
        end = len(block)
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            found += 1
            if found == wanted:
                return start + end + 1, lines
        position = start
    return 0, found


def _entries(folder: Path) -> list[Path]:
    """List a folder; a missing one is empty."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _logged_replicas(api_dir: Path, only: str | None) -> list[str]:
    """Return the ids of all replicas with log files, or `only` if it has some."""
    matches = (_FILE_NAME.fullmatch(entry.name) for entry in _entries(api_dir))
    return sorted({match["replica"] for match in matches if match and only in (None, match["replica"])})
