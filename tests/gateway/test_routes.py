from __future__ import annotations

from dataclasses import replace

import pytest

from cortex.gateway.routes import Backend, RoutingTable, Server

HERE = Server("s", "10.0.0.1:80", 1, near="/s")
HERE_V6 = Server("s6", "[fd00::1]:80", 1, near="/s6")
OLD = Server("o", "10.0.0.1:81", 1)
LOCAL = Server("l", "/l", 1)


@pytest.mark.parametrize(
    ("hosts", "seen"),
    [
        (set(), ["10.0.0.1:80", "[fd00::1]:80", "10.0.0.1:81", "/l"]),
        ({"10.0.0.1"}, ["/s", "[fd00::1]:80", "10.0.0.1:81", "/l"]),
        ({"fd00::1"}, ["10.0.0.1:80", "/s6", "10.0.0.1:81", "/l"]),
        ({"10.0.0.1", "fd00::1", ""}, ["/s", "/s6", "10.0.0.1:81", "/l"]),
        ({"10.0.0.2", "10.0.0.10"}, ["10.0.0.1:80", "[fd00::1]:80", "10.0.0.1:81", "/l"]),
    ],
    ids=["nowhere", "its host", "its host, IPv6", "both", "other hosts"],
)
def test_a_gateway_takes_the_path_of_what_is_on_its_machine(hosts: set[str], seen: list[str]) -> None:
    backend = Backend("a", "/a", 1.0, 1, 1, "", (HERE, HERE_V6, OLD, LOCAL))
    table = RoutingTable((backend,), gateway_secret="s")
    found = table.seen_from(hosts)
    assert [server.socket for server in found.backends[0].servers] == seen
    assert [server.name for server in found.backends[0].servers] == ["s", "s6", "o", "l"]
    assert replace(found, backends=()) == replace(table, backends=())
