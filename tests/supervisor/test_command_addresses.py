"""The address at which a command listens: another program may listen at the port first, and the address may change."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.lifecycle import ProcessState
from harness.replicas.applications import FROM_GATEWAY
from harness.replicas.commands import running_command
from harness.replicas.replicas import Answer, Replica
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

#: Listens at the host in the file `host`, and again whenever that changes; at "nowhere" it closes its socket.
MOVES = """
    import encodings.idna, http.server, os, socket, sys, threading, time

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", "3")
            self.end_headers()
            self.wfile.write(b"own")
        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

    port = sys.argv[1]
    path = os.environ["SHARED_FOLDER"] + "/host"
    print("port", port, flush=True)
    server, present = None, "nowhere"
    while True:
        try:
            with open(path) as file:
                host = file.read()
        except OSError:
            host = ""
        if host and host != present:
            present = host
            if server is not None:
                server.shutdown()
                server.server_close()
                server = None
            if host != "nowhere":
                Server.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
                server = Server((host, int(port)), Answers)
                threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            print("at", host, flush=True)
        time.sleep(0.01)
"""
#: Listens as another user, if it may become one, and writes what it receives, one connection per line.
STRANGER = """
import os, socket, sys
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
print("listens", flush=True)
while True:
    connection = listener.accept()[0]
    received = connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 5\\r\\n\\r\\ntaken")
    connection.close()
    if received:
        print("received", received, flush=True)
"""


def move(replica: Replica, host: str) -> None:
    """Make the server listen at another host."""
    before = replica.log().count("o at ")
    path = Path(replica.spec.run_dir) / "host"
    path.with_suffix(".new").write_text(host)
    path.with_suffix(".new").rename(path)
    wait_until(lambda: replica.log().count("o at ") > before, message=replica.log())


def port_of(replica: Replica) -> str:
    return wait_until(lambda: re.findall(r"o port (\d+)", replica.log()), PATIENCE_S)[0]


@contextlib.contextmanager
def stranger(host: str, port: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run another program that listens at an address, and check at the end that it has received nothing."""
    with subprocess.Popen([sys.executable, "-c", STRANGER, host, port], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        try:
            yield process
        finally:
            process.kill()
            assert process.stdout.read() == b""


def ask(replica: Replica) -> Answer:
    return replica.request(path="/own/x", method="GET", headers=FROM_GATEWAY | {"x-cortex-endpoint": "/own"})


@pytest.mark.parametrize(("readiness", "theirs", "ours"), [(None, "::1", "127.0.0.1"), ("/health", "127.0.0.1", "::1")])
def test_a_program_that_listens_at_the_port_before_the_command_gets_nothing(
    theirs: str, ours: str, readiness: str | None
) -> None:
    with running_command(source=MOVES, readiness=readiness) as replica, stranger(theirs, port_of(replica)):
        waits_for = wait_until(lambda: replica.status().processes[0].waits_for, PATIENCE_S)
        assert waits_for.endswith(f"a program that it did not start listens there, at {theirs}")
        assert replica.status().processes[0].state is ProcessState.STARTING
        move(replica, ours)
        replica.wait_ready()
        assert ask(replica).body == b"own"


def test_a_program_that_takes_the_address_of_a_command_gets_nothing() -> None:
    with running_command(source=MOVES, timeout_s=2.0) as replica:
        port = port_of(replica)
        move(replica, "127.0.0.1")
        replica.wait_ready()
        move(replica, "nowhere")
        with stranger("127.0.0.1", port):
            answer = ask(replica)
            assert answer.status == 503
            assert "accepts no connection" in answer.json["error"]
            move(replica, "::1")
            assert ask(replica).body == b"own"


def test_an_address_that_changed_is_found_again() -> None:
    with running_command(source=MOVES) as replica:
        for host in ("::1", "127.0.0.1", "0.0.0.0", "::1", "::"):
            move(replica, host)
            replica.wait_ready()
            assert ask(replica).body == b"own", host


@pytest.mark.long
def test_a_command_that_listens_nowhere_is_not_ready_until_it_listens_again() -> None:
    with running_command(source=MOVES) as replica:
        move(replica, "127.0.0.1")
        replica.wait_ready()
        move(replica, "nowhere")
        (process,) = replica.wait_state(ProcessState.STARTING).processes
        assert process.failure is not None
        assert process.failure.message.startswith("the command is not ready: it listens neither at the port $PORT")
        assert process.restarts == 0
        move(replica, "127.0.0.1")
        assert replica.wait_ready().processes[0].failure is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change its user")
def test_a_command_that_changes_its_user_serves() -> None:
    source = MOVES.replace("    port = sys", "    os.setresgid(1, 1, 1); os.setresuid(1, 1, 1)\n    port = sys")
    with running_command(source=source) as replica:
        Path(replica.spec.run_dir).chmod(0o755)
        move(replica, "127.0.0.1")
        replica.wait_ready()
        assert ask(replica).body == b"own"
