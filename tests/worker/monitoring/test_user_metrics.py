from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from cortex.worker.monitoring import user_metrics
from cortex.worker.monitoring.metrics import (
    MetricFile,
    SeriesKind,
    parse_key,
    process_file,
    read_folder,
    read_metrics,
    series_key,
)
from cortex.worker.monitoring.user_metrics import MetricsClient
from harness.forks import in_forks


class Hostile:
    """An object that is not a number and has no repr."""

    def __repr__(self) -> str:
        raise RuntimeError("never mind")

    __float__ = __str__ = __repr__  # type: ignore[assignment]


def client_in(folder: Path, index: int = 0) -> MetricsClient:
    return MetricsClient(MetricFile(process_file(str(folder), index, os.getpid())), str(folder), index)


def counter(name: str, **tags: str) -> str:
    return series_key(SeriesKind.COUNTER, name, tags)


def test_counters_add_up_by_name_and_tags_in_any_order(tmp_path: Path) -> None:
    client = client_in(tmp_path)
    client.increment("hits")
    client.increment("hits", 2.5)
    client.increment(metric="hits", value=1, tags={"model": "a", "shard": 3})
    client.increment("hits", 1, {"shard": "3", "model": "a"})
    client.increment("hits", 10, {})
    assert read_folder(tmp_path) == {counter("hits"): 13.5, counter("hits", model="a", shard="3"): 2}


def test_the_last_value_of_a_gauge_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([100.0, 300.0, 200.0])
    monkeypatch.setattr(user_metrics.time, "time", lambda: next(clocks))
    first, second = client_in(tmp_path, 0), client_in(tmp_path, 1)
    first.gauge("level", 1)
    second.gauge("level", -2)
    first.gauge("level", 3)
    assert read_folder(tmp_path)[series_key(SeriesKind.GAUGE, "level")] == -2


def test_a_histogram_counts_by_size(tmp_path: Path) -> None:
    client = client_in(tmp_path)
    for value in (0.3, 0.4, -1, 1e9):
        client.histogram("size", value, {"kind": "x"})
    found = read_folder(tmp_path)
    shown = {key: value for key, value in found.items() if value}
    bucket = {
        limit: series_key(SeriesKind.BUCKET, "size", {"kind": "x", "le": limit}) for limit in ("0.5", "0.0001", "+Inf")
    }
    assert shown == {
        bucket["0.5"]: 2,
        bucket["0.0001"]: 1,
        bucket["+Inf"]: 1,
        series_key(SeriesKind.SUM, "size", {"kind": "x"}): pytest.approx(999_999_999.7),
    }


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda client: client.gauge("cortex_x", 1), "names that begin with cortex_"),
        (lambda client: client.gauge("istio_x", 1), "istio_"),
        (lambda client: client.increment("2x"), "'2x' is not the name of a metric"),
        (lambda client: client.increment("größe"), "is not the name of a metric"),
        (lambda client: client.increment(7), "7 is not the name"),
        (lambda client: client.gauge("x", "many"), "metric x: 'many' is not a number"),
        (lambda client: client.gauge("x", None), "metric x: None is not a number"),
        (lambda client: client.histogram("x", float("nan")), "not a finite number"),
        (lambda client: client.increment("x", -1), "can't go down"),
        (lambda client: client.gauge("x", 1, {"api": "y"}), "the tag 'api' is reserved"),
        (lambda client: client.gauge("x", 1, {"a b": "y"}), "'a b' is not the name of a tag"),
        (lambda client: client.gauge("x", 1, ["a"]), "tags must be a dictionary"),
        (lambda client: client.gauge("taken", 1), "metric taken is a counter already"),
        (lambda client: client.histogram("lat", 1), "metric lat: a histogram has a line lat_sum, which is a counter"),
        (lambda client: client.gauge("x", 10**400), "metric x: the number is too large"),
        (lambda client: client.gauge("x", Hostile()), "metric x: a value of the type Hostile is not a number"),
        (lambda client: client.gauge(Hostile(), "x"), "metric a value of the type Hostile: 'x' is not a number"),
        (lambda client: client.gauge([], 1), r"\[\] is not the name"),
        (lambda client: client.gauge("x", 1, {"a": Hostile()}), "the value of the tag 'a' has no text: RuntimeError"),
        (lambda client: client.gauge("x", 1, {Hostile(): 1}), "a value of the type Hostile is not the name of a tag"),
        (lambda client: client.gauge("x" * 201, 1), "is too long for a name: 200 characters are the most"),
    ],
    ids=[str(number) for number in range(21)],
)
def test_rejects_metrics_that_prometheus_does_not_allow(tmp_path: Path, call, words: str) -> None:  # type: ignore[no-untyped-def]
    client = client_in(tmp_path)
    client.increment("taken")
    client.increment("lat_sum")
    with pytest.raises(ValueError, match=words):
        call(client)
    assert read_folder(tmp_path) == {counter("taken"): 1, counter("lat_sum"): 1}


