"""Access log: one JSON line per request to an API with `access_log`."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cortex.gateway.haproxy import ACCESS_LOG_MAX_BYTES, rotate
from cortex.gateway.routes import RoutingTable, Share, Split
from cortex.home import Home
from cortex.worker.monitoring.request_log import log_id
from harness.replicas.replicas import complete_lines
from harness.servers.upstream import Client, ask, backend, eventually, table, world

pytestmark = pytest.mark.processes


async def lines(home: Home, number: int) -> list[dict[str, Any]]:
    """Wait until the log has `number` lines, and return them."""

    async def written() -> list[str]:
        found = complete_lines(home.logs_dir / "access.log").splitlines()
        found = [line for line in found if line.startswith("{")]
        return found if len(found) >= number else []

    found = await eventually(written)
    assert len(found) == number
    return [json.loads(line) for line in found]


async def test_each_request_is_logged_with_its_outcome(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a", 1), access_log=True, max_body_bytes=10)
        quiet = backend("quiet", await w.server("b"))
        split = Split("s", "/s", (Share("iris", 100),))
        await w.gateway.startup(RoutingTable((iris, quiet), (split,)))
        answer = await ask(w.port, '/iris/?secret="1"', "POST", b"{}")
        for target in ("/quiet", "/nothing"):
            await ask(w.port, target)
        await ask(w.port, "/iris", "OPTIONS")
        await ask(w.port, "/iris", "POST", b"x" * 11)
        await ask(w.port, "/s")
        client, queued = Client(w.port), Client(w.port)
        (await client.connect()).write(b"GET /iris?sleep=30 HTTP/1.1\r\nhost: x\r\n\r\n")

        async def inside() -> bool:
            return w.upstreams["a"].live == 1

        await eventually(inside)
        (await queued.connect()).write(b"GET /iris HTTP/1.1\r\nhost: x\r\n\r\n")

        async def waits() -> bool:
            return (await w.gateway.stats())["iris"].queued == 1

        await eventually(waits)
        queued.close()
        await lines(home, 4)
        client.close()
        first, large, through, left, gone = await lines(home, 5)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
        assert first.pop("total_ms") >= 0 and first.pop("queue_ms") >= 0 and first.pop("bytes") > 100
        assert first == {
            "request_id": answer.headers["x-cortex-request-id"], "api": "iris", "method": "POST", "path": "/iris/",
            "status": 200, "client": "127.0.0.1", "termination": "--", "trace_id": "-",
        }  # fmt: skip
        assert (large["status"], through["path"], through["status"]) == (413, "/s", 200)
        assert (left["status"], left["termination"]) == (499, "CQ")
        assert (gone["status"], gone["termination"]) == (499, "CH")


async def test_a_valid_traceparent_is_forwarded_and_its_trace_logged(home: Home) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    valid = [f"00-{trace}-{parent}-01", f"01-{trace}-{parent}-00", f"0a-{trace}-{parent}-01-more"]
    invalid = [
        "", "x", f"00-{trace}-{parent}", f"00-{trace}-{parent}-01-more", f"ff-{trace}-{parent}-01",
        f"00-{'0' * 32}-{parent}-01", f"00-{trace}-{'0' * 16}-01", f"00-{trace.upper()}-{parent}-01",
    ]  # fmt: skip
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"), access_log=True)))
        for value in (*valid, *invalid):
            answer = await ask(w.port, "/iris", traceparent=value)
            assert answer.json()["headers"].get("traceparent", "") == value
        logged = [line["trace_id"] for line in await lines(home, len(valid) + len(invalid))]
        assert logged == [trace] * len(valid) + ["-"] * len(invalid)
        for value in (*valid, *invalid):
            traced = log_id(b"1-a", value.encode())
            assert traced == (f"1-a:{trace}".encode() if value in valid else b"1-a")


async def test_a_held_request_is_logged_once_with_its_total_time(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", holds=True, access_log=True)))
        sent = asyncio.create_task(ask(w.port, "/iris"))

        async def held() -> bool:
            return (await w.gateway.stats())["iris"].requests == 1

        await eventually(held)
        iris = backend("iris", await w.server("a"), holds=True, access_log=True)
        await w.gateway.apply(table(iris))
        answer = await sent
        (line,) = await lines(home, 1)
        assert (line["status"], line["request_id"]) == (200, answer.headers["x-cortex-request-id"])


async def test_special_characters_of_a_path_are_escaped(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(backend("iris", await w.server("a"), endpoint='/"\\%0a', access_log=True)))
        assert (await ask(w.port, '/"\\%0a')).status == 200
        assert [line["path"] for line in await lines(home, 1)] == ['/"\\%0a']


def test_a_large_log_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with log.open("ab") as writer:
        for text in (b"one", b"two"):
            writer.write(text * 10)
            writer.flush()
            rotate(log, 30)
            assert log.stat().st_size == 30
            writer.write(b"!")
            writer.flush()
            rotate(log, 30)
            assert (log.read_bytes(), (tmp_path / "access.log.1").read_bytes()) == (b"", text * 10 + b"!")


async def test_a_large_log_is_rotated_outside_the_event_loop(home: Home) -> None:
    copying: list[int] = []

    def hook(event: str, _: object) -> None:
        if event == "shutil.copyfile":
            copying.append(threading.get_ident())

    async with world(home) as w:
        await w.gateway.startup(table())
        with (home.logs_dir / "access.log").open("r+b") as log:
            log.truncate(ACCESS_LOG_MAX_BYTES + 1)
        sys.addaudithook(hook)  # can't be removed, and has no effect afterwards
        await w.gateway.ensure_running()
        assert copying and threading.get_ident() not in copying
