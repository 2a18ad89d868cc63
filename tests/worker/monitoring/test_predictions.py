"""Lookup of recent predictions by request id."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cortex.worker.monitoring import tracker
from cortex.worker.monitoring.tracker import (
    RING_SIZE,
    PredictionKind,
    PredictionRing,
    find_predictions,
    read_predictions,
)

pytestmark = pytest.mark.processes

NUMBER, CLASS = PredictionKind.NUMBER, PredictionKind.CLASS


def request_id(number: int) -> str:
    return f"{1753000000000 + number}-7-{number}"


@pytest.mark.parametrize("asked", [1, 100], ids=["few", "many"])
def test_a_prediction_is_found_by_its_request_id(tmp_path: Path, asked: int) -> None:
    ring = PredictionRing(tmp_path, NUMBER)
    for number in range(200):
        ring.append(request_id(number).encode(), number / 2)

    wanted = {request_id(number): number / 2 for number in range(50, 50 + asked)}
    others = ["", "ö" * 3, "✓", "x" * 41, request_id(1000), request_id(5)[:-2]]
    assert find_predictions(tmp_path / "0", NUMBER, [*wanted, *others]) == wanted
    assert find_predictions(tmp_path / "0", CLASS, wanted) == {}
    assert find_predictions(tmp_path / "1", NUMBER, wanted) == {}


def test_the_oldest_predictions_are_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "RING_SIZE", 8)
    ring = PredictionRing(tmp_path, CLASS)
    for number in range(20):
        ring.append(request_id(number).encode(), 2**64 - 1 - number)

    found = find_predictions(tmp_path / "0", CLASS, [request_id(number) for number in range(20)])
    assert found == {request_id(number): 2**64 - 1 - number for number in range(12, 20)}


def test_the_next_process_continues_in_the_ring(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from cortex.worker.monitoring.tracker import *\n"
        "PredictionRing(Path(sys.argv[1]), PredictionKind.NUMBER).append(sys.argv[2].encode(), float(sys.argv[3]))\n"
        "print(*sorted(path.name for path in Path(sys.argv[1]).iterdir()))\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.stdout.flush() is None else None"
    )

    def run(number: int) -> str:
        command = [sys.executable, "-c", code, str(tmp_path), request_id(number), str(number)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30).stdout

    assert run(1) == "0\n"
    assert run(2) == "0\n"
    ours = PredictionRing(tmp_path, NUMBER)
    assert run(3) == "0 1\n"
    ours.append(request_id(4).encode(), 4)

    wanted = [request_id(number) for number in range(1, 5)]
    assert set(find_predictions(tmp_path / "0", NUMBER, wanted).values()) == {1, 2, 4}
    assert set(find_predictions(tmp_path / "1", NUMBER, wanted).values()) == {3}


@pytest.mark.parametrize("data", [b"", b"garbage", bytes(64), b"\xff" * 200])
def test_an_invalid_ring_is_read_as_empty(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "0").write_bytes(data)

    assert find_predictions(tmp_path / "0", NUMBER, [request_id(1)]) == {}


def test_new_predictions_are_read_once_and_overwritten_ones_are_left_out(tmp_path: Path) -> None:
    ring, path = PredictionRing(tmp_path, NUMBER), tmp_path / "0"
    assert read_predictions(path, NUMBER, 0) == (0, {})
    for number in range(3):
        ring.append(request_id(number).encode(), float(number))
    count, found = read_predictions(path, NUMBER, 1)
    assert (count, sorted(found.values())) == (3, [1.0, 2.0])
    assert read_predictions(path, NUMBER, 3) == (3, {})
    assert read_predictions(path, CLASS, 0) == read_predictions(tmp_path / "1", NUMBER, 0) == (0, {})
    for number in range(3, RING_SIZE + 10):
        ring.append(request_id(number).encode(), float(number))
    count, found = read_predictions(path, NUMBER, 3)
    assert count == RING_SIZE + 10
    assert sorted(found.values()) == [float(number) for number in range(count - RING_SIZE // 2, count)]
