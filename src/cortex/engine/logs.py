"""Log files of replicas: the supervisor writes one, the operator merges, follows and prunes them.

A line is `2026-11-21T01:32:46.123456Z 0 o text`: UTC, the index of the process, the stream (`o` standard output,
`e` standard error, `s` the supervisor itself), the text. One that was printed for a request has the request's id after
the stream, `o:<id>`. Within a file, times never go back. Standard library only, and nothing here waits: supervisors
import it.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import BinaryIO

from cortex.engine.log_files import FILE_NAME, SUPERVISOR, History, LogLine, entries, parse, replicas
from cortex.engine.log_files import STDERR as STDERR
from cortex.engine.log_files import STDOUT as STDOUT
from cortex.replica.request_log import END, ID, MARK

#: A longer line is cut into several.
MAX_LINE_BYTES = 64 * 1024


_MARK_BYTE = MARK.encode()
_MARKED = re.compile(f"{MARK}({ID}){END}".encode())
_Key = tuple[int, str]  # a process and its stream
#: What one poll of a follower takes from one replica at most.
_POLL_BYTES = 1024 * 1024
_READ_BYTES = 256 * 1024
_REOPEN_AFTER_NS = 1_000_000_000


class LogWriter:
    """Writes one replica's log file and keeps it bounded.

    Whatever is wrong with the disk, it drops lines, goes on, and says how many were dropped once it can.
    """

    def __init__(self, path: Path | str, max_bytes: int = 10 * 1024 * 1024, backups: int = 4) -> None:
        self._path = str(path)
        self._max_bytes = max_bytes
        self._backups = backups
        self._file: int | None = None
        self._size_bytes = 0
        self._is_torn = False
        self._pending: dict[_Key, bytearray] = {}
        self._begun: dict[_Key, str] = {}  #: whose line it is that goes on, where the start of a long one is written
        self._dropped = 0
        self._dropped_why = ""
        self._next_open_ns = 0
        self._now_ns = 0
        self._second = -1
        self._second_text = ""

    @property
    def path(self) -> Path:
        """Return the file that is written."""
        return Path(self._path)

    def feed(self, process: int, stream: str, data: bytes) -> None:
        """Write the complete lines in `data`; the rest waits for the next call."""
        key = (process, stream)
        pending = self._pending.get(key)
        if pending is not None:
            pending += data
            if b"\n" not in data and len(pending) < MAX_LINE_BYTES:
                return
            data = bytes(pending)
        lines = data.split(b"\n")
        rest = lines.pop()
        if b"\r" in data:
            lines = [line.removesuffix(b"\r") for line in lines]
        if len(rest) >= MAX_LINE_BYTES:
            self._write_marked(key, [*lines, rest], is_complete=False)
            rest = b""
        elif lines:
            self._write_marked(key, lines)
        if rest:
            self._pending[key] = bytearray(rest)
        else:
            self._pending.pop(key, None)

    def line(self, process: int, stream: str, text: str) -> None:
        """Write `text` as a line, or as several if it has line breaks."""
        encoded = text.encode(errors="backslashreplace")
        self._write(process, stream, _cut(encoded.split(b"\n")))

    def flush(self, process: int | None = None) -> None:
        """Write the incomplete last lines of a process, or of all, as lines: nothing will complete them."""
        for key in [key for key in self._pending if process is None or key[0] == process]:
            self._write_marked(key, [bytes(self._pending.pop(key))])
        for key in [key for key in self._begun if process is None or key[0] == process]:
            del self._begun[key]

    def close(self) -> None:
        """Flush and let go of the file; a later call opens it again."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_marked(self, key: _Key, lines: list[bytes], is_complete: bool = True) -> None:
        """Write lines whose requests are said by marks; without one, a line is that of the line it goes on with."""
        process, stream = key
        begun = self._begun.pop(key, "")
        if not begun and not any(_MARK_BYTE in line for line in lines):
            self._write(process, stream, _cut(lines))
            return
        request_id = ""
        for request_id, group in groupby(_unmarked(lines, begun), key=itemgetter(0)):
            token = f"{stream}:{request_id}" if request_id else stream
            self._write(process, token, _cut([text for _, text in group]))
        if request_id and not is_complete:
            self._begun[key] = request_id

    def _write(self, process: int, stream: str, lines: list[bytes]) -> None:
        prefix = b"%b %d %b " % (self._timestamp(), process, stream.encode())
        block = prefix + (b"\n" + prefix).join(lines) + b"\n"
        try:
            self._prepare(len(block))
            if self._file is None:
                raise OSError(0, self._dropped_why or "the file can't be opened")
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                notice = f"{dropped} log lines were dropped: {self._dropped_why}\n"
                block = b"%b %d %b " % (prefix.split()[0], process, SUPERVISOR.encode()) + notice.encode() + block
                lines = [*lines, *[b""] * dropped]
            self._put(self._file, block)
        except OSError as error:
            self._dropped += len(lines)
            self._dropped_why = error.strerror or str(error)

    def _put(self, file: int, block: bytes) -> None:
        if self._is_torn:
            block = b"\n" + block
        view = memoryview(block)
        while view:
            written = os.write(file, view)
            self._size_bytes += written
            view = view[written:]
            # A disk that fills up takes a part; the line that it cut must not swallow the next one.
            self._is_torn = bool(view)

    def _timestamp(self) -> bytes:
        # The merge of several files relies on times that never go back; clocks do.
        self._now_ns = max(self._now_ns, time.time_ns())
        second, rest_ns = divmod(self._now_ns, 1_000_000_000)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return b"%b.%06dZ" % (self._second_text.encode(), rest_ns // 1000)

    def _prepare(self, block_bytes: int) -> None:
        """Open the file, or the next one if the block does not fit any more."""
        if self._file is not None and self._size_bytes and self._size_bytes + block_bytes > self._max_bytes:
            self._rotate()
        if self._file is None and self._now_ns >= self._next_open_ns:
            self._next_open_ns = self._now_ns + _REOPEN_AFTER_NS
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)  # noqa: PTH103, PTH120 - no Path per line
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size_bytes = os.fstat(self._file).st_size
            self._is_torn = self._size_bytes > 0 and os.pread(self._file, 1, self._size_bytes - 1) != b"\n"
            self._next_open_ns = 0

    def _rotate(self) -> None:
        assert self._file is not None
        os.close(self._file)
        self._file = None
        names = [self._path, *(f"{self._path}.{number}" for number in range(1, self._backups + 1))]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)  # noqa: PTH105 - plain strings, as everywhere in this class
        if not self._backups:
            os.truncate(self._path, 0)


