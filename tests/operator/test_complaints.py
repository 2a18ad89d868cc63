from __future__ import annotations

import logging

import pytest

from cortex.errors import DatabaseUnavailableError
from cortex.operator.error_log import Complaint
from cortex.telemetry import Logger


def test_a_database_that_is_away_is_said_once_and_anything_else_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    complaint = Complaint(Logger("test"), "reconciling failed")
    complaint.passed()
    for _ in range(3):
        complaint.failed(DatabaseUnavailableError("away"))
    complaint.failed(ValueError("bad"))
    complaint.failed(ValueError("bad"))
    for _ in range(2):
        complaint.passed()
    complaint.failed(DatabaseUnavailableError("away"))
    waits, back = "reconciling failed: it waits for the database", "reconciling failed no more: the database is back"
    bad = "reconciling failed"
    assert [record.message for record in caplog.records] == [waits, bad, bad, back, waits]