def test_rejects_names_that_a_histogram_uses(tmp_path: Path) -> None:
    client = client_in(tmp_path)
    client.histogram("lat", 1)
    for suffix in ("sum", "count", "bucket"):
        with pytest.raises(ValueError, match=f"metric lat_{suffix}: the histogram lat has a line of this name"):
            client.gauge(f"lat_{suffix}", 1)


def test_tags_are_limited_to_short_utf_8_text(tmp_path: Path) -> None:
    class Counting:
        def __str__(self) -> str:
            client.increment("shown")
            return "a" * 2000

    client = client_in(tmp_path)
    client.increment("hits", tags={"half": "\ud800", "long": Counting()})
    assert read_folder(tmp_path) == {counter("shown"): 1, counter("hits", half=r"\ud800", long="a" * 1000): 1}


def test_names_are_validated_without_a_file() -> None:
    client = MetricsClient(None)
    client.gauge("x", 1)
    client.histogram("y", 1)
    with pytest.raises(ValueError, match="cortex_"):
        client.increment("cortex_x")


def test_series_over_the_limit_are_dropped_with_one_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(user_metrics, "MAX_SERIES", 3)
    client = client_in(tmp_path)
    for user in range(100):
        client.increment("hits", tags={"user": user})
    client.increment("hits", tags={"user": 2})
    assert read_folder(tmp_path) == {counter("hits", user=str(user)): 1 + (user == 2) for user in range(3)}
    assert capsys.readouterr().err.count("too many combinations") == 1


def test_long_tags_leave_space_for_built_in_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = MetricFile(tmp_path / "0-1")
    client = MetricsClient(file)
    for number in range(300):
        client.histogram("sizes", 1, {"text": "é" * 900, "number": number})
    for number in range(600):
        client.increment("hits", tags={"text": "é" * 1000, "number": number})
    assert file.left_bytes >= user_metrics.RESERVED_FILE_BYTES
    assert file.index_of("ours") is not None
    assert capsys.readouterr().err.count("too many combinations") == 1
    kinds = Counter(series.kind for key in read_metrics(tmp_path / "0-1") if (series := parse_key(key)))
    assert kinds[SeriesKind.SUM] > 0
    assert kinds[SeriesKind.BUCKET] == kinds[SeriesKind.SUM] * (len(user_metrics.BOUNDS) + 1)  # no series was dropped


def test_concurrent_threads_lose_no_counts(tmp_path: Path) -> None:
    client = client_in(tmp_path)

    def count() -> None:
        for _ in range(5000):
            client.increment("hits")

    threads = [threading.Thread(target=count, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_folder(tmp_path) == {counter("hits"): 20_000}


@pytest.mark.processes
def test_a_forked_process_counts_separately(tmp_path: Path) -> None:
    client = client_in(tmp_path)
    client.increment("hits")
    assert in_forks(2, lambda: client.increment("hits", 10)) == [0, 0]
    client.increment("hits")
    assert read_folder(tmp_path) == {counter("hits"): 22}


@pytest.mark.processes
def test_many_forks_leave_few_files_and_lose_no_counts(tmp_path: Path) -> None:
    client = client_in(tmp_path)
    for _ in range(20):
        assert in_forks(3, lambda: client.increment("hits")) == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) < 15
    assert read_folder(tmp_path) == {counter("hits"): 60}
