"""Numbers that outlive the process which writes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.replica import metrics
from cortex.replica.metrics import MetricFile, read_metrics


def test_what_one_writes_another_reads(tmp_path: Path) -> None:
    file = MetricFile(tmp_path / "a")
    index = file.index_of("requests")
    assert index is not None
    file.cells[index] += 2
    file.index_of("größe", 0.5)

    assert read_metrics(tmp_path / "a") == {"requests": 2, "größe": 0.5}


def test_a_file_that_is_opened_again_goes_on(tmp_path: Path) -> None:
    first = MetricFile(tmp_path / "a")
    index = first.index_of("requests", 3)

    second = MetricFile(tmp_path / "a")

    assert second.index_of("requests", 7) == index
    assert second.index_of("errors") != index
    assert read_metrics(tmp_path / "a") == {"requests": 3, "errors": 0}


def test_what_was_counted_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from cortex.replica.metrics import MetricFile\n"
        "file = MetricFile(Path(sys.argv[1])); file.cells[file.index_of('requests')] += 5\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], timeout=30)

    assert done.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path / "a") == {"requests": 5}


@given(st.dictionaries(st.text(max_size=40), st.floats(allow_nan=False), max_size=20))
def test_any_keys_and_values_are_read_back(tmp_path_factory: pytest.TempPathFactory, series: dict[str, float]) -> None:
    path = tmp_path_factory.mktemp("metrics") / "a"
    file = MetricFile(path)
    for key, value in series.items():
        file.index_of(key, value)

    assert read_metrics(path) == series


def test_a_full_file_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FILE_BYTES", os.sysconf("SC_PAGE_SIZE"))
    file = MetricFile(tmp_path / "a")

    indexes = [file.index_of(f"series {number}") for number in range(1000)]

    assert indexes[0] is not None
    assert indexes[-1] is None
    assert len(read_metrics(tmp_path / "a")) == sum(index is not None for index in indexes)


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xff" * 64, b"\x40" + bytes(7) + b"\xff" * 56])
def test_what_is_no_such_file_holds_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)

    assert read_metrics(tmp_path / "a") == {}


def test_a_file_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == {}


def test_a_file_takes_space_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
