"""Metrics of the results of user code."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.worker.monitoring.metrics import MetricFile, parse_key, read_metrics
from cortex.worker.monitoring.tracker import (
    BUCKETS,
    COUNT_KEY,
    LARGEST,
    MAX_CLASSES,
    MAX_KEY,
    MIN_KEY,
    OTHER,
    PREDICTIONS_FOLDER,
    RELATIVE_ERROR,
    SMALLEST,
    SUM_KEY,
    UNTRACKED_KEY,
    PredictionKind,
    PredictionTracker,
    bucket_of,
    bucket_value,
    class_hash,
    class_key,
    find_predictions,
)
from harness.replicas.specs import replica_spec

ID = b"1753000000000-7-1"


class Tracked:
    """A tracker in a folder, with its counts."""

    def __init__(
        self, folder: Path, model_type: str, key: str | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        spec = replica_spec(
            id="iris-1-1", metrics_dir=str(folder),
            tracker_key=key, tracker_type=model_type,
        )  # fmt: skip
        self.tracker = PredictionTracker(spec, MetricFile(folder / "numbers"), now)

    @property
    def counts(self) -> dict[str, float]:
        return read_metrics(self.folder / "numbers")

    def found(self, kind: PredictionKind, *ids: str) -> dict[str, float | int]:
        return find_predictions(self.folder / PREDICTIONS_FOLDER / "0", kind, ids)


def test_classes_are_counted_by_name(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path, "classification", key="label")

    tracked.tracker.track({"label": "größe", "other": 1}, ID)
    for label in ("cat", "dog", "cat", 7, "7", np.int64(7), np.str_("dog")):
        tracked.tracker.track({"label": label}, b"1753000000001-7-1")

    assert tracked.counts == {class_key("cat"): 2, class_key("dog"): 2, class_key("7"): 3, class_key("größe"): 1}
    assert tracked.found(PredictionKind.CLASS, ID.decode()) == {ID.decode(): class_hash("größe")}


def test_the_key_of_a_result_can_be_a_field(tmp_path: Path) -> None:
    tracked = Tracked(tmp_path, "classification", key="label")
    model: Any = pydantic.create_model("Prediction", label=str)

    tracked.tracker.track(model(label="cat"), ID)
    tracked.tracker.track(dataclasses.make_dataclass("Prediction", ["label"])("cat"), ID)

    assert tracked.counts == {class_key("cat"): 2}


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int64(3)], ids=["int", "float", "float32", "int64"])
def test_numbers_are_counted_in_buckets(tmp_path: Path, value: Any) -> None:
    tracked = Tracked(tmp_path, "regression")

    tracked.tracker.track(value, ID)
    tracked.tracker.track(-1.5, b"1753000000001-7-1")

    totals = {key: value for key, value in tracked.counts.items() if BUCKETS not in key}
    assert totals == {COUNT_KEY: 2, SUM_KEY: 1.5, MIN_KEY: -1.5, MAX_KEY: 3}
    assert sum(value for key, value in tracked.counts.items() if BUCKETS in key) == 2
    assert tracked.found(PredictionKind.NUMBER, ID.decode(), "unknown") == {ID.decode(): 3}


@pytest.mark.parametrize(
    ("model_type", "key", "result", "message"),
    [
        ("classification", "label", "cat", "the result is a str, which has no key `label`"),
        ("classification", "label", {"class": "cat"}, "the key `label` is not in the result"),
        ("classification", "label", {"label": None}, "the key `label` is null in the result"),
        ("classification", "label", {"label": True}, "the value is a bool: a class is a string or an integer"),
        ("classification", None, 0.5, "the value is a float: a class is a string or an integer"),
        ("classification", None, np.bool_(True), "a class is a string or an integer"),
        ("regression", None, "0.5", "the value is a str: a regression predicts a float or an integer"),
        ("regression", None, True, "the value is a bool"),
        ("regression", None, math.nan, "the value is nan: it must be finite"),
        ("regression", None, -math.inf, "the value is -inf: it must be finite"),
        ("regression", None, 10**400, "the value is too large a number"),
        ("regression", None, None, "the value is a NoneType"),
    ],
)
def test_results_that_cannot_be_tracked_are_logged(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model_type: str,
    key: str | None,
    result: Any,
    message: str,
) -> None:
    tracked = Tracked(tmp_path, model_type, key)

    tracked.tracker.track(result, ID)

    assert f"the prediction of request {ID.decode()} is not tracked: " in (log := capsys.readouterr().err)
    assert message in log
    assert tracked.counts == {UNTRACKED_KEY: 1}


def test_a_result_that_raises_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Hostile(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise RuntimeError("never mind")

    Tracked(tmp_path, "classification", "label").tracker.track(Hostile(), ID)

    assert "not tracked: RuntimeError: never mind" in capsys.readouterr().err


class Silent(RuntimeError):
    def __str__(self) -> str:
        raise SystemExit("never mind")


@pytest.mark.parametrize("error", [Silent(), SystemExit(1), KeyboardInterrupt()], ids=["silent", "exit", "interrupt"])
def test_a_result_that_raises_does_not_fail_its_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    class Hostile(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise error

    tracked = Tracked(tmp_path, "classification", "label")
    tracked.tracker.track(Hostile(), ID)

    assert f"not tracked: {type(error).__name__}" in capsys.readouterr().err
    assert tracked.counts == {UNTRACKED_KEY: 1}


def test_a_class_is_tracked_by_its_text_without_running_its_code(tmp_path: Path) -> None:
    class Hostile(str):
        def __str__(self) -> str:
            return self

        def __hash__(self) -> int:
            raise SystemExit

    tracked = Tracked(tmp_path, "classification")
    for name in (Hostile("cat"), "\ud800"):
        tracked.tracker.track(name, ID)

    assert tracked.counts == {class_key("cat"): 1, class_key(r"\ud800"): 1}


def test_log_messages_are_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    tracked = Tracked(tmp_path, "regression", now=lambda: now)
    for _ in range(5):
        tracked.tracker.track("one", ID)
    now += 61
    tracked.tracker.track("one", ID)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith(" (4 more since the last warning)")
    assert tracked.counts[UNTRACKED_KEY] == 6


def test_classes_beyond_the_maximum_are_counted_as_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracked = Tracked(tmp_path, "classification")
    for number in range(MAX_CLASSES + 5):
        tracked.tracker.track(f"c{number}", ID)
    tracked.tracker.track("c0", ID)
    tracked.tracker.track("long" * 100, b"1753000000001-7-1")

    counts = tracked.counts
    assert len(counts) == MAX_CLASSES + 1
    assert counts[class_key("c0")] == 2
    assert counts[class_key(OTHER)] == 6
    assert list(tracked.found(PredictionKind.CLASS, "1753000000001-7-1").values()) == [class_hash("long" * 100)]
    assert capsys.readouterr().err.count("are counted as") == 1


@given(st.floats(min_value=SMALLEST, max_value=LARGEST) | st.floats(min_value=-LARGEST, max_value=-SMALLEST))
def test_buckets_represent_numbers_within_the_documented_error(value: float) -> None:
    assert math.isclose(bucket_value(bucket_of(value)), value, rel_tol=RELATIVE_ERROR * 1.0001)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2))
def test_buckets_are_ordered_like_their_numbers(values: list[float]) -> None:
    buckets = [bucket_of(value) for value in sorted(values)]

    assert buckets == sorted(buckets)
    assert bucket_of(0.0) == 0 == bucket_value(0)


def test_every_key_can_be_parsed() -> None:
    assert all(parse_key(key) for key in (COUNT_KEY, SUM_KEY, MIN_KEY, MAX_KEY, UNTRACKED_KEY, class_key("a")))