def _cut(lines: list[bytes]) -> list[bytes]:
    """Return the lines with long ones as several."""
    if max(map(len, lines)) <= MAX_LINE_BYTES:
        return lines
    return [line[at : at + MAX_LINE_BYTES] for line in lines for at in range(0, max(len(line), 1), MAX_LINE_BYTES)]


def _unmarked(lines: list[bytes], begun: str) -> Iterator[tuple[str, bytes]]:
    """Take the marks off; one within a line, where threads got in each other's way, begins another line.

    `begun` is whose line the first one goes on with.
    """
    for line in lines:
        first, *marked = _MARKED.split(line)
        if first or not marked:
            yield begun, first
        begun = ""
        for request_id, text in zip(marked[::2], marked[1::2], strict=True):
            yield request_id.decode(), text


def read_logs(
    api_dir: Path, replica: str | None = None, *, tail: int | None = None, since: datetime | None = None
) -> Iterator[LogLine]:
    """Yield the lines of all replicas of an API, past ones too, or of one, in the order of time.

    `tail` limits them to the last so many lines, `since` to those from that moment on. Holds one line of each
    replica (and `tail` lines) in memory.
    """
    if not tail and tail is not None:
        return
    histories = (History(api_dir, name) for name in replicas(api_dir, replica))
    lines: Iterator[LogLine] = heapq.merge(*(history.read(tail, since) for history in histories), key=_AT)
    if since is not None:
        start = _format(since)
        lines = (line for line in lines if line.at >= start)
    yield from lines if tail is None else deque(lines, maxlen=tail)


