"""Two operators, each with a home of its own, share a database: one leads, the other takes over."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from harness.installations.installation import Installation, served, write_project
from harness.ports import free_port
from harness.servers.postgres import Postgres
from harness.wait import wait_until

SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return {"doubled": payload["x"] * 2}
"""
CONFIG = """
    - name: doubler
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as started:
        yield started


@pytest.fixture
def operators(server: Postgres) -> Iterator[tuple[Installation, Installation]]:
    """Both operators, isolated as on separate machines, except for the network."""
    password = quote(server.password, safe="")
    variables = {"CORTEX_DATABASE": f"postgresql://cortex:{password}@127.0.0.1:{server.port}/postgres"}
    homes = [Path(tempfile.mkdtemp(prefix="cx-")) for _ in range(2)]
    first, second = (Installation(home, free_port(), free_port(), variables) for home in homes)
    try:
        first.up()
        second.up()
        yield first, second
    finally:
        for made in (first, second):
            made.down()
            shutil.rmtree(made.home, ignore_errors=True)


def leads(cortex: Installation) -> bool:
    return cortex.cortex("get", check=False).returncode == 0


def kill(cortex: Installation) -> None:
    os.kill(cortex.status()["operator"]["pid"], signal.SIGKILL)


def who_stands_by_says_who_leads(operators: tuple[Installation, Installation], tmp_path: Path) -> None:
    first, second = operators
    first.cortex("deploy", write_project(tmp_path, SOURCE, CONFIG))
    refused = second.cortex("deploy", write_project(tmp_path, SOURCE, CONFIG), check=False)
    assert refused.returncode != 0
    leader = first.status()["operator"]["url"]
    assert f"this operator stands by: {leader}" in refused.stderr
    assert f"it is on standby: the operator at {leader} is the leader" in second.cortex("up").stdout
    urls = f"http://127.0.0.1:{second.operator_port},{leader}"
    second.cortex("env", "configure", "both", "--operator", urls, "--token", (first.home / "token").read_text().strip())
    assert "doubler" in second.cortex("get", "-e", "both").stdout


def test_up_fails_if_the_database_does_not_answer(tmp_path: Path) -> None:
    variables = {"CORTEX_DATABASE": f"postgresql://cortex@127.0.0.1:{free_port()}/none"}
    cortex = Installation(tmp_path, free_port(), free_port(), variables)
    ports = ("--gateway-port", str(cortex.gateway_port), "--operator-port", str(cortex.operator_port))
    try:
        done = cortex.cortex("up", *ports, check=False)
        assert done.returncode == 1
        error = done.stderr.removeprefix("starting the operator\n")
        assert error.startswith("error: the operator did not start: the database postgresql://cortex@127.0.0.1:")
        assert "can't be reached" in error
        assert error.count("\n") == 1
    finally:
        cortex.down()


def standby_takes_over_with_the_projects_when_the_leader_is_killed(
    operators: tuple[Installation, Installation],
) -> None:
    first, second = operators
    kill(first)
    wait_until(lambda: leads(second), 10)
    assert "doubler" in second.cortex("get", "-e", "both").stdout
    wait_until(lambda: second.get("doubler")["status"]["status_code"] == "live", 30)
    assert served(second, "/doubler", {"x": 4}).json == {"doubled": 8}
    assert first.post("/doubler", {"x": 4}).json == {"doubled": 8}, "what runs does not need its operator"
    first.up()
    assert not leads(first)
    assert (first.home / "token").read_text() == (second.home / "token").read_text()


def a_database_that_is_away_fails_no_request_and_is_taken_up_again(
    operators: tuple[Installation, Installation], server: Postgres
) -> None:
    _, second = operators
    with second.load("/doubler", 100) as summary:
        server.stop()
        refused = second.cortex("refresh", "doubler", check=False)
        assert refused.returncode == 1
        assert "can't be reached" in refused.stderr or "can't be used now" in refused.stderr
        assert server.password not in refused.stderr
        server.start()
        wait_until(lambda: any(map(leads, operators)), 20)
    assert set(summary["statuses"]) == {"200"}, summary


def operators_wait_for_a_database_that_is_away_for_long(
    operators: tuple[Installation, Installation], server: Postgres
) -> None:
    leader = wait_until(lambda: next((cortex for cortex in operators if leads(cortex)), None), 20)
    assert leader is not None
    pid = leader.status()["operator"]["pid"]
    log = leader.home / "logs" / "operator.log"
    told = log.read_text().count("standing by: the database can't be reached")
    server.stop()
    try:
        # It gives up the leadership, and starts again while the database does not answer.
        wait_until(lambda: log.read_text().count("standing by: the database can't be reached") > told, 20)
        os.kill(pid, 0)
        refused = leader.cortex("get", check=False)
        assert "this operator stands by: the database postgresql://" in refused.stderr
        assert "can't be reached" in refused.stderr
    finally:
        server.start()
    wait_until(lambda: any(map(leads, operators)), 20)
    assert [cortex.post("/doubler", {"x": 4}).json for cortex in operators] == [{"doubled": 8}] * 2


@pytest.mark.long
def test_one_leads_and_the_other_takes_over(
    operators: tuple[Installation, Installation], server: Postgres, tmp_path: Path
) -> None:
    who_stands_by_says_who_leads(operators, tmp_path)
    standby_takes_over_with_the_projects_when_the_leader_is_killed(operators)
    a_database_that_is_away_fails_no_request_and_is_taken_up_again(operators, server)
    operators_wait_for_a_database_that_is_away_for_long(operators, server)
