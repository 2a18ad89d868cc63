"""Real replicas of commands: servers of the user's own that cortex supervises."""

from __future__ import annotations

import os
import signal
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import IncompleteRead
from pathlib import Path

import psutil
import pytest

from cortex.lifecycle import DeathCause, ProcessState
from cortex.supervisor.command_worker_slot import error_line
from harness.replicas.applications import FROM_GATEWAY
from harness.replicas.commands import ON_PORT, ON_SOCKET, SERVER, running_command
from harness.replicas.replicas import Answer, Replica
from harness.wait import PATIENCE_S, has_ended, wait_until

pytestmark = pytest.mark.processes

OF_GATEWAY = FROM_GATEWAY | {"x-cortex-endpoint": "/own"}


def ask(replica: Replica, path: str, method: str = "POST", body: bytes = b"", **headers: str) -> Answer:
    """Send a request below the endpoint."""
    sent = OF_GATEWAY | {name.replace("_", "-"): value for name, value in headers.items()}
    return replica.request(method=method, path=f"/own{path}", body=body, headers=sent)


def in_background(pool: ThreadPoolExecutor, replica: Replica, path: str, body: bytes = b"") -> Future[Answer]:
    """Send a request; return its future once the server has received it."""
    before = replica.log().count("begun")
    future = pool.submit(ask, replica, path, body=body)
    wait_until(lambda: replica.log().count("begun") > before, message=replica.log())
    return future


def unaccepted(replica: Replica) -> int:
    """Return the number of connections that wait for the server at its port."""
    (port,) = {
        each.laddr.port for each in psutil.Process(replica.pid).net_connections("tcp") if each.status == "LISTEN"
    }
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    (found,) = [fields for fields in lines if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"]
    return int(found[4].partition(":")[2], 16)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["Traceback:", "  File x", "ValueError: bad weights"], "ValueError: bad weights"),
        (["Error: no weights", "    at Object.<anonymous> (server.js:1:7)", "", "Node.js v20"], "Error: no weights"),
        (["usage: server PORT"], "usage: server PORT"),
        ([], ""),
    ],
)
def test_the_line_that_names_the_error_is_found(lines: list[str], found: str) -> None:
    assert error_line(lines) == found


