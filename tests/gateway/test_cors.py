"""CORS in a real HAProxy: which origins may read which responses, and changes without a reload."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from test_config import SOCKETS

from cortex.errors import GatewayError
from cortex.gateway.config import GatewaySettings, render
from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import ApiBackend, Cors, RoutingTable, Server, Share, Split, table_from_json, table_to_json
from cortex.home import Home
from harness.servers.upstream import Answer, Client, World, ask, backend, world

pytestmark = pytest.mark.processes

PAGE, OTHER = "https://page.example", "http://other.example:3000"
ONLY_PAGE = Cors((PAGE,), ("Content-Type", "X-Tenant"))


async def started(w: World, cors: Cors | None = ONLY_PAGE, *splits: Split, **options: object) -> RoutingTable:
    iris = backend("iris", await w.server("a"), cors=cors, **options)
    made = RoutingTable((iris, backend("open", await w.server("o")), backend("none", cors=cors)), splits)
    await w.gateway.startup(made)
    return made


def permissions(answer: Answer) -> dict[str, str]:
    names = ("access-control-", "vary")
    return {name: value for name, value in answer.headers.items() if name.startswith(names)}


async def allows(w: World, path: str, origin: str) -> str | None:
    return (await ask(w.port, path, origin=origin)).headers.get("access-control-allow-origin")


async def test_only_listed_origins_may_read_responses(home: Home) -> None:
    async with world(home) as w:
        await started(w)
        for path in ("/iris", "/iris/", "/iris/info", "/iris?x=1", "/none"):  # the last has no replica: 503
            allowed = {"access-control-allow-origin": PAGE, "vary": "Origin"}
            assert permissions(await ask(w.port, path, origin=PAGE)) == allowed
            for refused in (OTHER, "null", "*", f"{PAGE}.evil.example", f"{PAGE}:8443", f"{PAGE}, {PAGE}", "", "'"):
                assert permissions(await ask(w.port, path, origin=refused)) == {"vary": "Origin"}
            assert permissions(await ask(w.port, path)) == {"vary": "Origin"}
        for path in ("/open", "/livez", "/nowhere"):
            assert permissions(await ask(w.port, path, origin=OTHER)) == {"access-control-allow-origin": "*"}


async def test_a_preflight_request_is_answered_by_the_rules_of_its_api(home: Home) -> None:
    async def preflight(w: World, path: str, origin: str) -> dict[str, str]:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a,x-b"}
        answer = await ask(w.port, path, "OPTIONS", origin=origin, **asked)
        assert answer.status == 204
        return {name.removeprefix("access-control-"): value for name, value in permissions(answer).items()}

    async with world(home) as w:
        made = await started(w)
        answer = await preflight(w, "/iris", PAGE)
        assert answer.pop("allow-methods") == "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
        assert answer == {
            "allow-origin": PAGE, "allow-headers": "Content-Type, X-Tenant", "max-age": "86400", "vary": "Origin"
        }  # fmt: skip
        assert await preflight(w, "/iris", OTHER) == {"vary": "Origin"}
        assert (await preflight(w, "/open", OTHER))["allow-headers"] == "*, Authorization"
        any_header = replace(made.backends[0], cors=Cors((PAGE,), credentials=True))
        await w.gateway.apply(replace(made, backends=(any_header, *made.backends[1:])))
        answer = await preflight(w, "/iris", PAGE)
        assert (answer["allow-headers"], answer["allow-credentials"]) == ("x-a,x-b", "true")


async def test_every_origin_can_be_allowed_with_a_list_of_headers(home: Home) -> None:
    async with world(home) as w:
        await started(w, Cors(("*",), ("Content-Type",)))
        assert permissions(await ask(w.port, "/iris", origin=OTHER)) == {"access-control-allow-origin": "*"}
        answer = await ask(w.port, "/iris", "OPTIONS", origin=OTHER)
        assert answer.headers["access-control-allow-headers"] == "Content-Type"


async def test_changed_origins_need_no_reload(home: Home) -> None:
    async with world(home) as w:
        made = await started(w)
        client = Client(w.port)
        before = await client.get("/iris", origin=OTHER)
        assert permissions(before) == {"vary": "Origin"}
        pid = (await w.gateway._runtime.workers()).current
        for cors, expected in (
            (Cors((OTHER,)), [None, OTHER]),
            (Cors((OTHER, PAGE)), [PAGE, OTHER]),
            (Cors(("*",)), ["*", "*"]),
            (ONLY_PAGE, [PAGE, None]),
        ):
            changed = replace(made.backends[0], cors=cors)
            await w.gateway.apply(replace(made, backends=(changed, *made.backends[1:])))
            answers = [await client.get("/iris", origin=origin) for origin in (PAGE, OTHER)]
            shown = [answer.headers.get("access-control-allow-origin") for answer in answers]
            assert shown == expected
        assert (await w.gateway._runtime.workers()).current == pid
        assert client.connects == 1
        client.close()


async def test_a_connection_from_before_a_reload_follows_the_new_rules(home: Home) -> None:
    async with world(home) as w:
        made = await started(w)
        unrestricted = tuple(replace(each, cors=None) for each in made.backends)
        await w.gateway.apply(replace(made, backends=unrestricted))
        client, preflight = Client(w.port), Client(w.port)
        assert (await client.get("/iris", origin=OTHER)).headers["access-control-allow-origin"] == "*"
        await preflight.get("/iris")
        await w.gateway.apply(made)
        assert permissions(await client.get("/iris", origin=OTHER)) == {"vary": "Origin"}
        answer = await preflight.request("OPTIONS", "/iris", b"", {"origin": OTHER})
        assert permissions(answer) == {"vary": "Origin"}
        client.close()
        preflight.close()


async def test_a_splitter_has_its_own_rules_or_those_of_its_apis(home: Home) -> None:
    async with world(home) as w:
        shares = (Share("open", 50), Share("iris", 50))
        own, inherited = Split("own", "/own", shares, cors=Cors((OTHER,))), Split("ab", "/ab", shares)
        await started(w, ONLY_PAGE, own, inherited, Split("all", "/all", (Share("open", 100),)))
        assert [await allows(w, "/own", origin) for origin in (PAGE, OTHER)] == [None, OTHER]
        assert [await allows(w, "/ab", origin) for origin in (PAGE, OTHER)] == [PAGE, None]
        assert [await allows(w, "/all", origin) for origin in (PAGE, OTHER)] == ["*", "*"]


async def test_job_endpoints_and_held_requests_have_the_headers(home: Home) -> None:
    async with world(home) as w:
        jobs = await w.server("j")
        sum_ = backend("sum", jobs_socket=jobs.socket, cors=ONLY_PAGE)
        held = backend("held", cors=ONLY_PAGE, holds=True)
        await w.gateway.startup(RoutingTable((held, sum_)))
        for path in ("/sum", "/sum/job-1", "/sum?jobID=1"):
            assert [await allows(w, path, origin) for origin in (PAGE, OTHER)] == [PAGE, None]
        waiting = asyncio.create_task(ask(w.port, "/held", origin=PAGE))
        ready = replace(held, servers=backend("held", await w.server("h")).servers)
        await w.gateway.apply(RoutingTable((ready, sum_)))
        assert permissions(await waiting) == {"access-control-allow-origin": PAGE, "vary": "Origin"}


#: The response of an application with CORS middleware.
OWN = f"header=server-timing:handler;dur=1&header=access-control-allow-origin:{PAGE}"


def application(name: str, *servers: Server, **settings: Any) -> ApiBackend:
    return backend(name, *servers, subpaths=("/",), replica_protocol=Protocol.APPLICATION, **settings)


async def test_an_application_without_rules_decides_about_cors(home: Home) -> None:
    async with world(home) as w:
        app = application("app", await w.server("a"))
        iris = backend("iris", await w.server("i"), endpoint="/app/iris")
        keyed = application("keyed", await w.server("k"), needs_key=True)
        down = application("down")
        ruled = application("ruled", await w.server("r"), cors=Cors((OTHER,)))
        splits = (Split("both", "/both", (Share("app", 100),)), Split("other", "/other", (Share("ruled", 100),)))
        for others in ((), (ruled,)):  # without rules of any API, and with them
            table = RoutingTable((app, down, iris, keyed, *others), splits[: 1 + len(others)])
            await (w.gateway.apply(table) if others else w.gateway.startup(table))
            for path in ("/app", "/app/", "/app/x", "/both", "/both/x"):
                answer = await ask(w.port, f"{path}?{OWN}", "OPTIONS", origin=OTHER)
                assert answer.json()["method"] == "OPTIONS"
                assert permissions(answer) == {"access-control-allow-origin": PAGE}
            assert permissions(await ask(w.port, "/app/x?header=server-timing:a", origin=OTHER)) == {}
            assert await allows(w, "/down", OTHER) == "*"  # an error of the gateway
            for path in ("/app/iris", "/keyed/x"):
                assert (await ask(w.port, path, "OPTIONS", origin=OTHER)).status == 204
                assert await allows(w, path, OTHER) == "*"
        for path in ("/ruled/x", "/other/x"):
            assert (await ask(w.port, path, "OPTIONS", origin=OTHER)).status == 204
            assert await allows(w, f"{path}?{OWN}", OTHER) == OTHER
            assert await allows(w, f"{path}?{OWN}", PAGE) is None


@pytest.mark.parametrize("cors", [Cors(("https://a\nb",)), Cors(("https://a b",)), Cors((PAGE,), ("a\n",))])
def test_text_that_would_break_a_map_is_refused(cors: Cors) -> None:
    with pytest.raises(GatewayError, match="characters"):
        render(RoutingTable((ApiBackend("a", "/a", 1, 1, 1, "", cors=cors),)), GatewaySettings(), SOCKETS)


def test_the_json_form_lacks_the_field_without_rules_for_older_nodes() -> None:
    plain = RoutingTable((ApiBackend("a", "/a", 1, 1, 1, ""),), (Split("b", "/b", (Share("a", 100),)),))
    assert '"cors"' not in json.dumps(table_to_json(plain))
    restricted = replace(plain, backends=(replace(plain.backends[0], cors=ONLY_PAGE),))
    assert table_from_json(json.loads(json.dumps(table_to_json(restricted)))) == restricted
