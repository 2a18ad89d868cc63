from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cortex.gateway.routes import Backend, RoutingTable, Server

HERE, HERE_V6, THERE = "10.0.0.1", "fd00::1", "10.0.0.2"
FOLDER = Path("/run/s")


def seen(server: Server, *hosts: str) -> str:
    table = RoutingTable((Backend("a", "/a", 1.0, 1, 1, "", (server,)),), gateway_secret="s")
    found = table.seen_from(dict.fromkeys(hosts, FOLDER))
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
def test_a_gateway_takes_the_path_of_what_is_on_its_machine(socket: str, hosts: list[str], is_near: bool) -> None:
    assert seen(Server("s", socket, 3, near="/run/s/x"), *hosts) == ("/run/s/x" if is_near else socket)


@pytest.mark.parametrize(
    "near",
    ["", "/var/run/docker.sock", "/run/s/../x", "/run/s/below/x", "run/s/x", "/run/s/x\n", "/run/s/jo'hn", "/run/s,x"],
)
def test_only_paths_in_the_folder_of_sockets_are_taken(near: str) -> None:
    assert seen(Server("s", f"{HERE}:80", 3, near=near), HERE) == f"{HERE}:80"
