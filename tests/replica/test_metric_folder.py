from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from cortex.replica.metrics import (
    SUPERVISOR,
    MetricFile,
    SeriesKind,
    compact_ended,
    process_file,
    read_folder,
    series_key,
)

REQUESTS = series_key(SeriesKind.COUNTER, "requests", {"code": "200"})


def count(path: Path, number: float) -> None:
    file = MetricFile(path)
    index = file.index_of(REQUESTS)
    assert index is not None
    file.cells[index] += number


def ended_pids(number: int) -> list[int]:
    """Return pids of processes that have ended."""
    done = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(number)]
    return [process.pid for process in done if process.wait() == 0]


def test_a_folder_is_read_as_one_and_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    count(process_file(str(tmp_path), 0, os.getpid()), 3)
    count(process_file(str(tmp_path), 1, os.getpid()), 4)
    count(tmp_path / SUPERVISOR, 1)
    (tmp_path / "0-1.ring").write_bytes(b"something else")
    assert read_folder(tmp_path) == {REQUESTS: 8}
    assert read_folder(tmp_path / "gone") == {}


def test_compacts_files_of_ended_processes_without_loss(tmp_path: Path) -> None:
    count(process_file(str(tmp_path), 0, os.getpid()), 100)
    pids = ended_pids(6)
    for number, pid in enumerate(pids[:3]):
        count(process_file(str(tmp_path), 0, pid), 10**number)
    compact_ended(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4, "a few may stay"
    for number, pid in enumerate(pids[3:], start=3):
        count(process_file(str(tmp_path), 0, pid), 10**number)
    compact_ended(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"0-{os.getpid()}", "ended.json", "ended.lock"}
    assert read_folder(tmp_path) == {REQUESTS: 111_211}
    compact_ended(tmp_path, max_files=0)
    assert read_folder(tmp_path) == {REQUESTS: 111_211}


def test_a_compacted_file_that_still_exists_counts_once(tmp_path: Path) -> None:
    (pid,) = ended_pids(1)
    file = process_file(str(tmp_path), 0, pid)
    count(file, 5)
    (tmp_path / "ended.json").write_text(json.dumps({"moved": [file.name], "series": {REQUESTS: 5}}))
    assert read_folder(tmp_path) == {REQUESTS: 5}
    compact_ended(tmp_path, max_files=0)
    assert read_folder(tmp_path) == {REQUESTS: 5}
    count(file, 2)  # a process with the same number
    assert read_folder(tmp_path) == {REQUESTS: 7}


def test_reading_during_compaction_sees_every_file(tmp_path: Path) -> None:
    pids = ended_pids(8)
    for pid in pids:
        count(process_file(str(tmp_path), 0, pid), 1)
    seen: set[float] = set()
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.add(read_folder(tmp_path).get(REQUESTS, 0.0))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for turn in range(50):
        compact_ended(tmp_path, max_files=0)
        count(process_file(str(tmp_path), turn % 2, pids[0]), 0)
    is_over.set()
    reader.join()
    assert seen == {8}
