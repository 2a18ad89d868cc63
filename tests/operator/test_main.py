"""A real operator with real replicas behind a real gateway."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortex.client.local_operator import ListenOptions, start
from cortex.home import Home
from cortex.installation import operator_file
from harness.installations.running import BROKEN_HANDLER, Load, RunningOperator, config, end_leftovers
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes


def pids(operator: RunningOperator) -> set[int]:
    return {item["pid"] for item in operator.replicas() if item["state"] == "ready"}


def counts(operator: RunningOperator, group: str = "updated") -> dict[str, Any]:
    return operator.api()["status"]["replica_counts"][group]


def test_an_operator_whose_command_ends_before_it_permits_the_start_does_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "cortex.operator.main", "--wait-for-input"]
    environ = {**os.environ, "CORTEX_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, input=b"", env=environ, capture_output=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not (tmp_path / "home").exists()


def test_no_request_fails_during_updates_refreshes_and_patches(operator: RunningOperator) -> None:
    operator.deploy(config(replicas=2))
    operator.wait()
    with Load(operator) as load:
        before = pids(operator)
        operator.deploy(config(replicas=2, answer="two"))
        operator.wait()
        assert operator.predict({})[1]["answer"] == "two"
        assert operator.call("POST", "/v1/apis/iris/refresh")[1]["message"] == "updating iris (RealtimeAPI)"
        operator.wait()
        wait_until(lambda: len(operator.replicas()) == 2, message="old replicas gone")
        refreshed = pids(operator)
        assert not refreshed & before
        for replicas in (3, 1):
            status, _ = operator.call("POST", "/v1/patch", config(replicas=replicas, answer="two").encode())
            assert status == 200
            operator.wait()
            wait_until(lambda replicas=replicas: len(operator.replicas()) == replicas, message="scaled")
        assert pids(operator) <= refreshed
    assert load.failures == []
    assert set(load.answers) == {"one", "two"}


def test_no_request_fails_when_the_operator_is_killed_and_the_next_adopts_all(operator: RunningOperator) -> None:
    operator.deploy(config(replicas=2))
    operator.wait()
    with Load(operator) as load:
        before, gateway = pids(operator), operator.call("GET", "/v1/status")[1]["gateway"]["pid"]
        operator.end(signal.SIGKILL)
        assert operator.predict({})[0] == 200
        operator.start()
        assert pids(operator) == before
        assert operator.call("GET", "/v1/status")[1]["gateway"]["pid"] == gateway
        assert operator.wait()["status"]["status_code"] == "live"
        operator.deploy(config(replicas=2, answer="two"))
        assert operator.wait()["status"]["status_code"] == "live"
    assert load.failures == []
    assert load.answers[-1] == "two"


def test_a_broken_update_keeps_the_old_version_and_reports_the_reason(operator: RunningOperator) -> None:
    operator.deploy(config(replicas=2))
    operator.wait()
    with Load(operator) as load:
        operator.deploy(config(replicas=2, answer="two"), BROKEN_HANDLER)
        state = operator.wait()["status"]
        assert state["status_code"] == "error"
        assert state["failure"]["message"] == "ValueError: bad weights"
        assert "handler.py" in state["failure"]["traceback"]
        assert state["replica_counts"]["stale"]["ready"] == 2
        assert state["replica_counts"]["updated"]["failed"] == 1
        operator.deploy(config(replicas=2, answer="three"))
        assert operator.wait()["status"]["status_code"] == "live"
        wait_until(lambda: len(operator.replicas()) == 2, message="only the newest left")
    assert load.answers[-1] == "three"
    assert "two" not in load.answers
    assert load.failures == []


def test_reports_a_gateway_that_rejects_routes_until_it_accepts_them(operator: RunningOperator) -> None:
    operator.deploy(config())
    assert operator.wait()["status"]["status_code"] == "live"
    file = operator.home.run_dir / "gateway" / "haproxy.cfg"
    file.unlink()
    file.mkdir()  # which nobody can write a configuration to
    operator.deploy(config(name="other"))
    told = operator.wait("other")["status"]
    assert told["status_code"] == operator.api("iris")["status"]["status_code"] == "error"
    assert told["failure"]["message"].startswith("the gateway can't apply its new routes: the gateway's files can't be")
    assert operator.predict({})[0] == 200
    file.rmdir()  # and no more: the operator may write the file at any moment from now on
    wait_until(lambda: operator.api("other")["status"]["status_code"] == "live")
    assert operator.predict({}, "/other")[0] == 200
    assert operator.api("iris")["status"]["status_code"] == "live"


def test_an_operator_stopped_by_a_signal_leaves_everything_running(operator: RunningOperator) -> None:
    operator.deploy(config())
    operator.wait()
    operator.end(signal.SIGTERM)
    assert operator.predict({})[0] == 200


def test_the_file_by_which_commands_find_an_operator_is_written_again(operator: RunningOperator) -> None:
    file = operator_file(operator.home)
    before = file.read_text()
    file.unlink()
    wait_until(lambda: file.exists() and file.read_text() == before)


def test_two_operators_never_share_a_home(operator: RunningOperator) -> None:
    second = operator.spawn()
    _, stderr = second.communicate(timeout=60)
    assert second.returncode == 1
    assert b"an operator already runs for" in stderr


def test_a_start_waits_for_an_operator_that_another_command_has_begun_to_start(tmp_path: Path) -> None:
    operator = RunningOperator(Home(tmp_path / "home"))
    operator.process = operator.spawn()
    try:
        wait_until(operator.home.operator_lock.exists)
        identity, was_started = start(operator.home, ListenOptions(operator.gateway_port, operator.port))
        assert (identity.pid, was_started) == (operator.process.pid, False)
        operator.call("POST", "/v1/shutdown?all=true")
        operator.process.wait(PATIENCE_S)
    finally:
        operator.end(signal.SIGKILL)
        end_leftovers(operator.home)


@pytest.mark.long
def test_a_taken_port_is_a_clear_error(operator: RunningOperator, tmp_path: Any) -> None:
    other = RunningOperator(Home(tmp_path / "other"))
    other.port = operator.port
    process = other.spawn()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"127.0.0.1:{operator.port}: address already in use" in stderr.decode()


def test_idle_connections_are_closed_in_favour_of_new_ones(operator: RunningOperator) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", operator.port)))
        assert operator.call("GET", "/v1/apis") == (200, [])
        assert operator.process is not None
        open_files = sum(1 for _ in Path(f"/proc/{operator.process.pid}/fd").iterdir())
        assert open_files < 200


def test_the_token_and_the_identity_are_private(operator: RunningOperator) -> None:
    files = [operator.home.token_file, operator.home.run_dir / "operator.json"]
    files += operator.home.path.glob(f"{operator.home.database_file.name}*")
    assert len(files) > 3
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
