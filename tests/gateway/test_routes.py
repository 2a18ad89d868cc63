"""The routing table: local sockets of servers, and the JSON form."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.gateway.routes import (
    ApiBackend,
    ApiKey,
    RoutingTable,
    Server,
    Share,
    Split,
    table_from_json,
    table_to_json,
)

HERE, HERE_V6, THERE = "10.0.0.1", "fd00::1", "10.0.0.2"
FOLDER = Path("/run/s")
TABLE = RoutingTable((ApiBackend("a", "/a", 1.0, 1, 1, "", (Server("s", "/s", 1),)),), keys=(ApiKey("k", "0" * 64),))
tables = st.builds(
    RoutingTable,
    st.lists(
        st.builds(ApiBackend, timeout_s=st.floats(allow_nan=False), servers=st.lists(st.builds(Server)).map(tuple))
    ).map(tuple),
    st.lists(st.builds(Split, shares=st.lists(st.builds(Share)).map(tuple), shadow=st.none() | st.builds(Share))).map(
        tuple
    ),
    st.lists(st.builds(ApiKey, apis=st.lists(st.text()).map(tuple))).map(tuple),
    st.text(),
)


def socket_for(server: Server, *hosts: str) -> str:
    table = RoutingTable((ApiBackend("a", "/a", 1.0, 1, 1, "", (server,)),), gateway_secret="s")
    found = table.with_local_sockets(dict.fromkeys(hosts, FOLDER))
    [after] = found.backends[0].servers
    assert replace(after, socket=server.socket, near=server.near) == server
    assert replace(found, backends=table.backends) == table
    return after.socket


@pytest.mark.parametrize(
    ("socket", "hosts", "is_near"),
    [
        (f"{HERE}:80", [HERE], True),
        (f"{HERE}:80", [THERE, HERE], True),
        (f"[{HERE_V6}]:80", [HERE, HERE_V6], True),
        (f"{HERE}:80", [], False),
        (f"{HERE}:80", [THERE, "10.0.0.11"], False),
        (f"[{HERE_V6}]:80", [HERE], False),
        ("/run/s/local", [HERE], False),
    ],
)
def test_servers_on_the_same_machine_use_their_unix_socket(socket: str, hosts: list[str], is_near: bool) -> None:
    assert socket_for(Server("s", socket, 3, near="/run/s/x"), *hosts) == ("/run/s/x" if is_near else socket)


@pytest.mark.parametrize(
    "near",
    ["", "/var/run/docker.sock", "/run/s/../x", "/run/s/below/x", "run/s/x", "/run/s/x\n", "/run/s/jo'hn", "/run/s,x"],
)
def test_paths_outside_the_sockets_folder_are_ignored(near: str) -> None:
    assert socket_for(Server("s", f"{HERE}:80", 3, near=near), HERE) == f"{HERE}:80"


@given(tables)
def test_a_table_survives_the_round_trip_through_json(table: RoutingTable) -> None:
    assert table_from_json(json.loads(json.dumps(table_to_json(table)))) == table


@pytest.mark.parametrize(
    "change",
    [
        {"doors": []},
        {"backends": [{"api": "a"}]},
        {"backends": [{**table_to_json(TABLE)["backends"][0], "needs_fingerprint": True}]},
        {"keys": [{"id": "a", "digest": "", "until": 1}]},
        {"splits": None},
        {"splits": [[]]},
    ],
    ids=lambda change: json.dumps(change)[:20],
)
def test_unknown_fields_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        table_from_json({**table_to_json(TABLE), **change})


def test_fields_since_the_first_version_are_left_out_at_their_defaults() -> None:
    first = {
        RoutingTable: {"backends", "splits", "keys", "gateway_secret"},
        ApiBackend: {"servers", "jobs_socket", "holds", "access_log", "needs_key"},
        Split: {"shadow", "needs_key"},
        Server: {"near"},
    }
    for kind, names in first.items():
        others = [each for each in fields(kind) if each.default is not MISSING and each.name not in names]
        assert [each.name for each in others if "is_newer" not in each.metadata] == []
