"""The access log: one line of JSON per request to an API that asks for it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

from cortex.gateway.haproxy import ACCESS_LOG_MAX_BYTES, rotate
from cortex.gateway.routes import RoutingTable, Share, Split
from cortex.home import Home
from harness.servers.upstream import Client, ask, backend, eventually, run, table, world


async def lines(home: Home, number: int) -> list[dict[str, Any]]:
    """Return the log once it has so many lines."""

    async def written() -> list[str]:
        found = (home.logs_dir / "access.log").read_text().splitlines()
        found = [line for line in found if line.startswith("{")]
        return found if len(found) >= number else []

    found = await eventually(written)
    assert len(found) == number
    return [json.loads(line) for line in found]


def test_a_line_says_what_became_of_a_request(home: Home) -> None:
    async def scenario() -> None:
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
            client = Client(w.port)
            (await client.connect()).write(b"GET /iris?sleep=30 HTTP/1.1\r\nhost: x\r\n\r\n")

            async def inside() -> bool:
                return w.upstreams["a"].live == 1

            await eventually(inside)
            client.close()
            first, large, through, gone = await lines(home, 4)
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
            assert first.pop("total_ms") >= 0 and first.pop("queue_ms") >= 0 and first.pop("bytes") > 100
            assert first == {
                "request_id": answer.headers["x-cortex-request-id"], "api": "iris", "method": "POST", "path": "/iris/",
                "status": 200, "client": "127.0.0.1", "termination": "--",
            }  # fmt: skip
            assert (large["status"], through["path"], through["status"]) == (413, "/s", 200)
            assert gone["termination"].startswith("C")

    run(scenario())


def test_a_held_request_has_one_line_and_its_whole_time(home: Home) -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_a_path_can_not_break_its_line(home: Home) -> None:
    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table(backend("iris", await w.server("a"), endpoint='/"\\%0a', access_log=True)))
            assert (await ask(w.port, '/"\\%0a')).status == 200
            assert [line["path"] for line in await lines(home, 1)] == ['/"\\%0a']

    run(scenario())


def test_a_log_is_moved_aside_once_it_is_large(tmp_path: Path) -> None:
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


def test_a_large_log_is_copied_beside_the_loop_that_all_else_runs_on(home: Home) -> None:
    copying: list[int] = []

    def hook(event: str, _: object) -> None:
        if event == "shutil.copyfile":
            copying.append(threading.get_ident())

    async def scenario() -> None:
        async with world(home) as w:
            await w.gateway.startup(table())
            with (home.logs_dir / "access.log").open("r+b") as log:
                log.truncate(ACCESS_LOG_MAX_BYTES + 1)
            sys.addaudithook(hook)  # for ever, but nobody looks at it afterwards
            await w.gateway.ensure_running()
            assert copying and threading.get_ident() not in copying

    run(scenario())
