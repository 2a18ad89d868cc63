"""The operator's client in a job worker, against a scripted operator over a real socket."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.worker.jobs.operator_client import LeaseClient
from cortex.worker.jobs.shared_state import SharedJobState
from harness.replicas.scripted_operator import TOKEN, ScriptedJob, ScriptedOperator, scripted_operator
from harness.replicas.specs import replica_spec
from harness.wait import wait_until


@pytest.fixture
def operator() -> Iterator[ScriptedOperator]:
    with tempfile.TemporaryDirectory(prefix="oc-") as folder, scripted_operator(Path(folder)) as operator:
        yield operator


def client_of(operator: ScriptedOperator) -> LeaseClient:
    spec = replica_spec(
        id="api-00000000-000001",
        api="api",
        jobs_socket=operator.socket,
        jobs_token=TOKEN,
    )
    return LeaseClient(spec, SharedJobState())


def test_a_process_requests_one_job_even_if_its_main_thread_notices_the_end_late(operator: ScriptedOperator) -> None:
    job = operator.add(ScriptedJob("job-1", [], "/log"))
    operator.add(ScriptedJob("job-2", [b"1"], "/log"))
    client = client_of(operator)
    client.start()
    assigned = client.wait_for_job()
    assert assigned is not None
    assert assigned.job_id == "job-1"
    client.open()
    wait_until(lambda: job.is_over)
    client.finish()
    assert operator.joins == [os.getpid()], "job-2 is for the next process"
