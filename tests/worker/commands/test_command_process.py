"""Arguments, environment and port of a command."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

import pytest

from cortex.errors import UserError
from cortex.worker.commands.command_process import expand, process_environment, reserve_port
from cortex.worker.spec import ReplicaSpec
from harness.replicas.specs import replica_spec

SPEC = replica_spec(
    path="",
    python="/env/bin/python",
    sockets=("/s/a-0", "/s/a-1"),
    control_socket="/s/a-c",
    type="command",
    command=("server",),
    endpoint="/own",
)


@pytest.mark.parametrize(
    ("argument", "expanded"),
    [
        ("--port=$PORT", "--port=20001"),
        ("${PORT}0", "200010"),
        ("$UNKNOWN", "$UNKNOWN"),
        ("$$PORT", "$PORT"),
        ("100$", "100$"),
        ("$(date)", "$(date)"),
        ("", ""),
    ],
)
def test_variables_in_arguments_are_replaced(argument: str, expanded: str) -> None:
    assert expand([argument], {"PORT": "20001"}) == [expanded]


def test_a_command_gets_its_address_and_the_programs_of_the_project() -> None:
    environ = process_environment({"PATH": "/bin", "A": "b", "PORT": "80"}, SPEC, 1, 20001)
    assert environ == {
        "PATH": f"/env/bin{os.pathsep}/bin",
        "A": "b",
        "PYTHONUNBUFFERED": "1",
        "CORTEX_SOCKET": "/s/a-1s",
        "CORTEX_ENDPOINT": "/own",
        "PORT": "20001",
    }


def test_only_commands_have_a_second_socket() -> None:
    assert SPEC.command_sockets == ("/s/a-0s", "/s/a-1s")
    assert ReplicaSpec.from_json(SPEC.to_json()) == SPEC


def test_two_processes_never_get_the_same_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = tmp_path / "ports"
    port, lock = reserve_port(locks)
    monkeypatch.setattr("cortex.worker.commands.command_process._PORTS", range(port, port + 1))
    with pytest.raises(UserError, match="no port between"):
        reserve_port(locks)
    os.close(lock)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError):  # of another program
        reserve_port(locks)
    again, lock = reserve_port(locks)
    os.close(lock)
    assert again == port


def test_no_other_user_can_see_which_ports_are_reserved(tmp_path: Path) -> None:
    port, lock = reserve_port(tmp_path / "ports")
    assert stat.S_IMODE((tmp_path / "ports").stat().st_mode) == 0o700
    for table in ("unix", "tcp", "tcp6"):
        shown = Path(f"/proc/net/{table}").read_text()
        assert f"cortex-port-{port}" not in shown
        assert not re.search(f"(0100007F|0{{8,}}):{port:04X} ", shown)  # other machines may use the port, too
    os.close(lock)