class LogFollower:
    """Follows the logs of all replicas of an API, or of one; replicas that appear later are followed too.

    Holds one open file per replica; end with `close`.
    """

    def __init__(self, api_dir: Path, replica: str | None = None, tail: int = 100) -> None:
        self._api_dir = api_dir
        self._replica = replica
        self._tail = tail
        self._cursors: dict[str, _Cursor] | None = None

    def poll(self) -> list[LogLine]:
        """Return the lines since the last call, in order of time; the first call returns the last `tail` ones.

        Never waits. A full answer is cut off, so call again at once until there is nothing.
        """
        is_first = self._cursors is None
        cursors = self._cursors = self._cursors or {}
        names = replicas(self._api_dir, self._replica)
        for name in set(cursors) - set(names):
            cursors.pop(name).close()
        for name in names:
            if name not in cursors:
                cursors[name] = _Cursor(History(self._api_dir, name), self._tail if is_first else None)
        lines = sorted((line for cursor in cursors.values() for line in cursor.read()), key=_AT)
        return lines[len(lines) - min(self._tail, len(lines)) :] if is_first else lines

    def close(self) -> None:
        """Let go of the files."""
        for cursor in (self._cursors or {}).values():
            cursor.close()
        self._cursors = None


def prune(logs_dir: Path, present: Collection[str], max_past: int = 20, max_bytes: int = 256 * 1024 * 1024) -> None:
    """Delete the logs of the oldest past replicas of each API, beyond so many of them or so many bytes.

    `present` are the ids of the replicas that run; their logs are bounded by their writers.
    """
    for api_dir in [entry for entry in entries(logs_dir) if entry.is_dir()]:
        past: dict[str, list[tuple[Path, os.stat_result]]] = {}
        for entry in entries(api_dir):
            match = FILE_NAME.fullmatch(entry.name)
            if match and match["replica"] not in present:
                with contextlib.suppress(FileNotFoundError):
                    past.setdefault(match["replica"], []).append((entry, entry.stat()))
        newest_first = sorted(past.values(), key=lambda files: -max(status.st_mtime_ns for _, status in files))
        total_bytes = 0
        for position, files in enumerate(newest_first):
            total_bytes += sum(status.st_size for _, status in files)
            if position >= max_past or total_bytes > max_bytes:
                for file, _ in files:
                    file.unlink(missing_ok=True)


_AT = attrgetter("at")


def _format(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


class _Cursor:
    """A place in one replica's history: an open file and an offset. The open file keeps its inode from being reused."""

    def __init__(self, history: History, tail: int | None) -> None:
        """Begin at the last `tail` lines, or with all there is."""
        self._history = history
        self._file: BinaryIO | None = None
        self._inode = -1
        self._rest = b""
        inodes = history.inodes()
        inode, offset = (inodes[0] if inodes else None, 0) if tail is None else history.start_of_tail(inodes, tail)
        if inode is not None:
            self._enter(inode, offset)

    def read(self) -> list[LogLine]:
        """Return the next lines, some at a time, across as many files as there are."""
        lines: list[LogLine] = []
        budget = _POLL_BYTES
        while budget > 0:
            # Newer files are looked for before the last look at this one: once there is one, this one is final.
            following = self._following()
            while budget > 0 and (data := self._read_file()):
                budget -= len(data)
                lines += self._lines(data)
            if following is None or budget <= 0:
                break
            self._enter(following, 0)
        return lines

    def _lines(self, data: bytes) -> list[LogLine]:
        complete, newline, rest = (self._rest + data).rpartition(b"\n")
        self._rest = rest
        return list(parse(self._history.replica, complete.split(b"\n"))) if newline else []

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _enter(self, inode: int, offset: int) -> None:
        self.close()
        self._inode = inode
        # What the last file ends in without a line break, the next one does not go on with.
        self._rest += b"\n" if self._rest else b""
        self._file = self._history.open(inode)
        if self._file is not None:
            self._file.seek(offset)

    def _read_file(self) -> bytes:
        return self._file.read(_READ_BYTES) if self._file is not None else b""

    def _following(self) -> int | None:
        inodes = self._history.inodes()
        position = inodes.index(self._inode) + 1 if self._inode in inodes else 0
        return inodes[position] if position < len(inodes) else None
