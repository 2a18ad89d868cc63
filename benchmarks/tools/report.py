"""Medians, ratios, tables and goals from samples. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from benchmarks.tools.measure import BARE, Failed, Outcome, Sample

CORTEX = "cortex"
STATIC = "haproxy-static"
LIMITS = (STATIC, BARE)

_MARGINS = (
    "per_s",
    "p50_us",
    "p99_us",
    "cpu_us",
    "pss_mb",
    "rate",
    "late_p99_us",
    "busy",
    "generator_cpu_us",
    "chunks_per_s",
    "first_byte_us",
)
#: Latency of an open load that the generator and the server could not sustain together.
_OVERLOADED = "overloaded"


@dataclass(frozen=True)
class Goal:
    """A goal of the project and its measurement; `met` is None if it could not be measured."""

    text: str
    target: str
    measured: str
    met: bool | None


def medians(outcome: Outcome) -> list[Sample]:
    """Return one sample per system and load: the median of each figure over the rounds, and the sum of the errors."""
    groups: dict[tuple[str, str, str, int, float | None], list[Sample]] = {}
    for each in outcome:
        if isinstance(each, Sample):
            key = (each.system, each.workload, each.load, each.concurrency, each.share)
            groups.setdefault(key, []).append(each)
    return [_median(group) for group in groups.values()]


def failures(outcome: Outcome) -> list[Failed]:
    """Return the failed measurements."""
    return [each for each in outcome if isinstance(each, Failed)]


def goals(outcome: Outcome) -> list[Goal]:
    """Compare the medians with the project's goals."""
    samples = medians(outcome)

    def figure(system: str, concurrency: int, name: str) -> float | None:
        found = _find(samples, system, "noop", "closed", concurrency)
        return getattr(found, name) if found else None

    peers = sorted({sample.system for sample in samples} - {CORTEX, *LIMITS})
    cortex, mosec, static = (figure(name, 64, "per_s") for name in (CORTEX, "mosec", STATIC))
    times, share = _ratio(cortex, mosec), _ratio(cortex, static)
    cpu, p50 = figure(CORTEX, 64, "cpu_us"), figure(CORTEX, 1, "p50_us")
    others = [value for peer in peers if (value := figure(peer, 1, "p50_us")) is not None]
    errors = sum(sample.errors for sample in samples if sample.system == CORTEX)
    failed = sum(each.system == CORTEX for each in failures(outcome))
    measured = any(sample.system == CORTEX for sample in samples) or failed > 0
    best = min(others, default=None)
    return [
        Goal("no-op at 64: requests/s against Mosec", "≥ 8 ×", _show(times, "{:.1f} ×"), _met(times, lambda x: x >= 8)),
        Goal("the same, at the very least", "≥ 5 ×", _show(times, "{:.1f} ×"), _met(times, lambda x: x >= 5)),
        Goal(
            "no-op at 64: share of HAProxy's static reply",
            "≥ 0.5",
            _show(share, "{:.2f}"),
            _met(share, lambda x: x >= 0.5),
        ),
        Goal("no-op at 64: CPU per request", "≤ 30 µs", _show(cpu, "{:.1f} µs"), _met(cpu, lambda x: x <= 30)),
        Goal(
            "no-op at 1: p50 below every peer's",
            f"< {_show(best, '{:.0f} µs')}",
            _show(p50, "{:.0f} µs"),
            None if p50 is None or best is None else p50 < best,
        ),
        Goal("cortex: requests that failed", "0", str(errors), errors == 0 if measured else None),
        Goal("cortex: measurements that failed", "0", str(failed), failed == 0 if measured else None),
    ]


def markdown(outcome: Outcome, facts: dict[str, str]) -> str:
    """Return the whole report."""
    samples = medians(outcome)
    parts = ["# Benchmark", table(("fact", "value"), facts.items()), "## Goals", goals_table(goals(outcome))]
    for workload in ("noop", "iris"):
        for concurrency in sorted({s.concurrency for s in samples if s.workload == workload and s.load == "closed"}):
            chosen = _choose(samples, workload, "closed", concurrency)
            if {sample.system for sample in chosen} - {BARE}:
                limits = [] if concurrency == 1 else _choose(samples, workload, "closed", 1, BARE)
                parts += [f"## {workload}, {concurrency} at once", _closed_table(chosen + limits)]
    parts += open_tables(samples, "noop")
    for workload, title in (("upload", "1 MB in"), ("download", "1 MB out")):
        if large := _choose(samples, workload, "closed"):
            parts += [f"## {title}, {large[0].concurrency} at once", _closed_table(large)]
    if streams := _choose(samples, "stream", "stream"):
        parts += ["## streaming answer of 100 chunks", _stream_table(streams)]
    if failed := failures(outcome):
        rows = ((each.system, each.workload, _gist(each.message)) for each in failed)
        parts += ["## Could not be measured", table(("system", "workload", "why"), rows)]
    return "\n\n".join(parts) + "\n"


def goals_table(found: Iterable[Goal]) -> str:
    """Return goals as a table."""
    verdicts = {True: "met", False: "MISSED", None: "not measured"}
    rows = ((goal.text, goal.target, goal.measured, verdicts[goal.met]) for goal in found)
    return table(("goal", "target", "measured", ""), rows)


