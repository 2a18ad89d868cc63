"""Keys and merging of series."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.replica.metrics import (
    Histogram,
    MetricFile,
    Series,
    SeriesKind,
    merge_series,
    parse_key,
    read_metrics,
    series_key,
)


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
def test_each_kind_is_merged_in_its_way(kind: SeriesKind, merged: float) -> None:
    key = series_key(kind, "a")

    assert merge_series([{key: 2}, {key: 3}]) == {key: merged}


@pytest.mark.parametrize("turned", [False, True])
def test_of_gauges_the_one_that_was_set_last_counts(turned: bool) -> None:
    value, moment = series_key(SeriesKind.GAUGE, "a"), series_key(SeriesKind.SET_AT, "a")
    files = [{value: 7.0, moment: 10.0}, {value: 8.0, moment: 9.0}]

    assert merge_series(reversed(files) if turned else files) == {value: 7.0, moment: 10.0}


def test_a_histogram_counts_each_value_once(tmp_path: Path) -> None:
    histogram = Histogram(MetricFile(tmp_path / "a"), "wait", (0.1, 1.0), {"api": "iris"})
    for value in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(value)

    counted = {parse_key(key): value for key, value in read_metrics(tmp_path / "a").items()}
    buckets = {dict(key.labels)["le"]: value for key, value in counted.items() if key and key.kind == "bucket"}
    assert buckets == {"0.1": 2, "1": 1, "+Inf": 1}
    assert counted[Series(SeriesKind.SUM, "wait", (("api", "iris"),))] == pytest.approx(3.65)
