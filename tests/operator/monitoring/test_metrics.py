from __future__ import annotations

import re
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cortex.operator.monitoring.metrics import HELP, MetricPoint, counter, gauge, initial_series, series_points, to_text
from cortex.worker.monitoring.metrics import Histogram, MetricFile, SeriesKind, read_metrics, series_key
from harness.replicas.fleet import api as new_api

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def lines(*points: MetricPoint) -> list[str]:
    return [line for line in to_text(points).decode().splitlines() if not line.startswith("#")]


def test_groups_counters_and_gauges_by_family_under_their_own_names() -> None:
    text = to_text(
        [
            counter("cortex_requests_total", 3, api="a", code="2xx"),
            gauge("cortex_queue_length", 1, api="a"),
            counter("cortex_requests_total", 4, api="b", code="2xx"),
        ]
    ).decode()
    assert text.count("# TYPE cortex_requests_total counter") == 1
    assert text.count("# TYPE cortex_queue_length gauge") == 1
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'cortex_requests_total{api="a",code="2xx"} 3.0',
        'cortex_requests_total{api="b",code="2xx"} 4.0',
        'cortex_queue_length{api="a"} 1.0',
    ]


def test_histogram_buckets_are_cumulative(tmp_path: Path) -> None:
    path = tmp_path / "file"
    histogram = Histogram(MetricFile(path), "cortex_batch_size", (1.0, 2.0, 16.0), {"model": "m"})
    for value in (1, 2, 2, 99):
        histogram.observe(value)
    assert lines(*series_points("iris", read_metrics(path))) == [
        'cortex_batch_size_bucket{api="iris",le="1",model="m"} 1.0',
        'cortex_batch_size_bucket{api="iris",le="2",model="m"} 3.0',
        'cortex_batch_size_bucket{api="iris",le="16",model="m"} 3.0',
        'cortex_batch_size_bucket{api="iris",le="+Inf",model="m"} 4.0',
        'cortex_batch_size_sum{api="iris",model="m"} 104.0',
        'cortex_batch_size_count{api="iris",model="m"} 4.0',
    ]


def test_omits_hidden_and_internal_series() -> None:
    numbers = {
        series_key(SeriesKind.COUNTER, "_sketch", {"bucket": "3"}): 1.0,
        series_key(SeriesKind.GAUGE, "level"): 2.5,
        series_key(SeriesKind.SET_AT, "level"): 1_700_000_000.0,
        series_key(SeriesKind.MAX, "value"): 9.0,
        "nothing of ours": 1.0,
    }
    assert lines(*series_points("iris", numbers)) == ['level{api="iris"} 2.5', 'value_max{api="iris"} 9.0']


def test_escapes_any_label_text() -> None:
    label = 'a "quoted" \\ word\nand a line'
    (family,) = text_string_to_metric_families(to_text([gauge("x", 1, api="iris", tag=label)]).decode())
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("x", {"api": "iris", "tag": label}, 1.0)
    ]


def test_one_name_with_two_types_still_gives_a_valid_page() -> None:
    points = [
        counter("hits", 1, api="a"),
        gauge("hits", 2, api="b"),
        gauge("hits", 3, api="b"),
        counter("calls", 4, api="a"),
    ]
    text = to_text(points).decode()
    families = list(text_string_to_metric_families(text))
    assert [family.name for family in families] == ["hits", "calls"]
    assert lines(*points) == ['hits{api="a"} 1.0', 'hits{api="b"} 2.0', 'calls{api="a"} 4.0']


NAMES = st.sampled_from(["a", "b"]), st.sampled_from(["", "_sum", "_count", "_bucket", "_total", "_sum_total"])
KINDS = st.sampled_from([SeriesKind.COUNTER, SeriesKind.GAUGE, SeriesKind.BUCKET])
SOME_SERIES = st.sets(st.tuples(st.sampled_from(["x", "y"]), KINDS, st.builds(str.__add__, *NAMES)))


@given(SOME_SERIES)
@example({("x", SeriesKind.BUCKET, "a"), ("x", SeriesKind.GAUGE, "a_sum")})
@example({("x", SeriesKind.COUNTER, "a_total"), ("y", SeriesKind.GAUGE, "a")})
@example({("x", SeriesKind.BUCKET, "a"), ("y", SeriesKind.GAUGE, "a"), ("x", SeriesKind.COUNTER, "a_sum_total")})
def test_the_page_has_each_family_and_line_once_for_any_names(
    found: set[tuple[str, SeriesKind, str]],
) -> None:
    points: list[MetricPoint] = []
    for api, kind, name in sorted(found):
        labels = {"le": "1"} if kind is SeriesKind.BUCKET else {}
        points += series_points(api, {series_key(kind, name, labels): 1.0})

    families = list(text_string_to_metric_families(to_text(points).decode()))

    assert len({family.name for family in families}) == len(families)
    lines = [(sample.name, *sample.labels.items()) for family in families for sample in family.samples]
    assert len(set(lines)) == len(lines)
    assert {family.name for family in families} >= {name for _, kind, name in found if kind is SeriesKind.BUCKET} - {
        name for _, kind, name in found if kind is not SeriesKind.BUCKET
    }


def test_escapes_stored_text_that_utf_8_can_not_encode() -> None:
    numbers = {series_key(SeriesKind.GAUGE, "x", {"tag": "a\ud800"}): 1.0}

    (family,) = text_string_to_metric_families(to_text(series_points("iris", numbers)).decode())

    assert family.samples[0].labels == {"api": "iris", "tag": r"a\ud800"}


def test_counters_of_an_api_begin_with_zero() -> None:
    text = to_text(series_points("iris", initial_series(new_api()))).decode()
    for line in (
        'cortex_process_deaths_total{api="iris",cause="exited"}',
        'cortex_process_deaths_total{api="iris",cause="out of memory"}',
        'cortex_replica_requests_total{api="iris",code="500"}',
        'cortex_aborted_responses_total{api="iris"}',
    ):
        assert f"{line} 0.0" in text
    assert (
        "cortex_replica_requests_total"
        not in to_text(series_points("sum", initial_series(new_api(kind="BatchAPI")))).decode()
    )


def test_the_reference_documents_every_metric() -> None:
    assert set(re.findall(r"`(cortex_\w+)`", REFERENCE.read_text())) == set(HELP)
