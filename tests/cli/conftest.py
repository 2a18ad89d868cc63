"""Fixtures: an HTTP server in the role of an operator with jobs, and a home whose environment is that operator."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cortex.client.environments import Environments
from cortex.lifecycle import JobStatus
from harness.installations.command_line import environ
from harness.jobs.job_data import JOB_ID, status
from harness.jobs.job_operator import DONE, SUBMISSION, Operator

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def operator() -> Iterator[Operator]:
    made = Operator()
    made.respond("POST /v1/apis/sum/jobs", status(JobStatus.PENDING))
    made.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", DONE)
    yield made
    made.close()


@pytest.fixture
def home(operator: Operator, tmp_path: Path) -> Path:
    made = tmp_path / "home"
    environments = Environments.from_environ(environ(made))
    environments.configure("test", operator.url, "t")
    environments.set_default("test")
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "job.json"
    made.write_text(json.dumps(SUBMISSION))
    return made
