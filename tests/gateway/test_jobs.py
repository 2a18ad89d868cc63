"""APIs that run jobs: the gateway sends all requests below their endpoint to the operator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cortex.errors import GatewayError
from cortex.gateway.backends import GatewaySockets
from cortex.gateway.config import GatewaySettings, render
from cortex.gateway.routes import ApiBackend, RoutingTable
from cortex.home import Home
from harness.ports import free_port
from harness.servers.upstream import Client, World, ask, backend, eventually, table, world

pytestmark = pytest.mark.processes

AWAY = "the operator is not running; jobs and workloads can't be submitted, queried or stopped now"
JOB = "68ad3f6c5cbb5c00"


def jobs(home: Home, name: str = "sum", **settings: object) -> ApiBackend:
    return backend(name, jobs_socket=str(home.jobs_socket), **settings)


async def started(w: World, *others: ApiBackend, **settings: object) -> None:
    """Start a gateway for a batch API, with an echo server in place of the operator."""
    await w.server("jobs")
    await w.gateway.startup(table(jobs(w.home, **settings), *others))


@pytest.mark.parametrize(
    ("endpoint", "paths"),
    [
        ("/sum", {"/sum": None, "/sum/": None, "/sum?jobID=1": None, f"/sum/{JOB}": JOB, "/sum/info": "info"}),
        ("/a/b.c-d", {f"/a/b.c-d/{JOB}?x=/y": JOB, "/a/b.c-d/%20x": "%20x"}),
        ("/", {"/": None, f"/{JOB}": JOB}),
    ],
)
async def test_the_operator_receives_the_api_and_job_of_the_path(
    home: Home, endpoint: str, paths: dict[str, str | None]
) -> None:
    async with world(home) as w:
        await started(w, endpoint=endpoint)
        for path, job in paths.items():
            forged = {"x-cortex-api": "other", "X-Cortex-Job": "other", "x-cortex-request-id": "other"}
            answer = await ask(w.port, path, **forged)
            seen = answer.json()
            assert (answer.status, seen["server"], seen["url"]) == (200, "jobs", path)
            assert (seen["headers"]["x-cortex-api"], seen["headers"].get("x-cortex-job")) == ("sum", job)
            assert seen["headers"]["x-cortex-request-id"] == answer.headers["x-cortex-request-id"] != "other"


async def test_an_own_endpoint_precedes_the_path_of_a_job(home: Home) -> None:
    async with world(home) as w:
        await started(w, backend("inner", await w.server("a"), endpoint="/sum/inner"))
        assert (await ask(w.port, "/sum/inner")).json()["server"] == "a"
        assert (await ask(w.port, "/sum/inner/")).json()["server"] == "a"
        assert (await ask(w.port, "/sum/other")).json()["headers"]["x-cortex-job"] == "other"


async def test_paths_that_are_neither_endpoint_nor_job_are_404(home: Home) -> None:
    async with world(home) as w:
        await started(w, backend("inner", await w.server("a")))
        for path in ("/sum/x/y", "/sum//", "/summary", "/inner/x"):
            answer = await ask(w.port, path)
            assert (answer.status, answer.json()["error"]) == (404, f"no API has the path {path}")


async def test_a_body_larger_than_the_buffers_is_streamed(home: Home) -> None:
    async with world(home) as w:
        await started(w, max_body_bytes=1000)
        client = Client(w.port)
        writer = await client.connect()
        writer.write(b"POST /sum HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"x" * 1024 * 1024
        for _ in range(8):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()

        async def arrives() -> bool:
            return any(each._body for each in w.upstreams["jobs"].connections if hasattr(each, "_body"))

        assert await eventually(arrives)  # while the client is still sending
        writer.write(b"0\r\n\r\n")
        assert (await client.answer()).json()["body"] == 8 * len(piece)
        client.close()


async def test_without_an_operator_requests_are_refused_with_503(home: Home) -> None:
    async with world(home) as w:
        await w.gateway.startup(table(jobs(home), backend("iris", await w.server("a"))))
        answer = await ask(w.port, "/sum", "POST", b"{}")
        body = answer.json()
        assert (answer.status, body["error"], body["message"]) == (503, AWAY, AWAY)
        assert body["kind"] == "operator_unavailable"
        assert body["request_id"] == answer.headers["x-cortex-request-id"]
        assert answer.headers["retry-after"] == "1"
        assert (await ask(w.port, "/iris")).status == 200


async def test_too_many_open_requests_have_an_error_of_their_own(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex.gateway.backends._JOBS_CONNECTIONS", 2)
    monkeypatch.setattr("cortex.gateway.backends._JOBS_QUEUE_S", 0.2)
    async with world(home) as w:
        await started(w)
        w.upstreams["jobs"].mute = True
        open_ones = [asyncio.create_task(ask(w.port, f"/sum/{JOB}")) for _ in range(2)]

        async def are_open() -> bool:
            return w.upstreams["jobs"].live == 2

        await eventually(are_open)
        answer = await ask(w.port, "/sum", "POST", b"{}")
        told = "2 requests are open at this endpoint already; try again once some of them are answered"
        assert (answer.status, answer.json()["kind"], answer.json()["error"]) == (503, "busy", told)
        assert answer.headers["retry-after"] == "1"
        await w.upstreams["jobs"].stop()
        await asyncio.gather(*open_ones)
        assert (await ask(w.port, "/sum")).json()["error"] == AWAY


async def test_a_restarted_operator_is_used_at_once_without_a_reload(home: Home) -> None:
    async with world(home) as w:
        await started(w)
        assert (await ask(w.port, "/sum")).status == 200
        await w.upstreams.pop("jobs").stop()
        home.jobs_socket.unlink(missing_ok=True)
        waiting = asyncio.create_task(ask(w.port, "/sum"))
        await w.server("jobs")  # a caller in between is kept for a moment, or told
        assert (await waiting).status in (200, 503)
        assert (await ask(w.port, "/sum")).status == 200


async def test_an_operator_that_stops_before_its_response_is_a_502(home: Home) -> None:
    async with world(home) as w:
        await started(w)
        assert (await ask(w.port, "/sum")).status == 200  # its connection to the operator must not be used again
        answer = await ask(w.port, "/sum?close=1", "POST", b"{}")
        assert answer.status == 502
        assert "check for the job before you submit it again" in answer.json()["message"]


async def test_adding_and_removing_a_batch_api_does_not_affect_others(home: Home) -> None:
    async with world(home) as w:
        iris = backend("iris", await w.server("a"))
        await w.server("jobs")
        await w.gateway.startup(table(iris))
        assert (await ask(w.port, "/sum")).status == 404
        await w.gateway.apply(table(iris, jobs(home)))
        assert (await ask(w.port, f"/sum/{JOB}")).json()["headers"]["x-cortex-job"] == JOB
        await w.gateway.ensure_running()
        assert (await ask(w.port, "/sum")).json()["server"] == "jobs"
        stats = await w.gateway.stats()
        assert (stats["sum"].responses[2], stats["sum"].in_flight, set(stats)) == (2, 0, {"iris", "sum"})
        await w.gateway.apply(table(iris))
        assert (await ask(w.port, "/sum")).status == 404
        assert (await ask(w.port, "/iris")).json()["server"] == "a"


async def test_the_operator_notices_an_aborted_upload(home: Home) -> None:
    async with world(home) as w:
        await started(w)
        client = Client(w.port)
        writer = await client.connect()
        writer.write(b"POST /sum HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()

        async def began() -> bool:
            return w.upstreams["jobs"].live == 1

        await eventually(began)
        client.close()

        async def aborted() -> bool:
            return w.upstreams["jobs"].aborted == 1

        await eventually(aborted)


@pytest.mark.parametrize("path", ["relative", "/with'quote", "/line\nbreak", "/" + "x" * 200, "/$HOME"])
def test_a_socket_path_with_special_characters_is_refused(path: str) -> None:
    made = ApiBackend("sum", "/sum", 1, 1, 1, "", jobs_socket=path)
    with pytest.raises(GatewayError, match="socket path"):
        render(
            RoutingTable((made,)),
            GatewaySettings(port=free_port()),
            GatewaySockets("/tmp/c/g", "/tmp/c/s", "/tmp/c/i", "/tmp/c/r"),
        )


def test_a_table_without_batch_apis_has_no_rule_for_jobs(tmp_path: Path) -> None:
    sockets = GatewaySockets(str(tmp_path / "g"), str(tmp_path / "s"), str(tmp_path / "i"), str(tmp_path / "r"))
    assert "jobs.map" not in render(RoutingTable((backend("iris"),)), GatewaySettings(), sockets).config
