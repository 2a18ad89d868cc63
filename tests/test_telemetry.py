from __future__ import annotations

import logging

from cortex.telemetry import LogFormatter, parse


def line(message: str, **fields: object) -> str:
    record = logging.LogRecord("cortex", logging.INFO, "", 0, message, None, None)
    record.created = 1_767_225_600.25
    record.fields = fields
    return LogFormatter().format(record)


def test_an_event_is_one_line_with_its_fields() -> None:
    assert line("replica started", api="iris", pid=7) == "2026-01-01T00:00:00.250Z info replica started api=iris pid=7"


def test_values_cannot_be_confused_with_fields_or_lines() -> None:
    written = line("failed", error='a=b "c"\nd', empty="")
    assert written.endswith(r'failed error="a=b \"c\"\nd" empty=""')
    assert "\n" not in line("two\nlines", error=ValueError("x\ny"))


def test_a_parsed_line_has_its_message_and_fields() -> None:
    written = line("replica failed", api="iris", error='a=b "c"\nd x=1', empty="", count=7)
    assert parse(written) == {
        "time": "2026-01-01T00:00:00.250Z",
        "level": "info",
        "message": "replica failed",
        "api": "iris",
        "error": 'a=b "c"\nd x=1',
        "empty": "",
        "count": "7",
    }
    assert parse(line("no fields")) == {"time": "2026-01-01T00:00:00.250Z", "level": "info", "message": "no fields"}
    assert parse("Traceback (most recent call last):") == {"message": "Traceback (most recent call last):"}
