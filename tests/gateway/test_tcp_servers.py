"""Servers that the gateway reaches over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from cortex.errors import GatewayError
from cortex.gateway.backends import GatewaySockets
from cortex.gateway.config import GatewaySettings, render
from cortex.gateway.routes import Server
from cortex.home import Home
from harness import TESTS
from harness.servers.upstream import Client, World, ask, backend, eventually, run, table, world

pytestmark = pytest.mark.processes

SECRET = "5ec2e7" * 8


@contextlib.asynccontextmanager
async def served(home: Home, *hosts: str) -> AsyncIterator[World]:
    """Yield a gateway with one API, `all`, and a server per host; "" is a server on a unix socket."""
    async with world(home) as made:
        servers = [await made.server(f"s{index}", host=host) for index, host in enumerate(hosts)]
        await made.gateway.startup(table(backend("all", *servers), gateway_secret=SECRET))
        yield made


def test_invalid_addresses_and_secrets_are_refused() -> None:
    sockets = GatewaySockets("/run/stats", "/run/successor", "/run/inside", "/run/refusals")
    for address in ("node-1:80", "relative/path", "", "127.0.0.1:80\n  server x"):
        with pytest.raises(GatewayError, match="neither a path nor"):
            render(table(backend("a", Server("s", address, 1))), GatewaySettings(), sockets)
    with pytest.raises(GatewayError, match="secret is too long or contains") as raised:
        render(table(gateway_secret="sec ret"), GatewaySettings(), sockets)
    assert "sec ret" not in str(raised.value)


def test_without_tcp_servers_there_are_no_tcp_rules() -> None:
    sockets = GatewaySockets("/run/stats", "/run/successor", "/run/inside", "/run/refusals")
    text = render(table(backend("a", Server("s", "/run/s", 1))), GatewaySettings(), sockets).config
    assert "x-cortex-gateway" not in text
    assert "srvtcpka" not in text


def test_the_first_tcp_server_needs_no_reload() -> None:
    sockets = GatewaySockets("/run/stats", "/run/successor", "/run/inside", "/run/refusals")
    structures = {
        render(table(backend("a", *servers), gateway_secret=SECRET), GatewaySettings(), sockets).structure
        for servers in ((), (Server("s", "127.0.0.1:80", 1),), (Server("s", "/run/s", 1),))
    }
    assert len(structures) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_servers_receive_the_secret_and_clients_can_not_set_it(home: Home, host: str) -> None:
    async with served(home, host) as made:
        for headers in ({}, {"x-cortex-gateway": "mine"}, {"X-Cortex-Gateway": SECRET}):
            assert (await ask(made.port, "/all", **headers)).status == 200
            seen = made.upstreams["s0"].seen[-1]["all_headers"]
            assert [value for name, value in seen if name == "x-cortex-gateway"] == [SECRET]
        answer = await ask(made.port, "/all")
        assert "x-cortex-gateway" not in answer.headers


def test_files_with_the_secret_are_private(home: Home) -> None:
    async def scenario() -> None:
        os.umask(0o000)
        async with served(home, "127.0.0.1") as made:
            folder = made.home.run_dir / "gateway"
            files = [path for path in folder.iterdir() if not path.is_symlink()]  # a link leads to the binary
            assert [path.name for path in files if SECRET in path.read_text()] == ["haproxy.cfg"]
            assert {path.stat().st_mode & 0o777 for path in files} == {0o600}

    before = os.umask(0o022)
    try:
        run(scenario())
    finally:
        os.umask(before)


async def test_tcp_servers_are_added_and_removed_without_a_reload(home: Home) -> None:
    async with served(home, "127.0.0.1", "") as made:
        worker = (await made.gateway._runtime.workers()).current
        v6, v4 = await made.server("v6", host="::1"), await made.server("v4", host="127.0.0.1")
        await made.gateway.apply(table(backend("all", v6, v4), gateway_secret=SECRET))
        for _ in range(6):
            assert (await ask(made.port, "/all")).json()["server"] in ("v6", "v4")
        assert made.upstreams["v6"].served
        assert made.upstreams["v4"].served
        await made.gateway.apply(table(backend("all"), gateway_secret=SECRET))
        assert (await ask(made.port, "/all")).status == 503
        await eventually(lambda: _drained(made, {"s0", "s1", "v6", "v4"}))
        assert (await made.gateway._runtime.workers()).current == worker


async def _drained(made: World, names: set[str]) -> bool:
    return await made.gateway.drained(names) == names


async def test_tcp_connections_are_reused(home: Home) -> None:
    async with served(home, "127.0.0.1") as made:
        seen = set[object]()
        for _ in range(50):
            assert (await ask(made.port, "/all")).status == 200
            # Those of checks, which are open for a moment, have no request.
            seen |= {each for each in made.upstreams["s0"].connections if hasattr(each, "_url")}
        assert len(seen) <= 3


async def test_a_head_larger_than_the_limit_of_supervisors_is_refused(home: Home) -> None:
    async with served(home, "127.0.0.1") as made:
        assert (await ask(made.port, f"/all?{'x' * 60_000}")).status == 200
        answer = await ask(made.port, f"/all?{'x' * 70_000}")
        assert answer.status == 431
        assert answer.json()["error"] == "the URL and the headers are larger than 65536 bytes"


async def test_a_server_that_refuses_connections_is_skipped_until_it_recovers(home: Home) -> None:
    async with served(home, "127.0.0.1", "127.0.0.1") as made:
        gone = made.upstreams["s0"]
        port = int(gone.address.rpartition(":")[2])
        await gone.stop()
        for _ in range(20):
            assert (await ask(made.port, "/all")).json()["server"] == "s1"
        back = await asyncio.start_server(_answer, "127.0.0.1", port)

        async def is_asked() -> bool:
            return (await ask(made.port, "/all")).body == b"back"

        await eventually(is_asked)
        back.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # a check
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nback")
        await writer.drain()
    writer.close()


async def test_a_server_that_accepts_no_connection_costs_no_request(home: Home) -> None:
    """A full backlog drops new connections, like a machine that vanished."""
    with socket.socket() as silent, contextlib.ExitStack() as waiting:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(silent.getsockname())
        async with served(home, "127.0.0.1") as made:
            mute = Server("mute", f"127.0.0.1:{silent.getsockname()[1]}", 10)
            near = await made.server("s0")
            await made.gateway.apply(table(backend("all", mute, near), gateway_secret=SECRET))
            clients = [Client(made.port) for _ in range(8)]
            answers = await asyncio.gather(*(client.get("/all") for client in clients))
            assert [answer.status for answer in answers] == [200] * 8
            await made.gateway.apply(table(backend("all", mute), gateway_secret=SECRET))
            answer = await ask(made.port, "/all")
            assert answer.status == 503


def _can_make_namespaces() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    command = "ip link add near type veth peer name far && unshare -n true"
    return subprocess.run(["unshare", "-rn", "sh", "-c", command], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_make_namespaces(), reason="no network namespaces can be made here")
@pytest.mark.parametrize("kind", ["cold", "warm"])
def test_a_vanished_machine_only_fails_requests_that_it_may_have_received(kind: str) -> None:
    command = ["unshare", "-rn", sys.executable, str(TESTS / "harness" / "servers" / "vanishing.py"), kind]
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
