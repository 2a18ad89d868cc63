"""Slow work on files, which a supervisor does in the background."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cortex.config.schema import Dependencies
from cortex.engine.environment import prepare_environment
from cortex.home import Home
from cortex.worker.spec import ENVIRONMENT_COMPILED
from harness.replicas.replicas import running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return 1
"""


def test_the_packages_of_an_environment_are_compiled_once_a_process_is_ready(home: Home, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "requirements.txt").write_text("six==1.16.0\n")
    environ = {key: value for key, value in os.environ.items() if key != "UV_COMPILE_BYTECODE"}
    environment = asyncio.run(prepare_environment(home, project, Dependencies(), environ))
    folder = home.environments_dir / environment.key
    assert not list(folder.rglob("six.*.pyc"))

    with running_replica(SOURCE, python=environment.python) as replica:
        replica.wait_ready()
        wait_until((folder / ENVIRONMENT_COMPILED).exists)

    assert list(folder.rglob("six.*.pyc"))
