"""Compare replicas over TCP with replicas on unix sockets, on loopback: `python -m benchmarks.tcp_replicas`."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from benchmarks.tools.endpoint import Endpoint, free_ports, wait_until_right
from benchmarks.tools.load import closed_loop, require_wrk
from benchmarks.tools.systems import START_LIMIT_S
from benchmarks.tools.workloads import NOOP
from cortex.engine.local import LocalEngine
from cortex.gateway.config import GatewaySettings
from cortex.gateway.haproxy import HaproxyGateway
from cortex.gateway.routes import ApiBackend, RoutingTable, Server
from cortex.home import Home
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaSpec

_CODE = """
class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        return {"y": payload["x"]}
"""
_CAPACITY = 17


def main() -> None:
    """Measure both in turn; print requests per second and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tcp_replicas", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    require_wrk()
    asyncio.run(_measure(options.rounds, options.seconds, options.concurrency))


async def _measure(rounds: int, seconds: int, concurrencies: list[int]) -> None:
    async with AsyncExitStack() as stack:
        endpoints = [
            await stack.enter_async_context(_served(name, host)) for name, host in (("unix", ""), ("tcp", "127.0.0.1"))
        ]
        for concurrency in concurrencies:
            rates: list[list[float]] = [[], []]
            for number in range(rounds):
                for which in (0, 1) if number % 2 == 0 else (1, 0):
                    load = await asyncio.to_thread(closed_loop, endpoints[which], NOOP, concurrency, seconds)
                    if load.errors:
                        raise SystemExit(f"{load.errors} requests failed")
                    rates[which].append(load.per_s)
            unix, tcp = map(statistics.median, rates)
            ratio = statistics.median(tcp / unix for unix, tcp in zip(*rates, strict=True))
            print(f"{concurrency} connections: unix {unix:.0f}/s, tcp {tcp:.0f}/s, ratio {ratio:.2f}", flush=True)


@asynccontextmanager
async def _served(name: str, host: str) -> AsyncIterator[Endpoint]:
    """Run a replica behind a gateway of its own."""
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:
        home = Home(Path(folder))
        home.create()
        (port,) = free_ports(1)
        secret = secrets.token_hex(32) if host else ""
        engine, gateway = LocalEngine(home, os.environ, Logger(name)), HaproxyGateway(home, GatewaySettings(port=port))
        await engine.startup(lambda: None)
        try:
            spec = _spec(home, name, host, secret)
            await engine.start(spec)
            while not engine.replicas()[spec.id][1].is_ready:
                await asyncio.sleep(0.05)
            server = Server("s", engine.replicas()[spec.id][1].processes[0].socket, _CAPACITY)
            backend = ApiBackend(name, "/noop", 60.0, 1_000_000, 1000, "", (server,))
            await gateway.startup(RoutingTable((backend,), gateway_secret=secret))
            endpoint = Endpoint(port, "/noop")
            await asyncio.to_thread(wait_until_right, endpoint, NOOP, START_LIMIT_S)
            yield endpoint
        finally:
            await gateway.stop()
            for replica in engine.replicas():
                await engine.stop(replica, 0)
            while engine.replicas():
                await asyncio.sleep(0.05)
            await engine.shutdown()


def _spec(home: Home, name: str, host: str, secret: str) -> ReplicaSpec:
    project = home.path / "project"
    project.mkdir()
    (project / "handler.py").write_text(_CODE)
    return ReplicaSpec(
        id=name,
        api=name,
        revision="0" * 64,
        interface="handler",
        project_dir=str(project),
        path="handler.py",
        python=sys.executable,
        run_dir=str(home.replicas_dir / name),
        sockets=(str(home.sockets_dir / f"{name}-0"),),
        control_socket=str(home.sockets_dir / f"{name}-c"),
        log_path=str(home.logs_dir / name / "replica.log"),
        listen_host=host,
        gateway_secret=secret,
    )


if __name__ == "__main__":
    main()
