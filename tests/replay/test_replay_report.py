"""The report of a replay: its words, its data, and a page that shows text of users as text."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from cortex.recording.exchange import Exchange, RecordedBody
from cortex.replay.comparison import Difference
from cortex.replay.report import ReplayReport, as_html, as_json, as_text, difference_rows, duration_rows
from cortex.replay.statistics import MAX_FIELDS, OTHER_FIELDS, DurationHistogram, ReplayStatistics

#: Elements of a page.
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "dl", "dt", "dd"),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "text", "rect", "line", "polyline"),
}


def exchange(place: str = "a.ndjson:2", is_redacted: bool = False) -> Exchange:
    request = RecordedBody(is_redacted=is_redacted)
    return Exchange("id", 0.0, 8.0, 5.0, "POST", "", "", (), request, 200, RecordedBody(), place)


def difference(field: str = "$.score", kind: str = "value", now: str = "2") -> Difference:
    return Difference(field, kind, field, "1", now, 1.0)


def statistics(same: int = 3, different: int = 1, **fields: str) -> ReplayStatistics:
    found = ReplayStatistics(seconds=2.0)
    for number in range(same + different):
        each = exchange(f"folder/a.ndjson:{number + 2}")
        found.add(each, 200, [difference(**fields)] if number < different else [])
        found.add_durations(each, 4.0, 10.0)
    return found


def report(found: ReplayStatistics, max_share: float = 0.0, api: str = "iris", is_paced: bool = False) -> ReplayReport:
    return ReplayReport("rec", api, "./iris", found, 1e-6, ("$.time",), max_share, is_paced)


def test_the_gate_is_the_share_of_answers_that_differ() -> None:
    assert report(statistics(different=0)).passes
    assert not report(statistics(same=3, different=1)).passes
    assert not report(statistics(same=3, different=1), 0.24).passes
    assert report(statistics(same=3, different=1), 0.25).passes


def test_the_text_says_what_differs_and_how_much_slower_it_is() -> None:
    found = statistics()
    assert as_text(report(found))[0] == "1 of 4 answers differ (25 %; limit 0 %) (2.0 s, 2 requests/s)"
    assert difference_rows(found) == [["$.score", "value, at most 1 apart", "1", "1 → 2", "a.ndjson:2"]]
    assert duration_rows(found) == [
        ["request", "8", "4", "8", "4", "-50 %", "-50 %"],
        ["handler", "5", "10", "5", "10", "+100 %", "+100 %"],
    ]


def test_notes_name_what_was_not_compared() -> None:
    found = ReplayStatistics(skipped=1, unfinished=2, late_s=3.0)
    found.add(exchange(is_redacted=True), 0, [difference("(answer)", "no answer")])
    lines = "\n".join(as_text(report(found)))
    assert "1 request not sent: only the beginning" in lines
    assert "1 request sent without the values that the recording lacks (redact)" in lines
    assert "1 request without an answer" in lines
    assert "the last line of 2 files is unfinished" in lines
    assert "up to 3.0 s behind the pace" in lines


def test_a_replay_at_the_pace_of_a_recording_names_the_pace_of_all_requests() -> None:
    found = ReplayStatistics(recorded_requests=40, original_requests=500.0)
    note = "the recording has one of 12.5 requests: --rate 12.5x sends as many per second as there were"
    assert note in as_text(report(found, is_paced=True))
    assert note not in as_text(report(found))
    found.original_requests = 40.0
    assert note not in as_text(report(found, is_paced=True))


def test_the_data_has_counts_examples_and_quantiles() -> None:
    data = json.loads(json.dumps(as_json(report(statistics()))))
    assert (data["compared"], data["different"], data["share"], data["passes"]) == (4, 1, 0.25, False)
    [each] = data["differences"]
    assert each["examples"][0] == {
        "request": "folder/a.ndjson:2",
        "path": "$.score",
        "recorded": "1",
        "now": "2",
    }
    assert data["durations_ms"]["request"]["now"]["p99"] == 4.0
    assert data["statuses"] == [{"recorded": 200, "now": 200, "answers": 4}]


@given(st.text("<>&\"'{}é ab/", max_size=20))
def test_the_page_shows_text_of_users_as_text(text: str) -> None:
    page = as_html(report(statistics(field=f"$.{text}", now=text), api=text))
    parts = page.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', '<meta charset="utf-8"/>')
    tree = ET.fromstring(parts)  # noqa: S314 - our own page; fails if text were markup
    assert text.strip() in "".join(tree.itertext())
    assert {each.tag for each in tree.iter()} <= TAGS


def test_the_page_needs_no_other_file_and_no_script() -> None:
    page = as_html(report(statistics()))
    assert not any(word in page for word in ("<script", "http://", "https://", "src=", "@import", "url("))
    assert page.count("<svg") == 3


def test_fields_beyond_the_limit_are_counted_together() -> None:
    found = ReplayStatistics()
    for number in range(MAX_FIELDS + 50):
        found.add(exchange(), 200, [difference(f"$.f{number}")])
    assert len(found.fields) == MAX_FIELDS + 1
    assert found.fields[OTHER_FIELDS, "value"].answers == 50
    assert as_text(report(found))[-1] == f"{MAX_FIELDS + 1 - 20} more fields differ; --report has all of them"


@given(st.lists(st.floats(0.002, 1e6), min_size=1, max_size=50), st.floats(0.01, 1))
def test_quantiles_are_exact_to_one_percent(durations: list[float], share: float) -> None:
    histogram = DurationHistogram()
    for duration in durations:
        histogram.add(duration)
    exact = sorted(durations)[max(0, -int(-share * len(durations) // 1) - 1)]
    found = histogram.quantile_ms(share)
    assert found is not None
    assert exact * 0.999 <= found <= exact * 1.0101
    assert histogram.curve()[-1][1] == 1.0


def test_without_durations_there_are_no_quantiles() -> None:
    assert DurationHistogram().quantile_ms(0.5) is None
    assert duration_rows(ReplayStatistics()) == []
