"""Which variables request an export of traces, and what prevents it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cortex.worker.monitoring import trace_export
from cortex.worker.monitoring.trace_export import find_problem, is_requested

pytestmark = pytest.mark.processes

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, False),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", ENDPOINT: "http://c:4318"}, False),
        ({"OTEL_SERVICE_NAME": "iris"}, False),
    ],
)
def test_an_endpoint_or_the_exporter_otlp_requests_traces(environ: dict[str, str], expected: bool) -> None:
    assert is_requested(environ) is expected


def test_a_missing_library_is_a_problem_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_problem({ENDPOINT: "http://c:4318"}) is None
    monkeypatch.setattr(trace_export, "_MODULES", ("opentelemetry.nonexistent.part",))
    assert find_problem({}) is None
    problem = find_problem({ENDPOINT: "http://c:4318"})
    assert problem is not None
    assert f"{ENDPOINT} is set, but OpenTelemetry is not installed: `pip install 'cortex-serving[opent" in problem


def test_a_worker_imports_nothing_of_opentelemetry_unless_it_is_configured() -> None:
    modules = "cortex.worker.request_worker, cortex.worker.jobs.job_worker"
    code = f"import sys, {modules}; print('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
