"""The log files of one replica as a reader finds them: present and rotated, known by inode.

Knows the form of a line, not who writes or asks. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

#: Standard output, standard error, and the supervisor itself.
STDOUT, STDERR, SUPERVISOR = "o", "e", "s"
FILE_NAME = re.compile(r"(?P<replica>.+)\.log(?:\.\d+)?")
_BLOCK_BYTES = 64 * 1024
#: File times come from a coarser clock than the lines' own.
_CLOCK_MARGIN_S = 60


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a replica's log."""

    at: str  #: UTC, ISO 8601 with microseconds; sorts as text
    replica: str
    process: int
    stream: str  #: STDOUT, STDERR or SUPERVISOR
    text: str
    request_id: str = ""  #: of the request that it was printed for; empty if that is not known

    @property
    def time(self) -> datetime:
        """The time as a point in UTC."""
        return datetime.fromisoformat(self.at)


def entries(folder: Path) -> list[Path]:
    """List a folder; one that does not exist is empty."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def replicas(api_dir: Path, only: str | None) -> list[str]:
    """Return the ids of all replicas with log files, or of `only` that one."""
    matches = (FILE_NAME.fullmatch(entry.name) for entry in entries(api_dir))
    return sorted({match["replica"] for match in matches if match and only in (None, match["replica"])})


class History:
    """The files of one replica, present and rotated.

    Files are known by inode, because rotation renames them at any moment, also between two steps of a reader.
    """

    def __init__(self, api_dir: Path, replica: str) -> None:
        self.replica = replica
        self._path = api_dir / f"{replica}.log"

    def inodes(self) -> list[int]:
        """Return the inodes of the files, oldest first."""
        # Newest first: what rotation renames meanwhile is met twice, never missed.
        return list(dict.fromkeys(inode for inode, _ in self._files()))[::-1]

    def open(self, inode: int) -> BinaryIO | None:
        """Open the file, wherever rotation has moved it; None if it is gone."""
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
        """Yield the lines, oldest first; of the last `tail` at least all, nothing last written before `since`."""
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
                    yield from parse(self.replica, file)
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
        # Rotation under way leaves one gap; two in a row are the end.
        while missing < 2:
            path = self._path.with_name(f"{self._path.name}.{number}") if number else self._path
            try:
                yield path.stat().st_ino, path
                missing = 0
            except FileNotFoundError:
                missing += number > 0
            number += 1


def _offset_of_last_lines(file: BinaryIO, lines: int) -> tuple[int, int]:
    """Return where the last `lines` complete lines of a file begin, and how many there are (up to `lines`)."""
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


def parse(replica: str, lines: Iterable[bytes]) -> Iterator[LogLine]:
    """Read the lines of one file; what is not of our form (cut off by a full disk) gets the time before it."""
    at = ""
    for line in lines:
        text = line.decode(errors="replace").rstrip("\n")
        parts = text.split(" ", 3)
        if len(parts) == 4 and len(parts[0]) == 27 and parts[1].isdecimal():
            at = max(at, parts[0])
            stream, _, request_id = parts[2].partition(":")
            yield LogLine(at, replica, int(parts[1]), stream, parts[3], request_id)
        elif at and text:
            yield LogLine(at, replica, 0, SUPERVISOR, text)
