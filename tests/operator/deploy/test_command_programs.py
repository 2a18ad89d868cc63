"""The program of a command, as a deploy checks it on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.config.schema import Api
from cortex.engine.devices import Inventory
from cortex.errors import ConfigError
from cortex.operator.deploy.deployer import revision_of
from cortex.operator.deploy.diagnose import Machine, diagnose

MISSING = '"no-such-server" was not found on the PATH'


def problem_of(folder: Path, program: str, machine: Machine) -> str:
    config = folder / "cortex.yaml"
    config.write_text(
        f'- name: own\n  kind: RealtimeAPI\n  handler: {{type: command, command: ["{program}", --port, $PORT]}}\n'
    )
    try:
        diagnose(config, "cortex.yaml", machine=machine)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_program_is_found_on_the_path_of_this_machine(tmp_path: Path) -> None:
    machine = Machine({"PATH": str(tmp_path / "bin")})
    assert MISSING in problem_of(tmp_path, "no-such-server", machine)
    assert problem_of(tmp_path, "python", machine) == ""  # of the environment of cortex
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "no-such-server").touch(mode=0o755)
    assert problem_of(tmp_path, "no-such-server", machine) == ""


def test_a_program_may_come_from_the_requirements_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("uvicorn\n")
    assert problem_of(tmp_path, "no-such-server", Machine({})) == ""


@pytest.mark.parametrize(
    ("devices", "found"), [(None, MISSING), (Inventory(cores=2.0), MISSING), (Inventory(cores=0.0), "")]
)
def test_programs_of_a_cluster_are_not_looked_for_on_this_machine(
    devices: Inventory | None, found: str, tmp_path: Path
) -> None:
    problem = problem_of(tmp_path, "no-such-server", Machine({"PATH": ""}, devices))
    assert found in problem
    assert bool(found) == bool(problem)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("/no/such/server", "file does not exist on this machine"),
        ("/etc/passwd", "file is not executable"),
        ("/bin/sh", ""),
        ("$HOME/server", ""),
    ],
)
def test_an_absolute_path_is_a_program_of_this_machine(program: str, problem: str, tmp_path: Path) -> None:
    found = problem_of(tmp_path, program, Machine({}))
    assert problem in found
    assert bool(problem) == bool(found)


def test_a_limit_of_recording_changes_the_revision_unless_it_is_the_default() -> None:
    record = {"share": "10%", "max_size": 2**30, "redact": None, "to": None}
    handler = {"interface": "handler", "type": "python", "path": "handler.py"}
    revisions = [
        revision_of(Api.model_validate({"name": "own", "handler": handler, "networking": {"record": each}}), "p", "n")
        for each in (record, record | {"max_cpu": "1%"}, record | {"max_cpu": "2%"})
    ]
    assert revisions[0] == revisions[1] != revisions[2]


def test_another_endpoint_needs_new_processes_only_for_a_command() -> None:
    command = {"interface": "handler", "type": "command", "command": ["server"]}
    python = {"interface": "handler", "type": "python", "path": "handler.py"}
    for handler, is_same in ((command, False), (python, True)):
        revisions = {
            revision_of(
                Api.model_validate({"name": "own", "handler": handler, "networking": {"endpoint": each}}), "p", "n"
            )
            for each in ("/a", "/b")
        }
        assert (len(revisions) == 1) is is_same
