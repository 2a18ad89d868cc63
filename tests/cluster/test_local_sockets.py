"""Detection of nodes on this machine, whose sockets are reachable."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex.cluster.node.start import RESERVE_SOCKET
from cortex.cluster.node_client import local_sockets_dir
from cortex.cluster.transport import connect
from cortex.home import Home
from cortex.processes.identity import Identity
from harness.cluster.local_nodes import CREDENTIALS, LocalNode, local_nodes

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as [made]:
        yield made


@pytest.fixture(scope="module")
def told(node: LocalNode) -> dict[str, Any]:
    """The agent's description, as it sends it to an operator."""

    async def ask() -> dict[str, Any]:
        wire = await connect(node.host, node.address.port, CREDENTIALS.identity)
        wire.send({"purpose": "control", "host": "127.0.0.1", "port": 1, "epoch": 1})
        message = await wire.receive()
        wire.close()
        return message or {}

    return asyncio.run(ask())


def test_sockets_of_an_agent_on_this_machine_are_local(node: LocalNode, told: dict[str, Any]) -> None:
    assert local_sockets_dir(node.host, told) == node.home.sockets_dir


def test_a_clock_step_changes_nothing(node: LocalNode, told: dict[str, Any]) -> None:
    identity = json.loads(told["identity"])
    stepped = json.dumps({**identity, "created_at": identity["created_at"] + 3600})
    assert local_sockets_dir(node.host, {**told, "identity": stepped}) == node.home.sockets_dir


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::", "localhost", ""])
def test_an_agent_at_another_address_is_not_local(host: str, told: dict[str, Any]) -> None:
    assert local_sockets_dir(host, told) is None


def test_an_agent_that_does_not_listen_in_its_home_is_not_local(
    node: LocalNode, told: dict[str, Any], tmp_path: Path
) -> None:
    identity = json.loads(told["identity"])
    for change in (
        {"home": str(tmp_path)},
        {"home": 7},
        {"identity": json.dumps({**identity, "boot_id": "of another machine, or of before"})},
        {"identity": json.dumps({**identity, "start_ticks": identity["start_ticks"] + 1})},
        {"identity": json.dumps({**identity, "pid": os.getpid()})},
        {"identity": "[" * 100_000},
        {"identity": None},
    ):
        assert local_sockets_dir(node.host, {**told, **change}) is None, change
    assert local_sockets_dir(node.host, {}) is None


def test_an_agent_of_another_user_is_not_local() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can start another user's process")
    with tempfile.TemporaryDirectory(prefix="cx-") as folder:
        home = Home(Path(folder) / "home")
        home.sockets_dir.mkdir(parents=True)
        for path in (Path(folder), home.path, home.run_dir, home.sockets_dir):
            path.chmod(0o777)
        listen = "s = socket.socket(1); s.bind(sys.argv[1]); s.listen(); print(flush=True); input()"
        script = f"import os, socket, sys; os.setuid(int(sys.argv[2])); {listen}"
        command = [sys.executable, "-c", script, str(home.sockets_dir / RESERVE_SOCKET)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        found = {}
        for user in (os.geteuid(), 65534):
            with subprocess.Popen([*command, str(user)], **pipes) as process:
                process.stdout.readline()  # type: ignore[union-attr]
                identity = Identity.of(process.pid).to_json()
                found[user] = local_sockets_dir("127.0.0.1", {"home": str(home.path), "identity": identity})
                process.communicate(b"\n")
            (home.sockets_dir / RESERVE_SOCKET).unlink()
        assert found == {0: home.sockets_dir, 65534: None}


def test_files_without_an_agent_are_not_local(node: LocalNode, told: dict[str, Any], home: Home) -> None:
    shutil.copy(node.home.run_dir / "node.json", home.run_dir)
    assert local_sockets_dir(node.host, {**told, "home": str(home.path)}) is None
    os.mkfifo(home.sockets_dir / RESERVE_SOCKET)
    assert local_sockets_dir(node.host, {**told, "home": str(home.path)}) is None
