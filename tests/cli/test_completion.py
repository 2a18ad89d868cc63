"""Completion of the command line, with an operator that has an API with a job."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cortex.cli.commands.completion import candidates
from cortex.cli.main import COMMANDS
from cortex.cli.output import Console
from cortex.cli.session import Session
from cortex.home import Home
from cortex.lifecycle import JobStatus
from harness.installations.command_line import cortex, environ
from harness.jobs.job_data import JOB_ID, job
from harness.jobs.job_operator import Operator

pytestmark = pytest.mark.processes

FILES = [":files"]


@pytest.fixture
def session(operator: Operator, home: Path) -> Session:
    names = ("sum", "summary", "iris")
    apis = [{"spec": {"name": name, "kind": "BatchAPI"}, "status": {"message": "live"}} for name in names]
    operator.respond("GET /v1/apis", apis)
    operator.respond("GET /v1/apis/sum/jobs?limit=10", [job(JobStatus.RUNNING)])
    history = [{"number": number, "action": "deploy", "deployed_at": "2026-11-22T10:00:00Z"} for number in (3, 2)]
    operator.respond("GET /v1/apis/iris/history", history)
    operator.respond("GET /v1/keys", [{"id": "k1", "name": "shop"}])
    operator.respond("GET /v1/tokens", [{"name": "ci", "scope": "deploy"}])
    return Session(Home(home), environ(home), Console(sys.stdout, sys.stderr))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("de", ["dev", "deploy", "delete"]),
        ("nope ", []),
        ("get ", ["sum", "summary", "iris"]),
        ("get su", ["sum", "summary"]),
        ("get sum ", [JOB_ID]),
        ("get iris ", []),
        ("delete -f -e test sum ", [JOB_ID]),
        ("get -e ", ["local", "test"]),
        ("get -e nope ", []),
        ("get -o ", ["pretty", "json"]),
        ("get --output=json --w", ["--watch", "--why"]),
        ("submit sum --retry-failed ", [JOB_ID]),
        ("submit sum ", FILES),
        ("deploy ", FILES),
        ("deploy --no", ["--no-wait"]),
        ("predict sum ", FILES),
        ("env ", ["configure", "list", "default", "rename", "delete"]),
        ("env default ", ["local", "test"]),
        ("env rename te", ["test"]),
        ("keys revoke ", ["k1"]),
        ("keys create shop --api i", ["iris"]),
        ("tokens revoke ", ["ci"]),
        ("tokens create --scope m", ["metrics"]),
        ("init ", []),
        ("init --kind B", ["BatchAPI"]),
        ("up --engine ", ["local", "ray"]),
        ("up --engine r", ["ray"]),
        ("rollback iris ", ["3", "2"]),
        ("rollback iris 3", ["3"]),
        ("schema --generation ", ["0.9", "0.11", "0.12", "0.18", "0.33", "0.35"]),
        ("completion ", ["bash", "fish", "zsh"]),
        ("down --", ["--help", "--operator"]),
    ],
)
def test_completes_commands_options_values_and_names(session: Session, line: str, expected: list[str]) -> None:
    found = [word for word, _ in candidates(line.split(" "), session)]
    assert sorted(found) == sorted(expected) if line.startswith("env ") else found == expected


def test_descriptions_are_those_of_the_help_and_of_the_operator(session: Session) -> None:
    assert candidates(["deploy"], session) == [("deploy", COMMANDS["deploy"])]
    assert ("sum", "BatchAPI, live") in candidates(["get", ""], session)
    assert candidates(["get", "sum", ""], session) == [(JOB_ID, "running")]


def test_without_an_operator_names_are_not_completed(tmp_path: Path) -> None:
    alone = Session(Home(tmp_path), environ(tmp_path), Console(sys.stdout, sys.stderr))

    assert candidates(["get", ""], alone) == []
    assert candidates(["env", "default", ""], alone) == [("local", "")]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def program(tmp_path: Path) -> Path:
    made = tmp_path / "bin dir" / "cortex"
    made.parent.mkdir()
    made.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m cortex.cli.main \"$@\"\n")
    made.chmod(0o755)
    return made


def by_bash(home: Path, program: Path, folder: Path, *words: str) -> list[str]:
    script = cortex(home, "completion", "bash").stdout
    typed = " ".join(f"'{word}'" for word in words)
    asking = f"COMP_WORDS=('{program}' {typed}); COMP_CWORD={len(words)}; _cortex; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    command = ["bash", "-c", f"{script}\n{asking}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ(home), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.usefixtures("session")
def test_bash_completes_names_values_and_files(home: Path, program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "my job.json").touch()
    (folder / "other").touch()

    assert by_bash(home, program, folder, "logs", "s") == ["sum", "summary"]
    assert by_bash(home, program, folder, "deploy", "--no") == ["--no-wait"]
    assert by_bash(home, program, folder, "down", "--") == ["--help", "--operator"]
    assert by_bash(home, program, folder, "logs", "--", "s") == ["sum", "summary"]
    assert by_bash(home, program, folder, "submit", "sum", "my") == ["my job.json"]
    assert by_bash(home, program, folder, "nope", "") == [""]


@pytest.mark.parametrize(("shell", "option"), [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute")])
def test_scripts_are_valid(tmp_path: Path, shell: str, option: str) -> None:
    script = tmp_path / "script"
    script.write_text(cortex(tmp_path / "home", "completion", shell).stdout)
    assert f"completion {shell} --words" in script.read_text()

    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, option, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
