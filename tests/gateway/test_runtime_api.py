"""Parsers of HAProxy's output, and the choice of commands."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cortex.gateway.runtime_api import (
    BackendState,
    HaproxyWorkers,
    RuntimeApi,
    ServerState,
    Unresponsive,
    WantedServer,
    escape,
    has_others,
    may_use,
    parse_map,
    parse_stat,
    parse_workers,
    server_commands,
)

IDLE = ServerState(in_flight=0, queued=0, capacity=4, accepts=True)
BUSY = ServerState(in_flight=2, queued=0, capacity=4, accepts=True)
DRAINING = ServerState(in_flight=2, queued=0, capacity=4, accepts=False)
DRAINED = ServerState(in_flight=0, queued=0, capacity=4, accepts=False)
WANTED = WantedServer("unix@/s maxconn 4", 4)
DELETE = ["set server api:a/s state drain", "set server api:a/s state maint", "del server api:a/s"]


@pytest.mark.parametrize(
    ("observed", "wanted", "commands"),
    [
        (
            None,
            WANTED,
            ["add server api:a/s unix@/s maxconn 4", "enable health api:a/s", "enable server api:a/s"],
        ),
        (IDLE, WANTED, []),
        (IDLE, WantedServer("unix@/s maxconn 9", 9), ["set maxconn server api:a/s 9"]),
        (DRAINING, WANTED, ["set server api:a/s state ready"]),
        (BUSY, None, ["set server api:a/s state drain"]),
        (DRAINING, None, []),
        (IDLE, None, DELETE),
        (DRAINED, None, DELETE),
        (None, None, []),
    ],
)
def test_commands_bring_a_server_to_its_wanted_state(
    observed: ServerState | None, wanted: WantedServer | None, commands: list[str]
) -> None:
    state = {"api:a": BackendState(servers={"s": observed} if observed else {})}
    want = {"api:a": {"s": wanted} if wanted else {}}
    assert server_commands(state, want, "api:") == commands
    assert has_others(state, want, "api:") == (observed is not None and wanted is None)


def test_backends_without_the_prefix_are_not_changed() -> None:
    state = {"cortex-successor": BackendState(servers={"successor": IDLE})}
    assert server_commands(state, {"api:new": {"s": WANTED}}, "api:") == []


@pytest.mark.parametrize(
    ("old", "requests", "server", "expected"),
    [
        (False, 0, DRAINED, True),  # the current worker still has it
        (True, 0, IDLE, False),
        (True, 2, BUSY, True),
        (True, 1, IDLE, True),  # something in the backend is not in a server yet
    ],
)
def test_an_old_worker_may_use_a_server_while_its_backend_has_requests(
    old: bool, requests: int, server: ServerState, expected: bool
) -> None:
    assert may_use(old, {"api:a": BackendState(requests=requests, servers={"s": server})}, "s") is expected


def test_a_worker_without_the_server_never_uses_it() -> None:
    assert not may_use(False, {"api:a": BackendState(requests=5)}, "s")


def test_current_and_old_workers_are_parsed() -> None:
    text = (
        "#<PID>          <type>          <reloads>       <uptime>        <version>      \n"
        "10              master          2 [failed: 0]   0d00h08m35s     2.8.25-5cf5d0683\n"
        "# workers\n13              worker          0               0d00h00m52s     2.8.25\n"
        "# old workers\n11              worker          2               0d00h08m        2.8.25\n"
        "12              worker          1               0d00h04m        2.8.25\n# programs\n\n"
    )
    assert parse_workers(text) == HaproxyWorkers(13, (11, 12))
    assert parse_workers("") == HaproxyWorkers(None, ())


def test_statistics_are_parsed_by_column_name() -> None:
    text = (
        "# pxname,svname,qcur,scur,slim,status,stot,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,hrsp_5xx,hrsp_other,"
        "qtime,ctime,rtime,\n"
        "api:a,cortex-hold,0,3,,MAINT,9,0,4,0,0,1,0,,,,\n"
        "api:a,s,0,2,4,no check,9,,,,,,,,,,\napi:a,t,0,0,3,MAINT,0,,,,,,,,,,\n"
        "api:a,BACKEND,5,10,100,UP,9,0,12,0,1,3,6,4,1,30,\n\n"
    )
    assert parse_stat(text) == {
        "api:a": BackendState(
            queued=5,
            requests=7,
            average_ms=35.0,
            responses={0: 5, 1: 0, 2: 8, 3: 0, 4: 1, 5: 2},  # one of those held went away
            servers={"s": BUSY, "t": ServerState(in_flight=0, queued=0, capacity=3, accepts=False)},
        )
    }


def test_map_values_keep_their_spaces() -> None:
    assert parse_map("0x1f api:a why  not \n0x2e api:b x\n\n") == {"api:a": "why  not ", "api:b": "x"}


def test_special_characters_are_escaped() -> None:
    assert escape(r'a b;c\n"#<<') == r"a\ b\;c\\n\"\#\<\<"


async def test_the_error_of_a_gateway_that_does_not_answer_names_the_timeout(tmp_path: Path) -> None:
    silent = await asyncio.start_unix_server(lambda reader, writer: None, tmp_path / "s")

    with pytest.raises(Unresponsive, match=r"does not answer on .*/s: timed out"):
        await RuntimeApi(tmp_path / "s").workers()
    silent.close()
