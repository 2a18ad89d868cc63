"""The report of a replay: as text, as JSON, and as one HTML page that needs no other file. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cortex.replay.statistics import DurationHistogram, FieldDifferences, ReplayStatistics

_QUANTILES = (0.5, 0.9, 0.99)
_SHOWN_FIELDS = 20
#: Requests for each recorded one, from which a paced replay has much less load than there was.
_THIN = 1.1
_WIDTH, _HEIGHT, _MARGIN = 640, 220, 44


@dataclass(frozen=True)
class ReplayReport:
    """A finished replay."""

    recording: str
    api: str
    target: str
    statistics: ReplayStatistics
    tolerance: float
    ignored: tuple[str, ...]
    max_share: float  #: of different answers that passes
    is_paced: bool = False  #: at the pace of the recording, or a multiple of it

    @property
    def passes(self) -> bool:
        """Return whether few enough answers differ."""
        return self.statistics.share <= self.max_share

    @property
    def verdict(self) -> str:
        """Return one sentence."""
        counts = self.statistics
        if not counts.different:
            return f"all {counts.compared:,} answers are the same"
        share = f"{100 * counts.share:.3g} %"
        return f"{counts.different:,} of {counts.compared:,} answers differ ({share}; limit {100 * self.max_share:g} %)"


def notes(report: ReplayReport) -> list[str]:
    """Return what a reader of the counts has to know."""
    counts = report.statistics
    found = [
        (counts.skipped, "{} not sent: only the beginning of their bodies is recorded, or nothing of it"),
        (counts.redacted, "{} sent without the values that the recording lacks (redact)"),
        (counts.unanswered, "{} without an answer"),
    ]
    texts = [text.format(f"{number:,} request{'s' if number != 1 else ''}") for number, text in found if number]
    if counts.unfinished:
        files = f"{counts.unfinished} file{'s' if counts.unfinished != 1 else ''}"
        texts.append(f"the last line of {files} is unfinished: the process that wrote it was killed")
    if report.is_paced and (thinning := counts.original_requests / max(1, counts.recorded_requests)) >= _THIN:
        factor = f"{thinning:.3g}"
        text = "the recording has one of {0} requests: --rate {0}x sends as many per second as there were"
        texts.append(text.format(factor))
    if counts.late_s >= 1:
        texts.append(f"up to {counts.late_s:.1f} s behind the pace of the recording: raise --concurrency")
    return texts


def durations(counts: ReplayStatistics) -> list[tuple[str, DurationHistogram, DurationHistogram]]:
    """Return each measured duration with its recorded and its present distribution."""
    rows = [
        ("request", counts.recorded, counts.now),
        ("handler", counts.recorded_handler, counts.now_handler),
    ]
    return [row for row in rows if row[1].count]


def as_text(report: ReplayReport) -> list[str]:
    """Return the lines for a terminal, without the tables."""
    counts = report.statistics
    rate = f", {counts.compared / counts.seconds:,.0f} requests/s" if counts.seconds else ""
    lines = [f"{report.verdict} ({counts.seconds:.1f} s{rate})", *notes(report)]
    hidden = len(counts.fields) - _SHOWN_FIELDS
    if hidden > 0:
        lines.append(f"{hidden} more fields differ; --report has all of them")
    return lines


def difference_rows(counts: ReplayStatistics, limit: int | None = _SHOWN_FIELDS) -> list[list[str]]:
    """Return rows of field, difference, answers, an example, and its request."""
    rows = []
    for each in counts.by_frequency[:limit]:
        place, example = each.examples[0]
        largest = f", at most {each.largest:.3g} apart" if each.largest is not None else ""
        rows.append(
            [
                each.name,
                each.kind + largest,
                f"{each.answers:,}",
                f"{example.recorded} → {example.now}",
                place.rpartition("/")[2],
            ]
        )
    return rows


DIFFERENCE_HEADERS = ["field", "difference", "answers", "recorded → now", "request"]
DURATION_HEADERS = ["ms", "recorded p50", "now p50", "recorded p99", "now p99", "p50", "p99"]


def duration_rows(counts: ReplayStatistics) -> list[list[str]]:
    """Return rows of durations in ms, recorded and now, and their changes."""
    rows = []
    for name, recorded, now in durations(counts):
        pairs = [(recorded.quantile_ms(each) or 0.0, now.quantile_ms(each) or 0.0) for each in (0.5, 0.99)]
        shown = [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for pair in pairs for value in pair]
        changes = [f"{100 * (after / before - 1):+.0f} %" if before else "-" for before, after in pairs]
        rows.append([name, *shown, *changes])
    return rows


def as_json(report: ReplayReport) -> dict[str, Any]:
    """Return the report as data."""
    counts = report.statistics
    return {
        "recording": report.recording,
        "api": report.api,
        "target": report.target,
        "passes": report.passes,
        "compared": counts.compared,
        "different": counts.different,
        "unanswered": counts.unanswered,
        "skipped": counts.skipped,
        "redacted": counts.redacted,
        "unfinished_lines": counts.unfinished,
        "share": counts.share,
        "max_share": report.max_share,
        "tolerance": report.tolerance,
        "ignored": list(report.ignored),
        "seconds": counts.seconds,
        "statuses": [
            {"recorded": recorded, "now": now, "answers": number}
            for (recorded, now), number in sorted(counts.statuses.items())
        ],
        "differences": [_field_json(each) for each in counts.by_frequency],
        "durations_ms": {
            name: {
                label: {f"p{100 * quantile:g}": histogram.quantile_ms(quantile) for quantile in _QUANTILES}
                | {"max": histogram.longest_ms, "count": histogram.count}
                for label, histogram in (("recorded", recorded), ("now", now))
            }
            for name, recorded, now in durations(counts)
        },
    }


def _field_json(each: FieldDifferences) -> dict[str, Any]:
    return {
        "field": each.name,
        "kind": each.kind,
        "answers": each.answers,
        "largest": each.largest,
        "examples": [
            {"request": place, "path": example.place, "recorded": example.recorded, "now": example.now}
            for place, example in each.examples
        ],
    }


def as_html(report: ReplayReport) -> str:
    """Return a page without scripts and without other files; all text of users is escaped."""
    counts = report.statistics
    facts = [
        ("recording", report.recording),
        ("API", report.api),
        ("against", report.target),
        ("tolerance of numbers", f"{report.tolerance:g}"),
        *([("ignored", ", ".join(report.ignored))] if report.ignored else []),
        ("duration", f"{counts.seconds:.1f} s"),
    ]
    statuses = [[str(old), str(new or "none"), f"{number:,}"] for (old, new), number in sorted(counts.statuses.items())]
    parts = [
        f'<p class="{"passes" if report.passes else "fails"}">{_escaped(report.verdict)}</p>',
        *(f"<p>{_escaped(note)}</p>" for note in notes(report)),
        "<dl>",
        *(f"<dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd>" for name, value in facts),
        "</dl>",
    ]
    if counts.fields:
        rows = difference_rows(counts, None)
        parts += ["<h2>Differences</h2>", _bars(counts.by_frequency), _html_table(DIFFERENCE_HEADERS, rows)]
    parts += ["<h2>Status codes</h2>", _html_table(["recorded", "now", "answers"], statuses)]
    if rows := duration_rows(counts):
        parts += ["<h2>Latency</h2>", _html_table(DURATION_HEADERS, rows)]
        for name, recorded, now in durations(counts):
            parts.append(_curves(name, recorded, now))
    title = f"Replay of {report.api}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_escaped(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{_escaped(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _html_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_escaped(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _bars(fields: Sequence[FieldDifferences]) -> str:
    """Return a bar per field: the number of answers in which it differs."""
    shown = fields[:_SHOWN_FIELDS]
    most = max(each.answers for each in shown)
    lines = []
    for row, each in enumerate(shown):
        y, width = 22 * row, max(1.0, 300 * each.answers / most)
        label = _escaped(f"{each.name} ({each.kind})")
        lines.append(
            f'<text x="300" y="{y + 14}" text-anchor="end">{label}</text>'
            f'<rect class="now" x="308" y="{y + 3}" width="{width:.1f}" height="14"/>'
            f'<text x="{312 + width:.1f}" y="{y + 14}">{each.answers:,}</text>'
        )
    return _svg(_WIDTH + 60, 22 * len(shown), "Answers by field that differs", lines)


def _curves(name: str, recorded: DurationHistogram, now: DurationHistogram) -> str:
    """Return the distributions of a duration: the share of requests that took at most so long."""
    curves = {"recorded": recorded.curve(), "now": now.curve()}
    low = min(points[0][0] for points in curves.values())
    high = max(max(points[-1][0] for points in curves.values()), low * 2)
    scale = (_WIDTH - 2 * _MARGIN) / math.log(high / low)

    def x(duration_ms: float) -> float:
        return _MARGIN + scale * math.log(max(duration_ms, low) / low)

    def y(share: float) -> float:
        return _HEIGHT - _MARGIN + 8 - share * (_HEIGHT - 2 * _MARGIN)

    lines = []
    for share in (0.0, 0.5, 0.99):
        lines.append(
            f'<line class="grid" x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>'
            f'<text x="{_MARGIN - 4}" y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:g} %</text>'
        )
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        at = x(10.0**power)
        lines.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{y(1):.1f}" y2="{y(0):.1f}"/>'
            f'<text x="{at:.1f}" y="{y(0) + 16:.1f}" text-anchor="middle">{10.0**power:g} ms</text>'
        )
    for row, (label, points) in enumerate(curves.items()):
        steps, share = [f"{x(low):.1f},{y(0):.1f}"], 0.0
        for duration_ms, after in points:
            steps += [f"{x(duration_ms):.1f},{y(share):.1f}", f"{x(duration_ms):.1f},{y(after):.1f}"]
            share = after
        lines.append(f'<polyline class="{label}" points="{" ".join(steps)}"/>')
        lines.append(
            f'<rect class="{label}" x="{_WIDTH - 130}" y="{8 + 16 * row}" width="10" height="10"/>'
            f'<text x="{_WIDTH - 114}" y="{17 + 16 * row}">{label}</text>'
        )
    return f"<h3>{_escaped(name)}</h3>" + _svg(_WIDTH, _HEIGHT, f"Distribution of the {name} duration", lines)


def _svg(width: int, height: int, label: str, lines: Iterable[str]) -> str:
    inner = "".join(lines)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{_escaped(label)}">{inner}</svg>'
    )


_STYLE = (
    ":root{color-scheme:light dark;--line:#8886;--old:#7a8699;--new:#d9480f}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "th,td{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}"
    "td{overflow-wrap:anywhere}dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}dd{margin:0}"
    ".passes,.fails{font-size:1.2rem;font-weight:600}.passes{color:#2b8a3e}.fails{color:#c92a2a}"
    "svg{max-width:100%;height:auto;font-size:12px;fill:currentColor}polyline{fill:none;stroke-width:2}"
    "polyline.recorded{stroke:var(--old)}polyline.now{stroke:var(--new)}rect.recorded{fill:var(--old)}"
    "rect.now{fill:var(--new)}line.grid{stroke:var(--line)}"
)
