"""Medians, ratios and verdicts of the benchmark report."""

from __future__ import annotations

from benchmarks.tools.measure import Failed, Outcome, Sample
from benchmarks.tools.report import goals, markdown, medians


def _sample(system: str, per_s: float, concurrency: int = 64, **figures: float | int) -> Sample:
    return Sample(system, "noop", "closed", concurrency, per_s=per_s, **figures)  # type: ignore[arg-type]


def _verdicts(outcome: Outcome) -> dict[str, bool | None]:
    return {goal.text: goal.met for goal in goals(outcome)}


def test_the_median_of_the_rounds_is_taken_and_errors_are_added() -> None:
    rounds: Outcome = [_sample("cortex", value, errors=1) for value in (10.0, 99.0, 20.0)]
    (found,) = medians(rounds)
    assert (found.per_s, found.errors, found.cpu_us) == (20.0, 3, None)


def test_goals_compare_with_mosec_with_haproxy_and_with_every_peer() -> None:
    outcome: Outcome = [
        _sample("cortex", 60_000, cpu_us=25.0),
        _sample("mosec", 10_000, cpu_us=90.0),
        _sample("haproxy-static", 100_000),
        _sample("cortex", 5_000, 1, p50_us=90.0),
        _sample("mosec", 4_000, 1, p50_us=100.0),
        _sample("fastapi", 4_000, 1, p50_us=80.0),
        _sample("haproxy-static", 9_000, 1, p50_us=20.0),
    ]
    assert _verdicts(outcome) == {
        "no-op at 64: requests/s against Mosec": False,
        "the same, at the very least": True,
        "no-op at 64: share of HAProxy's static reply": True,
        "no-op at 64: CPU per request": True,
        "no-op at 1: p50 below every peer's": False,
        "cortex: requests that failed": True,
        "cortex: measurements that failed": True,
    }


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert set(_verdicts([_sample("mosec", 10_000)]).values()) == {None}


def test_a_failed_measurement_of_cortex_is_a_missed_goal_and_is_explained() -> None:
    outcome: Outcome = [Failed("cortex", "noop", "cortex deploy ended with 1:\nTraceback\nValueError: no | good")]
    assert _verdicts(outcome)["cortex: measurements that failed"] is False
    assert "cortex deploy ended with 1: … ValueError: no \\| good" in markdown(outcome, {"cores": "2"})


def test_tables_divide_the_figures_of_cortex_by_those_of_the_others() -> None:
    outcome: Outcome = [_sample("cortex", 50_000, p50_us=1_000.0), _sample("mosec", 10_000, p50_us=4_000.0)]
    row = next(line for line in markdown(outcome, {}).splitlines() if line.startswith("| mosec"))
    assert row.startswith("| mosec | 10,000 | 5.00 | 4.000 | – | 0.25 |")


def test_latencies_at_the_rate_of_a_peer_are_not_mixed_with_those_at_its_own() -> None:
    outcome: Outcome = [
        Sample(system, "noop", load, rate=rate, p99_us=p99_us, share=0.7)
        for system, load, rate, p99_us in (
            ("cortex", "open", 40_000.0, 3_000.0),
            ("cortex", "matched", 8_000.0, 500.0),
            ("mosec", "open", 8_000.0, 2_000.0),
        )
    ]
    lines = markdown(outcome, {}).splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(("| cortex |", "| mosec |"))]
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("| cortex", "40,000", "3.000"),
        ("| mosec", "8,000", "2.000"),
        ("| cortex", "8,000", "0.500"),
    ]


def test_percentiles_of_an_overload_are_not_reported() -> None:
    outcome: Outcome = [Sample("cortex", "noop", "open", per_s=35_000.0, rate=37_000.0, busy=0.99)]
    (row,) = (line.split(" | ") for line in markdown(outcome, {}).splitlines() if line.startswith("| cortex |"))
    assert row[1:5] == ["37,000", "35,000", "overloaded", "overloaded"]


def test_peaks_and_shares_of_them_have_a_table_each() -> None:
    outcome: Outcome = [
        Sample("cortex", "noop", load, share=share, rate=rate, p99_us=rate / 10)
        for load, share, rate in (("peak", 1.0, 30_000.0), ("open", 0.5, 15_000.0), ("open", 0.7, 21_000.0))
    ]
    text = markdown(outcome, {})
    rows = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| cortex |")]
    assert rows == ["30,000", "15,000", "21,000"]
    assert [share for share in ("highest rate", "at 50%", "at 70%") if share in text] == [
        "highest rate",
        "at 50%",
        "at 70%",
    ]
