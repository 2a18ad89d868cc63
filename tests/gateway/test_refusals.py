"""Responses of the gateway to requests whose body is not complete: clients that still send must receive them."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cortex.gateway import config
from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import RoutingTable
from cortex.home import Home
from harness.servers.certificates import write_pair
from harness.servers.upstream import World, ask, backend, eventually, table, world

pytestmark = pytest.mark.processes

REFUSED = {
    "/limited": 413,
    "/keyed": 401,
    "/unknown": 404,
    "/none": 503,
    "/app": 503,
    "/cold": 401,
    "/jobs": 401,
    "/v2": 405,
}
LARGE = 20_000_000


@asynccontextmanager
async def refusing(home: Home, certificate: str = "", http_2: bool = False) -> AsyncIterator[World]:
    """Yield a running gateway whose APIs refuse every large body."""
    async with world(home, certificate=certificate) as w:
        grpc = [backend("a.Service", await w.server("grpc"), replica_protocol=Protocol.GRPC)] if http_2 else []
        made = table(
            backend("app", replica_protocol=Protocol.APPLICATION, max_body_bytes=10**9),
            backend("cold", needs_key=True, holds=True, replica_protocol=Protocol.COMMAND),
            backend("jobs", needs_key=True, jobs_socket=str(home.jobs_socket)),
            backend("keyed", await w.server("a"), needs_key=True),
            backend("limited", await w.server("a"), max_body_bytes=1000),
            backend("none", max_body_bytes=10**9),
            *grpc,
        )
        await w.gateway.startup(RoutingTable(made.backends, v2_at_root=True))
        yield w


async def upload(
    port: int, path: str, head: str, body: bytes, context: ssl.SSLContext | None = None
) -> tuple[int, str]:
    """Send a whole request before the response is read, and return its status and the message of its error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(f"POST {path} HTTP/{head}\r\n\r\n".encode())
        for start in range(0, len(body), 1 << 20):
            writer.write(body[start : start + (1 << 20)])
            await writer.drain()
        first, _, rest = (await reader.readuntil(b"\r\n\r\n")).decode().partition("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in rest.split("\r\n") if line)
        error = json.loads(await reader.readexactly(int(headers["content-length"])))
        assert error["request_id"] == headers["x-cortex-request-id"]
        return int(first.split()[1]), error["error"]
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("secure", [False, True])
async def test_a_client_that_sends_its_whole_body_first_receives_the_refusal(
    home: Home, tmp_path: Path, secure: bool
) -> None:
    certificate, key = write_pair(tmp_path, "127.0.0.1")
    context = ssl.create_default_context(cafile=certificate) if secure else None
    async with refusing(home, certificate.read_text() + key.read_text() if secure else "") as w:
        length = f"content-length: {LARGE}"
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (LARGE, b"x" * LARGE)
        for path, status in REFUSED.items():
            for head in (
                f"1.1\r\nhost: x\r\n{length}",
                f"1.1\r\nhost: x\r\nconnection: close\r\n{length}",
                f"1.0\r\n{length}",
            ):
                assert (await upload(w.port, path, head, b"x" * LARGE, context))[0] == status, (path, head)
            if path != "/limited":  # the replica counts the bytes of chunks
                head = "1.1\r\nhost: x\r\ntransfer-encoding: chunked"
                assert (await upload(w.port, path, head, chunked, context))[0] == status, path


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    "options", [("--http2", "-T", "-"), ("--http2", "--data-binary", "@-"), ("--http1.1", "-T", "-")]
)
async def test_a_client_that_reads_while_it_sends_receives_the_refusal(
    home: Home, tmp_path: Path, options: tuple[str, ...]
) -> None:
    certificate, key = write_pair(tmp_path, "127.0.0.1")
    body = tmp_path / "body"  # no pipe: curl may end before all of it is written
    body.write_bytes(b"x" * LARGE)
    async with refusing(home, certificate.read_text() + key.read_text(), http_2=True) as w:
        for path, status in REFUSED.items():
            if path == "/limited" and "-T" in options:
                continue
            command = ["curl", "-sk", "-X", "POST", "-H", "Expect:", "-o", "/dev/null", "-w", "%{http_code}", *options]
            with body.open("rb") as file:
                client = await asyncio.create_subprocess_exec(
                    *command, f"https://127.0.0.1:{w.port}{path}", stdin=file, stdout=-1, stderr=-1
                )
                output, _ = await client.communicate()
            assert (client.returncode, output) == (0, b"%d" % status), path


async def test_the_rest_of_a_refused_body_neither_counts_as_a_request_nor_ends_the_connection(home: Home) -> None:
    async with refusing(home) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(b"POST /cold HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1000)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
        stats = (await w.gateway.stats())["cold"]
        assert (stats.requests, stats.in_flight, stats.queued, stats.responses[4]) == (0, 0, 0, 0)
        writer.write(b"x" * 999_000 + b"GET /unknown HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"HTTP/1.1 404 ")
        assert (await w.gateway.stats())["cold"].responses[4] == 1
        writer.close()


async def test_a_client_that_expects_100_continue_receives_the_refusal_instead(home: Home) -> None:
    async with refusing(home) as w:
        for path, status in REFUSED.items():
            head = f"1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {LARGE}"
            assert (await upload(w.port, path, head, b""))[0] == status, path


@pytest.mark.parametrize(("limit", "value"), [("DRAIN_S = 30", "DRAIN_S = 0"), ("1024 * 1024 * 1024", "1024")])
async def test_a_refused_request_is_received_for_a_bounded_time_and_size(
    home: Home, monkeypatch: pytest.MonkeyPatch, limit: str, value: str
) -> None:
    assert limit in config._SCRIPT
    monkeypatch.setattr(config, "_SCRIPT", config._SCRIPT.replace(limit, value))
    async with refusing(home) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(b"POST /unknown HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 404 ")

        async def is_closed() -> bool:
            try:
                writer.write(b"x" * 1000)
                await writer.drain()
            except OSError:
                return True
            return writer.transport.is_closing()

        await eventually(is_closed)
        assert (await ask(w.port, "/livez")).status == 200


async def test_refusals_are_in_the_access_log(home: Home) -> None:
    async with world(home) as w:
        limited = backend("limited", await w.server("a"), max_body_bytes=1000, access_log=True)
        await w.gateway.startup(table(limited))
        assert (await ask(w.port, "/limited", "POST", b"x" * 2_000_000)).status == 413
        assert (await ask(w.port, "/limited", long="x" * 70_000)).status == 431
        file = home.logs_dir / "access.log"

        async def are_logged() -> bool:
            complete = file.read_text().rpartition("\n")[0].splitlines()
            return sorted(json.loads(line)["status"] for line in complete) == [413, 431]

        await eventually(are_logged)
