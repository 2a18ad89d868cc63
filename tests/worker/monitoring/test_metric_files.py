"""Metric files: series, merging, reading of folders and compaction."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.worker.monitoring import metrics
from cortex.worker.monitoring.metrics import (
    SUPERVISOR,
    Histogram,
    MetricFile,
    Series,
    SeriesKind,
    compact_ended,
    merge_series,
    parse_key,
    process_file,
    read_folder,
    read_metrics,
    series_key,
)
from harness.wait import wait_until

pytestmark = pytest.mark.processes


def test_parse_key_is_the_inverse_of_series_key() -> None:
    key = series_key(SeriesKind.COUNTER, "hits", {"b": 'x"y', "a": "ß"})

    assert parse_key(key) == Series(SeriesKind.COUNTER, "hits", (("a", "ß"), ("b", 'x"y')))


@pytest.mark.parametrize("key", ["", "x", "[]", '["nothing","a",[]]', '["counter","a",3]', "[" * 100_000])
def test_invalid_keys_are_ignored(key: str) -> None:
    assert parse_key(key) is None
    assert merge_series([{key: 1.0}]) == {}


@pytest.mark.parametrize(
    ("kind", "merged"),
    [
        (SeriesKind.COUNTER, 5),
        (SeriesKind.BUCKET, 5),
        (SeriesKind.SUM, 5),
        (SeriesKind.MIN, 2),
        (SeriesKind.MAX, 3),
        (SeriesKind.SET_AT, 3),
    ],
)
def test_merges_each_kind_of_series(kind: SeriesKind, merged: float) -> None:
    key = series_key(kind, "a")

    assert merge_series([{key: 2}, {key: 3}]) == {key: merged}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_merging_keeps_the_last_value_of_a_gauge(is_reversed: bool) -> None:
    value, set_at = series_key(SeriesKind.GAUGE, "a"), series_key(SeriesKind.SET_AT, "a")
    files = [{value: 7.0, set_at: 10.0}, {value: 8.0, set_at: 9.0}]

    assert merge_series(reversed(files) if is_reversed else files) == {value: 7.0, set_at: 10.0}


def test_a_histogram_counts_each_value_once(tmp_path: Path) -> None:
    histogram = Histogram(MetricFile(tmp_path / "a"), "wait", (0.1, 1.0), {"api": "iris"})
    for value in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(value)

    counted = {parse_key(key): value for key, value in read_metrics(tmp_path / "a").items()}
    buckets = {dict(key.labels)["le"]: value for key, value in counted.items() if key and key.kind == "bucket"}
    assert buckets == {"0.1": 2, "1": 1, "+Inf": 1}
    assert counted[Series(SeriesKind.SUM, "wait", (("api", "iris"),))] == pytest.approx(3.65)


def test_written_series_are_read(tmp_path: Path) -> None:
    file = MetricFile(tmp_path / "a")
    index = file.index_of("requests")
    assert index is not None
    file.cells[index] += 2
    file.index_of("größe", 0.5)

    assert read_metrics(tmp_path / "a") == {"requests": 2, "größe": 0.5}


def test_a_reopened_file_keeps_its_series(tmp_path: Path) -> None:
    first = MetricFile(tmp_path / "a")
    index = first.index_of("requests", 3)

    second = MetricFile(tmp_path / "a")

    assert second.index_of("requests", 7) == index
    assert second.index_of("errors") != index
    assert read_metrics(tmp_path / "a") == {"requests": 3, "errors": 0}


def test_series_survive_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from cortex.worker.monitoring.metrics import MetricFile\n"
        "file = MetricFile(Path(sys.argv[1])); file.cells[file.index_of('requests')] += 5\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], timeout=30)

    assert done.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path / "a") == {"requests": 5}


@given(st.dictionaries(st.text(max_size=40), st.floats(allow_nan=False), max_size=20))
def test_any_keys_and_values_round_trip(tmp_path_factory: pytest.TempPathFactory, series: dict[str, float]) -> None:
    path = tmp_path_factory.mktemp("metrics") / "a"
    file = MetricFile(path)
    for key, value in series.items():
        file.index_of(key, value)

    assert read_metrics(path) == series


def test_a_full_file_rejects_new_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FILE_BYTES", os.sysconf("SC_PAGE_SIZE"))
    file = MetricFile(tmp_path / "a")

    indexes = [file.index_of(f"series {number}") for number in range(1000)]

    assert indexes[0] is not None
    assert indexes[-1] is None
    assert len(read_metrics(tmp_path / "a")) == sum(index is not None for index in indexes)


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xff" * 64, b"\x40" + bytes(7) + b"\xff" * 56])
def test_an_invalid_file_is_read_as_empty(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)

    assert read_metrics(tmp_path / "a") == {}


def test_a_missing_file_is_read_as_empty(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == {}


def test_disk_space_is_reserved_before_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricFile(tmp_path / "a")
    blocks = (tmp_path / "a").stat().st_blocks * 512
    assert metrics.RESERVED_BYTES <= blocks < metrics.FILE_BYTES
    for number in range(1000):
        assert file.index_of(f"series {number} {'x' * 100}") is not None
    used = sum(len(key) for key in read_metrics(tmp_path / "a"))
    assert (tmp_path / "a").stat().st_blocks * 512 > used

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics.os, "posix_fallocate", full)
    found = [file.index_of(f"more {number} {'x' * 100}") for number in range(1000)]
    assert found[0] is not None and found[-1] is None
    with pytest.raises(OSError, match="No space left"):
        MetricFile(tmp_path / "b")


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


def test_a_folder_is_read_as_one_and_other_files_are_ignored(tmp_path: Path) -> None:
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
    count(file, 2)  # a new process with the same pid
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
    try:
        wait_until(lambda: seen)  # the thread reads
        for turn in range(50):
            compact_ended(tmp_path, max_files=0)
            count(process_file(str(tmp_path), turn % 2, pids[0]), 0)
    finally:
        is_over.set()
        reader.join()
    assert seen == {8}
