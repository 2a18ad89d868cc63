"""Fuzz: malformed HTTP and bodies reach the gateway while good requests are answered."""

from __future__ import annotations

import os
import random
import socket
import threading
import time

import pytest

from harness.installations.installation import ECHO_CONFIG, ECHO_SOURCE, Installation, served, write_project
from harness.servers import malformed_http

pytestmark = pytest.mark.long

CLIENTS, SECONDS, GOOD_LIMIT_S = 8, 20.0, 10.0
#: The gateway sends no answer to an unfinished request; the fuzzer does not wait for one.
PATIENCE_S = 0.3


def test_malformed_requests_end_no_process_and_delay_no_other_request(
    cortex: Installation, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cortex.cortex("deploy", write_project(tmp_path_factory.mktemp("echo"), ECHO_SOURCE, ECHO_CONFIG))
    assert served(cortex, "/echo", {"a": 1}).json == {"a": 1}
    pids = cortex.pids("echo")
    seed = os.environ.get("FUZZ_SEED") or str(random.SystemRandom().randrange(2**32))
    deadline = time.monotonic() + SECONDS

    def attack(client: int) -> None:
        for number in range(client, 10**9, CLIENTS):
            if time.monotonic() > deadline:
                return
            _send(cortex.gateway_port, malformed_http.request(random.Random(f"{seed}/{number}"), "/echo"))

    clients = [threading.Thread(target=attack, args=(client,), daemon=True) for client in range(CLIENTS)]
    for client in clients:
        client.start()
    while time.monotonic() < deadline:
        reply = cortex.post("/echo", {"a": 1})
        assert (reply.status, reply.body) == (200, b'{"a":1}'), f"FUZZ_SEED={seed}"
        assert reply.seconds < GOOD_LIMIT_S, f"FUZZ_SEED={seed}"
    for client in clients:
        client.join()
    assert cortex.pids("echo") == pids, f"FUZZ_SEED={seed}"


def _send(port: int, data: bytes) -> None:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=GOOD_LIMIT_S) as connection:
            connection.sendall(data)
            connection.settimeout(PATIENCE_S)
            connection.recv(65536)
    except OSError:
        pass
