"""Measure open WebSockets of an application: memory of each, and messages/s: `python -m benchmarks.websockets`.

The same application, which returns each message, runs behind cortex and on uvicorn alone with the same library
(wsproto). All connections are open; on some of them a client sends its next message when the last one has returned.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import uvloop

from benchmarks.tools import machine, processes, results
from benchmarks.tools.cortex_cli import Cortex, groups
from benchmarks.tools.endpoint import Endpoint, NotServingError, free_ports, is_listening
from benchmarks.tools.systems import START_LIMIT_S, environ_of

_APP = """
async def app(scope, receive, send):
    if scope["type"] != "websocket":
        raise NotImplementedError
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})
"""
_API = """
- name: echo
  kind: RealtimeAPI
  handler: {type: asgi, path: echo.py, app: app}
  autoscaling: {max_replicas: 1, max_replica_concurrency: 20000, target_replica_concurrency: 20000}
"""
_TEXT = b"x" * 20
#: A frame of a client: final and of text, masked with zeros (RFC 6455, section 5.2).
_QUESTION = bytes((0x81, 0x80 | len(_TEXT))) + bytes(4) + _TEXT
_ANSWER = bytes((0x81, len(_TEXT))) + _TEXT
_HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
_OPENED_AT_ONCE = 50


@dataclass(frozen=True)
class Measured:
    """One system."""

    system: str
    open: int
    kilobytes_each: dict[str, float]  #: by process group, of an open WebSocket
    active: int
    messages_per_s: float
    cpu_us: float  #: per message and its return, of all processes


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.websockets", description=__doc__)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--active", type=int, default=64, help="connections with messages")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    options = parser.parse_args()
    processes.adopt_orphans()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        cortex = Cortex.in_folder(Path(folder))
        (cortex.project / "echo.py").write_text(_APP)
        (cortex.project / "echo.yaml").write_text(_API)
        with cortex.up(), _uvicorn(cortex.project) as (port, server):
            cortex.deploy("echo")

            def of_cortex() -> dict[str, list[psutil.Process]]:
                found = groups(cortex.status())
                return {"gateway": found["gateway"], "replica": found["replicas"]}

            systems = {
                "uvicorn": (Endpoint(port, "/echo"), lambda: {"server": [server]}),
                "cortex": (Endpoint(cortex.gateway_port, "/echo/echo"), of_cortex),
            }
            measured = [uvloop.run(_measure(name, *system, options)) for name, system in systems.items()]
    text = "# WebSockets\n\n| system | open | memory of each | messages/s | CPU per message |\n|---|---|---|---|---|\n"
    for row in measured:
        memory = ", ".join(f"{group} {kilobytes:.1f} kB" for group, kilobytes in row.kilobytes_each.items())
        text += f"| {row.system} | {row.open} | {memory} | {row.messages_per_s:,.0f} | {row.cpu_us:.1f} µs |\n"
    results.write("websockets", text, {"facts": facts, "measured": [dataclasses.asdict(row) for row in measured]})


async def _measure(
    name: str,
    endpoint: Endpoint,
    of_system: Callable[[], dict[str, list[psutil.Process]]],
    options: argparse.Namespace,
) -> Measured:
    members = of_system()
    (await _connect(endpoint)).close()  # the first one imports and allocates
    before = {group: processes.pss_mb(found) for group, found in members.items()}
    clients: list[_Client] = []
    while len(clients) < options.connections:
        count = min(_OPENED_AT_ONCE, options.connections - len(clients))
        clients += await asyncio.gather(*(_connect(endpoint) for _ in range(count)))
    each = {group: (processes.pss_mb(found) - before[group]) * 1e3 / len(clients) for group, found in members.items()}
    flat = [process for found in members.values() for process in found]
    samples = []
    for _ in range(options.rounds):
        used = processes.cpu_s(flat)
        count = await _exchange(clients[: options.active], options.seconds)
        used_s = processes.cpu_between(used, processes.cpu_s(flat))
        samples.append((count / options.seconds, used_s / count * 1e6))
    if lost := sum(client.is_lost for client in clients):
        raise NotServingError(f"{lost} of {len(clients)} WebSockets of {name} were closed")
    for client in clients:
        client.close()
    per_s, cpu_us = (statistics.median(column) for column in zip(*samples, strict=True))
    measured = Measured(name, len(clients), each, options.active, per_s, cpu_us)
    print(measured, flush=True)
    return measured


class _Client(asyncio.Protocol):
    """One WebSocket, which sends a message whenever the last one has returned and `is_active`."""

    def __init__(self) -> None:
        self.is_active = self.is_lost = False
        self.returned = 0
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, data: bytes) -> None:
        """Write bytes."""
        self._transport.write(data)

    def close(self) -> None:
        """Close without a closing handshake."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._read += data
        if not self.opened.done():
            head, end, self._read = self._read.partition(b"\r\n\r\n")
            if end and head.startswith(b"HTTP/1.1 101"):
                self.opened.set_result(None)
            elif end:
                self.opened.set_exception(NotServingError(head.decode("latin-1")))
        elif self._read == _ANSWER:
            self._read = b""
            self.returned += 1
            if self.is_active:
                self.send(_QUESTION)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


async def _connect(endpoint: Endpoint) -> _Client:
    """Open a WebSocket. Raises: NotServingError."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(_Client, endpoint.host, endpoint.port)
    client.send(_HANDSHAKE.format(path=endpoint.path, host=f"{endpoint.host}:{endpoint.port}").encode())
    await asyncio.wait_for(client.opened, START_LIMIT_S)
    return client


async def _exchange(clients: list[_Client], seconds: float) -> int:
    """Return the number of messages that have returned within some seconds."""
    before = sum(client.returned for client in clients)
    for client in clients:
        client.is_active = True
        client.send(_QUESTION)
    await asyncio.sleep(seconds)
    count = sum(client.returned for client in clients) - before
    for client in clients:
        client.is_active = False
    await asyncio.sleep(0.2)  # the last ones return
    return count


@contextlib.contextmanager
def _uvicorn(folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run the application on uvicorn alone; yield its port and its process."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "uvicorn", "echo:app", "--port", str(port), "--no-access-log", "--ws", "wsproto"]
    command += ["--loop", "uvloop", "--log-level", "warning"]
    with processes.started(command, environ_of(), folder, folder.parent / "uvicorn.log") as process:
        processes.wait(lambda: is_listening(port), START_LIMIT_S)
        yield port, psutil.Process(process.pid)


if __name__ == "__main__":
    main()
