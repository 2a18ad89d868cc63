"""Processes of replicas that share a project, and write to its files."""

from __future__ import annotations

import os
import signal
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cortex.worker.working_copy import STRATEGY_VARIABLE, copies_folder
from harness.replicas.replicas import Replica, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

#: The constructor downloads the model that `config` names, as the documents of the original system do.
SOURCE = """
    import ctypes, os, warnings
    import values

    class Handler:
        def __init__(self, config):
            with open("model.pth", "a") as file:
                file.write(config["model"])
            libc = ctypes.CDLL(None)
            descriptor = libc.open(b"values.py", os.O_WRONLY | os.O_TRUNC)
            libc.write(descriptor, b"VALUE = 2", 9)
            libc.close(descriptor)

        def handle_post(self, payload):
            if payload == "fail":
                raise ValueError("no")
            return {"model": open("model.pth").read(), "value": values.VALUE, "folder": os.getcwd()}
"""


@pytest.fixture(params=["", "copy"])
def project(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project, for the strategy that this machine permits and for plain copies."""
    monkeypatch.setenv(STRATEGY_VARIABLE, request.param)
    with tempfile.TemporaryDirectory(prefix="cp ") as name:
        project = Path(name)
        (project / "handler.py").write_text(textwrap.dedent(SOURCE))
        (project / "values.py").write_text("VALUE = 1\n")
        yield project


def stored(project: Path) -> dict[str, str]:
    files = (path for path in project.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {str(path.relative_to(project)): path.read_text() for path in files}


def running(stack: ExitStack, project: Path, model: str, processes: int = 1) -> Replica:
    fields = {"project_dir": str(project), "config": {"model": model}}
    replica = stack.enter_context(running_replica(SOURCE, processes=processes, **fields))
    replica.wait_ready()
    return replica


def test_replicas_of_one_project_do_not_share_the_files_that_they_write(project: Path) -> None:
    before = stored(project)
    with ExitStack() as stack:
        replicas = [running(stack, project, model, processes=2) for model in ("a", "b")]
        answers = [[replica.request({}, index=index).json for index in (0, 1)] for replica in replicas]
        assert [[answer["model"] for answer in pair] for pair in answers] == [["a", "a"], ["b", "b"]]
        assert {answer["value"] for pair in answers for answer in pair} == {1}
    assert stored(project) == before


def test_a_restarted_process_has_the_stored_files_and_the_old_copy_is_deleted(project: Path) -> None:
    with ExitStack() as stack:
        replica = running(stack, project, "a")
        for _ in range(2):
            pid = replica.pid
            assert replica.request({}).json["model"] == "a"
            assert copies_folder(replica.spec.run_dir, pid).exists()
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: replica.status().processes[0].pid not in (None, pid))  # type: ignore[misc]
            replica.wait_ready()
            wait_until(lambda pid=pid: not copies_folder(replica.spec.run_dir, pid).exists())  # type: ignore[misc]
        assert replica.request({}).json == replica.request({}).json


def test_errors_name_the_files_of_the_project(project: Path) -> None:
    with ExitStack() as stack:
        replica = running(stack, project, "a")
        assert replica.request("fail").status == 500
        wait_until(lambda: "ValueError: no" in replica.log())
        wait_until(lambda: 'File "handler.py", line 16, in handle_post' in replica.log())


def test_the_modules_of_the_stored_project_are_compiled(project: Path) -> None:
    with ExitStack() as stack:
        running(stack, project, "a")
        names = {"handler", "values"}
        wait_until(lambda: {path.name.partition(".")[0] for path in project.glob("__pycache__/*.pyc")} == names)
