from __future__ import annotations

import logging

import pytest

from cortex.errors import DatabaseUnavailableError
from cortex.operator.error_log import LoopErrorLog
from cortex.telemetry import Logger


def test_logs_an_outage_of_the_database_once_and_other_errors_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    errors = LoopErrorLog(Logger("test"), "reconciling failed")
    errors.succeeded()
    for _ in range(3):
        errors.failed(DatabaseUnavailableError("away"))
    errors.failed(ValueError("bad"))
    errors.failed(ValueError("bad"))
    for _ in range(2):
        errors.succeeded()
    errors.failed(DatabaseUnavailableError("away"))
    bad = "reconciling failed"
    outage, recovery = f"{bad}: the database is unavailable", f"{bad}: resolved, the database is back"
    assert [record.message for record in caplog.records] == [outage, bad, bad, recovery, outage]
