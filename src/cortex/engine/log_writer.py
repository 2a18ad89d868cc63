"""The writer of a replica's log file. `cortex.engine.logs` reads it.

A line is `2026-11-21T01:32:46.123456Z 0 o text`: UTC, the index of the process, the stream (`o` standard output,
`e` standard error, `s` the supervisor itself), the text. A line printed for a request has the request's id after the
stream, `o:<id>`, and the id of its trace if it has one, `o:<id>:<trace id>`. Within a file, times never decrease.
Supervisors and workers import this module: standard library only, and nothing here blocks.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from cortex.worker.monitoring.request_log import END, ID, MARK

#: Standard output, standard error, and the supervisor itself.
STDOUT, STDERR, SUPERVISOR = "o", "e", "s"
#: A longer line is split into several.
MAX_LINE_BYTES = 64 * 1024

_MARK_BYTE = MARK.encode()
_MARKED = re.compile(f"{MARK}({ID}){END}".encode())
_Key = tuple[int, str]  # a process and its stream
_REOPEN_AFTER_NS = 1_000_000_000


class LogWriter:
    """Writes one replica's log file and keeps its size bounded.

    On any disk error it drops lines, continues, and logs their number once it can write again.
    """

    def __init__(self, path: Path | str, max_bytes: int = 10 * 1024 * 1024, backups: int = 4) -> None:
        self._path = str(path)
        self._max_bytes = max_bytes
        self._backups = backups
        self._file: int | None = None
        self._size_bytes = 0
        self._is_torn = False
        self._pending: dict[_Key, bytearray] = {}
        self._continued: dict[_Key, str] = {}  #: request id of a long line whose beginning is already written
        self._dropped = 0
        self._dropped_why = ""
        self._next_open_ns = 0
        self._now_ns = 0
        self._second = -1
        self._second_text = ""

    @property
    def path(self) -> Path:
        """The file that is written."""
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
        """Write `text` as a line, or as several if it contains line breaks."""
        encoded = text.encode(errors="backslashreplace")
        self._write(process, stream, _split_long(encoded.split(b"\n")))

    def flush(self, process: int | None = None) -> None:
        """Write the incomplete last lines of a process, or of all processes, as complete lines."""
        for key in [key for key in self._pending if process is None or key[0] == process]:
            self._write_marked(key, [bytes(self._pending.pop(key))])
        for key in [key for key in self._continued if process is None or key[0] == process]:
            del self._continued[key]

    def close(self) -> None:
        """Flush and close the file; a later call opens it again."""
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_marked(self, key: _Key, lines: list[bytes], is_complete: bool = True) -> None:
        """Write lines with the request ids of their marks. A line without a mark belongs to the line it continues."""
        process, stream = key
        continued = self._continued.pop(key, "")
        if not continued and not any(_MARK_BYTE in line for line in lines):
            self._write(process, stream, _split_long(lines))
            return
        request_id = ""
        for request_id, group in groupby(_unmarked(lines, continued), key=itemgetter(0)):
            token = f"{stream}:{request_id}" if request_id else stream
            self._write(process, token, _split_long([text for _, text in group]))
        if request_id and not is_complete:
            self._continued[key] = request_id

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
            view = memoryview(b"\n" + block if self._is_torn else block)
            while view:
                written = os.write(self._file, view)
                self._size_bytes += written
                view = view[written:]
                # A full disk accepts part of a block. The torn line must not swallow the next one.
                self._is_torn = bool(view)
        except OSError as error:
            self._dropped += len(lines)
            self._dropped_why = error.strerror or str(error)

    def _timestamp(self) -> bytes:
        # Merging several files relies on times that never decrease; clocks may.
        self._now_ns = max(self._now_ns, time.time_ns())
        second, rest_ns = divmod(self._now_ns, 1_000_000_000)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return b"%b.%06dZ" % (self._second_text.encode(), rest_ns // 1000)

    def _prepare(self, block_bytes: int) -> None:
        """Open the file, or rotate it if the block exceeds its maximum size."""
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


def _split_long(lines: list[bytes]) -> list[bytes]:
    """Split the lines that are too long."""
    if max(map(len, lines)) <= MAX_LINE_BYTES:
        return lines
    return [line[at : at + MAX_LINE_BYTES] for line in lines for at in range(0, max(len(line), 1), MAX_LINE_BYTES)]


def _unmarked(lines: list[bytes], continued: str) -> Iterator[tuple[str, bytes]]:
    """Remove the marks and yield (request id, text). A mark within a line, from interleaved threads, splits it.

    `continued` is the request id of the line that the first one continues.
    """
    for line in lines:
        first, *marked = _MARKED.split(line)
        if first or not marked:
            yield continued, first
        continued = ""
        for request_id, text in zip(marked[::2], marked[1::2], strict=True):
            yield request_id.decode(), text