def _median(group: list[Sample]) -> Sample:
    figures: dict[str, float | None] = {}
    for name in _MARGINS:
        values = [value for sample in group if (value := getattr(sample, name)) is not None]
        figures[name] = statistics.median(values) if values else None
    unknown = set(figures) - {each.name for each in fields(Sample)}
    assert not unknown, unknown
    return replace(group[0], errors=sum(sample.errors for sample in group), **figures)  # type: ignore[arg-type]


def _choose(
    samples: list[Sample], workload: str, load: str, concurrency: int | None = None, system: str | None = None
) -> list[Sample]:
    """Return the matching samples: cortex first, then from the fastest to the slowest, limits last."""
    chosen = [
        sample
        for sample in samples
        if sample.workload == workload
        and sample.load == load
        and concurrency in (None, sample.concurrency)
        and system in (None, sample.system)
    ]
    return sorted(chosen, key=lambda s: (s.system in LIMITS, s.system != CORTEX, -(s.per_s or 0)))


def _find(samples: list[Sample], system: str, workload: str, load: str, concurrency: int) -> Sample | None:
    found = _choose(samples, workload, load, concurrency, system)
    return found[0] if found else None


def _closed_table(samples: list[Sample]) -> str:
    ours = next((sample for sample in samples if sample.system == CORTEX), None)
    head = (
        "system",
        "requests/s",
        "cortex ÷ it",
        "p50 ms",
        "p99 ms",
        "p50 ÷",
        "CPU µs",
        "CPU ÷",
        "memory MB",
        "errors",
    )
    rows = [
        (
            sample.system,
            _show(sample.per_s, "{:,.0f}"),
            _versus(ours, sample, "per_s"),
            _show(sample.p50_us, "{:.3f}", 1e-3),
            _show(sample.p99_us, "{:.3f}", 1e-3),
            _versus(ours, sample, "p50_us"),
            _show(sample.cpu_us, "{:.1f}"),
            _versus(ours, sample, "cpu_us"),
            _show(sample.pss_mb, "{:.0f}"),
            str(sample.errors),
        )
        for sample in samples
    ]
    return table(head, rows)


def open_tables(samples: list[Sample], workload: str) -> list[str]:
    """Return the medians of open loads as tables with headings: the peaks, then one table per share of them."""
    parts = []
    if peaks := _choose(samples, workload, "peak"):
        parts += [f"## {workload}, open loop at the highest rate that it sustains", _open_table(peaks)]
    chosen = _choose(samples, workload, "open") + _choose(samples, workload, "matched")
    for share in sorted({sample.share or 0.0 for sample in chosen}):
        rows = [sample for sample in chosen if (sample.share or 0.0) == share]
        title = f"## {workload}, open loop at {share:.0%} of each system's peak, and cortex at that of the fastest peer"
        parts += [title, _open_table(rows)]
    return parts


def _open_table(samples: list[Sample]) -> str:
    head = (
        "system",
        "due/s",
        "answered/s",
        "p50 ms",
        "p99 ms",
        "CPU µs",
        "errors",
        "generator late, p99 ms",
        "generator busy",
        "generator CPU µs",
    )
    rows = [
        (
            sample.system,
            _show(sample.rate, "{:,.0f}"),
            _show(sample.per_s, "{:,.0f}"),
            _OVERLOADED if sample.p50_us is None else _show(sample.p50_us, "{:.3f}", 1e-3),
            _OVERLOADED if sample.p99_us is None else _show(sample.p99_us, "{:.3f}", 1e-3),
            _show(sample.cpu_us, "{:.1f}"),
            str(sample.errors),
            _show(sample.late_p99_us, "{:.3f}", 1e-3),
            _show(sample.busy, "{:.0%}"),
            _show(sample.generator_cpu_us, "{:.1f}"),
        )
        for sample in samples
    ]
    return table(head, rows)


def _stream_table(samples: list[Sample]) -> str:
    ours = next((sample for sample in samples if sample.system == CORTEX), None)
    head = (
        "system",
        "first byte ms, alone",
        "÷",
        "chunks/s, alone",
        "cortex ÷ it",
        "answers/s at 16",
        "÷",
        "CPU µs",
        "errors",
    )
    rows = [
        (
            sample.system,
            _show(sample.first_byte_us, "{:.3f}", 1e-3),
            _versus(ours, sample, "first_byte_us"),
            _show(sample.chunks_per_s, "{:,.0f}"),
            _versus(ours, sample, "chunks_per_s"),
            _show(sample.per_s, "{:,.0f}"),
            _versus(ours, sample, "per_s"),
            _show(sample.cpu_us, "{:.0f}"),
            str(sample.errors),
        )
        for sample in samples
    ]
    return table(head, rows)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows as a table of markdown."""
    escaped = (tuple(cell.replace("|", "\\|") for cell in row) for row in rows)
    lines = (head, tuple("---" for _ in head), *escaped)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _gist(message: str) -> str:
    """Return the first line, which names the failure, and the last, which usually has the reason."""
    lines = message.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"


def _versus(ours: Sample | None, other: Sample, name: str) -> str:
    """Return our figure divided by the other system's."""
    if ours is None or other.system == CORTEX:
        return ""
    return _show(_ratio(getattr(ours, name), getattr(other, name)), "{:.2f}")


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _show(value: float | None, pattern: str, factor: float = 1.0) -> str:
    return "–" if value is None else pattern.format(value * factor)


def _met(value: float | None, test: Callable[[float], bool]) -> bool | None:
    return None if value is None else test(value)
