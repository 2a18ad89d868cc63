"""The files of metrics of one replica, read as one; those of processes that ended are made one.

A process writes `<index>-<pid>`, its supervisor `supervisor`. What processes left that ended is moved to `ended.json`,
so that a replica whose processes keep dying does not leave thousands. Other files of the folder are not ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cortex.processes.filelock import LockHeldError, hold_lock
from cortex.replica.metric_file import read_metrics
from cortex.replica.series import merge

#: The file of the supervisor's own numbers.
SUPERVISOR = "supervisor"
_ENDED, _LOCK = "ended.json", "ended.lock"
_OF_A_PROCESS = re.compile(r"\d+-(\d+)")
#: So many files of processes that ended may lie there before they are made one.
_KEPT_FILES = 4
_ATTEMPTS = 10


def process_file(folder: str, index: int, pid: int) -> Path:
    """Return where a process writes its numbers; `index` is its slot's."""
    return Path(folder) / f"{index}-{pid}"


def read_folder(folder: Path) -> dict[str, float]:
    """Return what all processes of a replica have counted, also those that ended; nothing if the folder is gone."""
    numbers: dict[str, float] = {}
    for _ in range(_ATTEMPTS):
        before = _read(folder)
        ended, moved = _parse(before)
        files = [path for path in _files(folder) if path.name not in moved]
        numbers = merge([ended, *map(read_metrics, files)])
        if _read(folder) == before:  # else the supervisor has moved numbers meanwhile
            break
    return numbers


def gather_ended(folder: Path, kept_files: int = _KEPT_FILES) -> None:
    """Make one of the files of processes that ended, once there are more than `kept_files`.

    Of several processes that call it at once, one does it. Raises: OSError.
    """
    if len(_ended(folder)) <= kept_files:
        return
    with contextlib.suppress(LockHeldError), hold_lock(folder / _LOCK):
        _gather(folder)


def _gather(folder: Path) -> None:
    done = _ended(folder)
    ended, moved = _parse(_read(folder))
    fresh = [path for path in done if path.name not in moved]
    series = merge([ended, *map(read_metrics, fresh)])
    _write(folder, series, [path.name for path in done])  # from here on readers leave those files out
    for path in done:
        path.unlink(missing_ok=True)
    _write(folder, series, [])  # their names may come again


def _files(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):  # noqa: PTH208 - names only
            if name == SUPERVISOR or _OF_A_PROCESS.fullmatch(name):
                yield folder / name


def _ended(folder: Path) -> list[Path]:
    return [path for path in _files(folder) if not _lives(path)]


def _lives(path: Path) -> bool:
    match = _OF_A_PROCESS.fullmatch(path.name)
    if match is None:
        return True
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # somebody else's: the pid is used again, so the file stays for now
    return True


def _read(folder: Path) -> bytes:
    try:
        return (folder / _ENDED).read_bytes()
    except OSError:
        return b""


def _write(folder: Path, series: dict[str, float], moved: list[str]) -> None:
    part = folder / f"{_ENDED}.part"
    part.write_text(json.dumps({"moved": moved, "series": series}))
    part.replace(folder / _ENDED)


def _parse(data: bytes) -> tuple[dict[str, float], frozenset[str]]:
    """Return the numbers, and the names of the files that they come from."""
    if not data:
        return {}, frozenset()
    parsed = json.loads(data)
    return parsed["series"], frozenset(parsed["moved"])
