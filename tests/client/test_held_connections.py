from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cortex.client.held_connections import HeldConnections
from cortex.processes.sockets import replace_listener

MANY = 50


def ask(path: Path, number: int) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"%d" % number)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(100), b""))


def test_connections_are_held_until_the_next_process_listens(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    old = replace_listener(path)
    early = socket.socket(socket.AF_UNIX)
    early.connect(str(path))
    with ThreadPoolExecutor(MANY) as pool:
        with HeldConnections(path) as held:
            asked = [pool.submit(ask, path, number) for number in range(MANY)]
            old.setblocking(True)
            kept, _ = old.accept()
            kept.sendall(b"still served")
            assert early.recv(100) == b"still served", "the old process keeps what it has accepted"
            old.close()
            new = replace_listener(path)
            new.setblocking(True)
            assert not any(each.done() for each in asked)
        for _ in range(MANY):
            connection, _ = new.accept()
            with connection:
                received = b"".join(iter(lambda connection=connection: connection.recv(100), b""))
                connection.sendall(b"answer to " + received)
        assert [each.result() for each in asked] == [b"answer to %d" % number for number in range(MANY)]
        held.wait(10)
    for each in (early, kept, new):
        each.close()


def test_connections_end_if_no_other_process_listens(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as client:
        with HeldConnections(path):
            client.connect(str(path))
        assert client.recv(100) == b""
    assert not path.exists()