@pytest.mark.parametrize("command", [ON_PORT, ON_SOCKET])
def test_requests_reach_a_server_at_its_port_or_its_socket(command: tuple[str, ...]) -> None:
    with running_command(*command, readiness="/health") as replica:
        replica.wait_ready()
        answer = ask(replica, "/v1/chat?stream=1", body=b"hello", x_mine="2", connection="close")
        told = answer.json
        assert (told["method"], told["path"], told["body"]) == ("POST", "/v1/chat?stream=1", "hello")
        assert told["endpoint"] == "/own"
        assert {"x-forwarded-prefix": "/own", "x-mine": "2", "host": "example.com"}.items() <= told["headers"].items()
        assert not {"x-cortex-endpoint", "connection"} & told["headers"].keys()
        assert answer.headers["x-own"] == "1"
        assert "server-timing" in answer.headers
        assert told["pid"] == replica.pid

        assert ask(replica, "/stream").body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert ask(replica, "/until-closed").body == b"until the end"
        assert ask(replica, "/early").body == b"after hints"
        assert ask(replica, "/nothing").status == 204
        assert ask(replica, "/redirect").headers["location"] == "/own/elsewhere?x=1"
        head = ask(replica, "/x", method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        assert ask(replica, "/hang-up").status == 502
        many = ask(replica, "/headers", body=b"1001")
        assert (many.status, "headers; the gateway passes on up to 1000" in many.json["error"]) == (502, True)
        large = os.urandom(3_000_000).hex().encode()
        assert len(ask(replica, "/x", body=large).json["body"]) == len(large)
        wait_until(lambda: "o arguments" in replica.log())


def test_a_server_of_one_connection_at_a_time_is_not_blocked_by_an_idle_one() -> None:
    source = """
        import http.server, sys
        class Answers(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            def do_GET(self):
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"ok")
        http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
    """
    with running_command(source=source, readiness="/") as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        answers = list(pool.map(lambda number: ask(replica, f"/{number}", "GET"), range(8)))
        assert [answer.body for answer in answers] == [b"ok"] * 8


@pytest.mark.long
@pytest.mark.parametrize(("on_disconnect", "seen"), [("cancel", "closed"), ("finish", "open")])
def test_a_server_notices_that_its_client_disconnected_unless_it_may_finish(on_disconnect: str, seen: str) -> None:
    source = """
        import socket, sys
        listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        while True:
            sock = listener.accept()[0]
            if not sock.recv(65536):
                continue
            print("begun", flush=True)
            sock.settimeout(4)
            try:
                print("closed" if not sock.recv(1) else "more", flush=True)
            except TimeoutError:
                print("open", flush=True)
            sock.close()
    """
    with running_command(source=source, on_disconnect=on_disconnect) as replica:
        replica.wait_ready()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(replica.spec.sockets[0])
            sock.sendall(b"GET /own/x HTTP/1.1\r\nhost: a\r\nx-cortex-endpoint: /own\r\n\r\n")
            wait_until(lambda: "o begun" in replica.log())
        wait_until(lambda: f"o {seen}" in replica.log(), message=replica.log())


@pytest.mark.long
def test_a_server_gets_requests_of_another_machine_without_the_secret_of_the_gateway() -> None:
    with running_command(listen_host="127.0.0.1", gateway_secret="s3cret") as replica:
        replica.wait_ready()
        assert "s3cret" not in ask(replica, "/x").body.decode()


@pytest.mark.long
def test_the_prefix_stays_if_the_server_wants_it() -> None:
    with running_command(strip_prefix=False) as replica:
        replica.wait_ready()
        assert ask(replica, "/v1").json["path"] == "/own/v1"
        assert ask(replica, "/v1").json["headers"]["x-forwarded-prefix"] == "/own"


def test_requests_of_a_killed_command_get_the_cause_and_the_next_ones_another_process() -> None:
    with running_command() as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        pid = replica.pid
        child = int(ask(replica, "/spawn").body)
        asked = in_background(pool, replica, "/sleep")
        os.kill(pid, signal.SIGKILL)
        answer = asked.result()
        assert answer.status == 500
        assert answer.json["error"] == "the process that handled this request died: killed (SIGKILL)"
        assert ask(replica, "/x").json["pid"] != pid  # waits for the next process
        wait_until(lambda: has_ended(child))

        error = ask(replica, "/v1/exit").json["error"]
        assert error["message"].endswith("died: exited with code 3")
        assert error["type"] == "server_error"
        death = replica.wait_ready().processes[0].death
        assert death is not None
        assert death.cause is DeathCause.EXITED


def test_a_command_that_exits_at_its_start_is_reported_with_its_last_lines() -> None:
    source = "import sys; sys.exit('the weights are bad')"
    with running_command(sys.executable, "handler.py", source=source) as replica:
        status = replica.wait_state(ProcessState.BACKING_OFF)
        failure = status.processes[0].failure
        assert failure is not None
        assert failure.message == "the command exited with code 1 before it was ready: the weights are bad"
        assert failure.traceback == "the weights are bad"
        answer = ask(replica, "/x")
        assert answer.status == 503
        reason = "the command exited with code 1 before it was ready"
        assert answer.json["error"] == f"no replica is ready: {reason}; `cortex get {replica.spec.api}` shows why"


def test_a_command_that_is_killed_at_its_start_is_reported_with_its_death() -> None:
    source = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with running_command(sys.executable, "handler.py", source=source) as replica:
        (process,) = replica.wait_state(ProcessState.BACKING_OFF).processes
        assert process.failure is not None
        assert process.failure.message == "the command died: killed (SIGKILL) before it was ready"
        assert process.death is not None
        assert process.death.cause is DeathCause.KILLED


@pytest.mark.long
@pytest.mark.parametrize("health", ["/health", "/slow-health"])
def test_a_command_whose_probes_fail_is_not_ready_until_one_succeeds(health: str) -> None:
    source = SERVER.replace('path == "/health"', 'path in ("/health", "/slow-health")').replace(
        'ready = not os.path.exists("unready")',
        """ready = not os.path.exists(os.environ["SHARED_FOLDER"] + "/unready")
                if not ready and path == "/slow-health":
                    time.sleep(600)""",
    )
    with running_command(source=source, readiness=health) as replica, ThreadPoolExecutor() as pool:
        pid = replica.wait_ready().processes[0].pid
        go = Path(replica.spec.run_dir) / "go"
        (Path(replica.spec.run_dir) / "unready").touch()
        (process,) = replica.wait_state(ProcessState.STARTING).processes
        assert process.failure is not None
        problem = f"GET {health} answered 503" if health == "/health" else f"GET {health} had no answer within 5 s"
        assert process.failure.message == f"the command is not ready: {problem}"
        running = in_background(pool, replica, "/wait", str(go).encode())
        (Path(replica.spec.run_dir) / "unready").unlink()
        assert replica.wait_ready().processes[0].failure is None
        go.touch()
        assert running.result().body == b"waited"
        assert replica.pid == pid


@pytest.mark.long
def test_a_command_that_is_busy_with_one_request_stays_ready() -> None:
    source = SERVER.replace("ThreadingHTTPServer", "HTTPServer")
    with running_command(source=source, readiness="/health") as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        go = Path(replica.spec.run_dir) / "go"
        running = in_background(pool, replica, "/wait", str(go).encode())
        wait_until(lambda: unaccepted(replica) >= 4, PATIENCE_S)  # probes, of which three would end readiness
        assert replica.status().is_ready
        assert "does not answer" not in replica.log()
        go.touch()
        assert running.result().body == b"waited"


@pytest.mark.long
def test_a_program_that_does_not_exist_is_reported() -> None:
    with running_command("no-such-server") as replica:
        failure = replica.wait_state(ProcessState.BACKING_OFF).processes[0].failure
        assert failure is not None
        assert failure.message == "can't run no-such-server: No such file or directory"


def test_a_command_that_listens_elsewhere_fails_with_the_address() -> None:
    source = """
        import socket, time
        sock = socket.create_server(("127.0.0.1", 0))
        time.sleep(600)
    """
    with running_command(sys.executable, "handler.py", source=source, start_timeout_s=5) as replica:
        failure = replica.wait_state(ProcessState.BACKING_OFF).processes[0].failure
        assert failure is not None
        assert "was not ready within 5 s: it listens neither at the port $PORT" in failure.message
        assert "it listens at 127.0.0.1:" in failure.message


def test_a_command_that_listens_elsewhere_says_so_while_it_is_waited_for() -> None:
    source = """
        import os, socket, sys, time
        sock = socket.create_server(("127.0.0.1", 0))
        while not os.path.exists(os.environ["SHARED_FOLDER"] + "/go"):
            time.sleep(0.01)
        right = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        time.sleep(600)
    """
    with running_command(source=source) as replica:
        waits_for = wait_until(lambda: replica.status().processes[0].waits_for, PATIENCE_S)
        assert waits_for.startswith("the command is not ready: it listens neither at the port $PORT")
        assert "it listens at 127.0.0.1:" in waits_for
        (Path(replica.spec.run_dir) / "go").touch()
        assert not replica.wait_ready().processes[0].waits_for


def test_requests_are_finished_before_a_command_is_stopped(tmp_path: Path) -> None:
    with running_command() as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        pid = replica.pid
        asked = in_background(pool, replica, "/wait", str(tmp_path / "go").encode())
        replica.command(command="stop", drain_s=30)
        replica.wait_state(ProcessState.STOPPING)
        (tmp_path / "go").touch()
        assert asked.result().body == b"waited"
        replica.process.wait(PATIENCE_S)
        wait_until(lambda: has_ended(pid))


#: At SIGTERM, it closes its connections at once, and takes a while to end.
CLOSES_EARLY = """
    import http.server, signal, sys, threading, time

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            print("begun", flush=True)
            stopping.wait()

    def stop(number, frame):
        stopping.set()
        time.sleep(1)
        sys.exit()

    stopping = threading.Event()
    signal.signal(signal.SIGTERM, stop)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


@pytest.mark.parametrize("source", [SERVER, CLOSES_EARLY], ids=["waits", "closes early"])
def test_requests_that_outlast_the_stop_of_a_command_are_answered_with_the_reason(source: str) -> None:
    with running_command(source=source) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        asked = in_background(pool, replica, "/sleep")
        replica.command(command="stop", drain_s=0)
        answer = asked.result(PATIENCE_S)
        reason = "the process that handled this request died: stopped before the call was finished"
        assert (answer.status, answer.json["error"]) == (500, reason)


@pytest.mark.long
def test_a_command_that_ignores_sigterm_is_killed() -> None:
    with running_command(*ON_PORT, "--deaf") as replica:
        replica.wait_ready()
        pid = replica.pid
        replica.command(command="stop", drain_s=0)
        replica.process.wait(PATIENCE_S)
        wait_until(lambda: has_ended(pid))


@pytest.mark.long
def test_a_late_request_gets_504_and_the_server_continues() -> None:
    with running_command(timeout_s=0.5) as replica:
        replica.wait_ready()
        pid = replica.pid
        answer = ask(replica, "/sleep")
        assert (answer.status, answer.json["error"]) == (504, "timed out after 0.5 s")
        assert ask(replica, "/v1/sleep").json["error"]["message"] == "timed out after 0.5 s"
        wait_until(lambda: ask(replica, "/x").json.get("pid") == pid)  # on a loaded machine, this may be late too


@pytest.mark.long
def test_a_command_beyond_its_memory_limit_ends_with_the_cause() -> None:
    with running_command(mem_limit_bytes=200 * 1024 * 1024) as replica:
        replica.wait_ready()
        assert "out of memory (used " in ask(replica, "/allocate").json["error"]


def test_a_command_ends_with_its_supervisor_and_its_requests_get_the_reason() -> None:
    with running_command() as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        pid = replica.pid
        child = int(ask(replica, "/spawn").body)
        asked = in_background(pool, replica, "/sleep", b"600")
        replica.process.kill()
        reason = "the process that handled this request ended: the supervisor of its replica died"
        assert (asked.result().status, asked.result().json["error"]) == (500, reason)
        wait_until(lambda: has_ended(pid))
        wait_until(lambda: has_ended(child))


#: A server whose child leaves the session, ignores SIGTERM, and writes its pid.
DAEMONISES = """
    import os, signal, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("daemon", os.getpid(), flush=True)
            time.sleep(600)
        os._exit(0)
    os.wait()
"""


def daemons(replica: Replica, count: int) -> list[int]:
    """Return the pids that the daemons have written, once there are `count`."""
    found: list[int] = []

    def has_enough() -> bool:
        found[:] = [int(line.split("daemon ")[1]) for line in replica.log().splitlines() if "o daemon " in line]
        return len(found) >= count

    wait_until(has_enough, message=replica.log())
    return found


def test_a_command_that_daemonises_leaves_no_process_behind() -> None:
    with running_command(source=DAEMONISES) as replica:
        found = daemons(replica, 2)  # the second start
        wait_until(lambda: all(map(has_ended, found)))
        failure = replica.status().processes[0].failure
        assert failure is not None
        assert failure.message.endswith("before it was ready: it must run in the foreground")


@pytest.mark.parametrize("victim", ["command", "proxy", "supervisor", "replica"])
def test_daemons_of_a_command_end_with_it(victim: str) -> None:
    source = DAEMONISES + SERVER
    with running_command(source=source) as replica:
        replica.wait_ready()
        (daemon,) = daemons(replica, 1)
        assert psutil.Process(daemon).parent() == psutil.Process(replica.pid).parent()
        if victim == "command":
            os.kill(replica.pid, signal.SIGKILL)
        elif victim == "proxy":
            os.kill(psutil.Process(replica.pid).ppid(), signal.SIGKILL)
        elif victim == "supervisor":
            replica.process.kill()
        else:
            replica.command(command="stop", drain_s=1)
        wait_until(lambda: has_ended(daemon))


@pytest.mark.long
def test_a_websocket_that_the_server_refuses_gets_its_response() -> None:
    with running_command() as replica:
        replica.wait_ready()
        headers = {"upgrade": "websocket", "connection": "upgrade"}
        answer = ask(replica, "/until-closed", "GET", **headers)
        assert (answer.status, answer.body) == (200, b"until the end")
        assert ask(replica, "/health", "GET", **headers).status == 200


#: Sends what the path has in hexadecimal digits, in parts that are separated by "-"; "." is 100,000 bytes of a header.
RAW = """
    import socket, sys, threading, time

    def serve(sock):
        while head := sock.recv(65536):
            for part in head.split()[1].removeprefix(b"/").split(b"-"):
                try:
                    sock.sendall(b"x" * 100_000 if part == b"." else bytes.fromhex(part.decode()))
                except OSError:
                    return
                time.sleep(0.01)

    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


def test_each_request_has_a_connection_of_its_own() -> None:
    source = """
        import http.server, sys
        class Answers(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            requests = 0
            def do_GET(self):
                self.requests += 1  # of this connection
                self.send_response(200)
                self.send_header("content-length", "1")
                self.end_headers()
                self.wfile.write(str(self.requests).encode())
        http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
    """
    with running_command(source=source, readiness="/") as replica:
        replica.wait_ready()
        assert [ask(replica, "/", "GET").body for _ in range(5)] == [b"1"] * 5


@pytest.mark.long
def test_a_response_has_nothing_of_another_one_however_the_server_behaves() -> None:
    def send(*parts: bytes | str, method: str = "GET", **headers: str) -> Answer:
        path = "-".join(part if isinstance(part, str) else part.hex() for part in parts)
        return ask(replica, f"/{path}", method, **headers)

    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    evil = b"HTTP/1.1 200 OK\r\nx-evil: 1\r\ncontent-length: 4\r\n\r\nevil"
    with running_command(source=RAW) as replica:
        replica.wait_ready()
        cases: list[tuple[list[bytes | str], str, int, bytes]] = [
            ([ok + evil], "GET", 200, b"ok"),
            ([ok, evil], "GET", 200, b"ok"),
            (
                [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-evil: 1\r\n\r\n"],
                "GET",
                200,
                b"ok",
            ),
            ([b"HTTP/1.1 150 Odd\r\nx-evil: 1\r\n\r\n", ok], "GET", 200, b"ok"),
            ([b"HTTP/1.1 204 OK\r\ncontent-length: 4\r\n\r\n", b"evil"], "GET", 204, b""),
            ([b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", b"evil"], "HEAD", 200, b""),
            ([b"HTTP/1.1 304 Same\r\ncontent-length: 4\r\n\r\n"], "GET", 304, b""),
            ([b"HTTP/1.1 000 OK\r\ncontent-length: 2\r\n\r\nok"], "GET", 502, b"valid HTTP"),
            ([b"HTTP/1.1 200 OK\r\nx-long: ", *["."] * 12], "GET", 502, b"larger than 512 KiB"),
        ]
        for parts, method, status, body in cases:
            answer = send(*parts, method=method)
            assert answer.status == status, parts
            assert answer.body == body if status < 400 else body in answer.body
            assert "x-evil" not in answer.headers
            assert send(ok).body == b"ok", parts

        connection = replica.connection()
        parts = "-".join([b"HTTP/1.1 200 OK\r\n\r\n".hex(), *"." * 6_000])  # it ignores the request for a WebSocket
        connection.request(
            "GET", f"/own/{parts}", headers=OF_GATEWAY | {"connection": "upgrade", "upgrade": "websocket"}
        )
        assert connection.getresponse().read(1_000_000) == b"x" * 1_000_000  # while the server continues to send
        connection.close()


def test_a_websocket_is_passed_on_until_its_process_dies() -> None:
    source = """
        import base64, hashlib, os, socket, sys
        listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        while True:
            sock = listener.accept()[0]
            head = sock.recv(65536)
            if not head:
                continue
            key = next(line.split(b": ")[1] for line in head.split(b"\\r\\n") if b"-key" in line)
            accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
            sock.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                         b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n\\x81\\x02hi")
            if not sock.recv(65536):
                continue
            os._exit(7)
    """
    from harness.replicas.applications import WebSocket

    with running_command(source=source) as replica, socket.socket(socket.AF_UNIX) as sock:
        replica.wait_ready()
        sock.settimeout(60)
        sock.connect(replica.spec.sockets[0])
        client = WebSocket(sock, "/own/socket", **{"x-cortex-endpoint": "/own"})
        assert client.is_open
        assert client.receive() == "hi"
        client.send("x")
        assert client.closed() == (1011, "exited with code 7")


@pytest.mark.parametrize("on_disconnect", ["cancel", "finish"])
def test_a_connection_whose_response_was_cut_off_is_released(on_disconnect: str) -> None:
    with running_command(on_disconnect=on_disconnect) as replica:
        replica.wait_ready()
        with pytest.raises(IncompleteRead):
            ask(replica, "/cut")
        pid = replica.pid
        replica.command(command="stop", drain_s=PATIENCE_S)  # it waits for requests that run
        replica.process.wait(PATIENCE_S / 2)
        assert has_ended(pid)
