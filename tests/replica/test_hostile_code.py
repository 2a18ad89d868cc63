"""What the user's code and its callers may do without harm to other requests; each test is named after the attack."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from cortex.lifecycle import DeathCause, ProcessState
from harness.replicas.replicas import Replica, new_request_id, running_replica
from harness.wait import PATIENCE_S, wait_until

HANDLER = """
    import asyncio, ctypes, os, socket, sys, threading, time
    from starlette.responses import Response

    RESPONSES = {
        "no HTTP status": lambda: Response("x", 99),
        "interim status": lambda: Response("x", 100),
        "header with a line break": lambda: Response("x", headers={"a": "b\\r\\n\\r\\nHTTP/1.1 200 OK"}),
        "content type with a line break": lambda: Response("x", media_type="a\\r\\nb: c"),
        "header name with a blank": lambda: Response("x", headers={"a b": "c"}),
        "body where none may be": lambda: Response("x" * 100_000, 204),
        "own transfer coding": lambda: Response("x", headers={"Transfer-Encoding": "chunked", "Connection": "close"}),
    }

    def own_sockets():
        for name in os.listdir("/proc/self/fd"):
            try:
                yield int(name), socket.socket(fileno=os.dup(int(name))).type
            except OSError:
                pass

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload, headers):
            do = payload.get("do")
            open("called", "a").close()
            if do == "sleep":
                time.sleep(payload["s"])
            elif do == "hold the interpreter":
                ctypes.PyDLL(None).usleep(int(payload["s"] * 1e6))
            elif do == "close stderr":
                os.close(2)
                sys.stderr = None
                raise ValueError
            elif do == "write everywhere":
                for fd, kind in list(own_sockets()):
                    if kind == socket.SOCK_SEQPACKET:
                        for text in (b"junk", b"[1]", b'{"kind": "closed", "index": 9999}', b'{"kind": "ready"}'):
                            os.write(fd, text)
            elif do == "close the channel":
                for fd, kind in list(own_sockets()):
                    if kind == socket.SOCK_SEQPACKET:
                        os.close(fd)
            elif do == "block all threads soon":
                threading.Timer(0.2, ctypes.PyDLL(None).sleep, [3600]).start()
            elif do == "leave a daemon and die":
                def chunks():
                    yield "first"
                    if os.fork() == 0:
                        os.setsid()
                        time.sleep(120)
                        os._exit(0)
                    time.sleep(0.2)
                    os._exit(3)
                return chunks()
            elif do == "large answer":
                return "x" * 3_000_000
            elif do in RESPONSES:
                return RESPONSES[do]()
            return {"pid": os.getpid(), "names": sorted(headers)}
"""

ASYNC_HANDLER = """
    import asyncio, os
    from starlette.background import BackgroundTask
    from starlette.responses import Response, StreamingResponse

    async def chunks(error):
        raise error
        yield b""

    async def leave():
        raise SystemExit(3)

    async def cancel_a_child():
        child = asyncio.ensure_future(asyncio.sleep(60))
        child.cancel()
        await child

    async def cancel_itself():
        asyncio.current_task().cancel()
        await asyncio.sleep(60)

    class Handler:
        def __init__(self, config):
            pass

        async def handle_post(self, payload):
            do = payload.get("do")
            if do == "wait":
                while not os.path.exists(payload["for"]):
                    await asyncio.sleep(0.01)
            elif do == "cancel a child":
                await cancel_a_child()
            elif do == "cancel itself":
                await cancel_itself()
            elif do == "exit":
                await leave()
            elif do == "exit in a stream":
                return StreamingResponse(chunks(SystemExit(3)))
            elif do == "cancelled stream":
                return StreamingResponse(chunks(asyncio.CancelledError()))
            elif do == "cancelled generator":
                return chunks(asyncio.CancelledError())
            elif do == "stream with no HTTP status":
                return StreamingResponse(chunks(ValueError()), 99)
            elif do == "exit in the background":
                return Response("ok", background=BackgroundTask(leave))
            return "ok"
"""


def make_calls_slow(replica: Replica) -> None:
    """Have calls leave the event loop for a thread."""
    replica.wait_ready()
    replica.request({"do": "sleep", "s": 0.1})


def begin(replica: Replica, payload: object) -> socket.socket:
    """Send a request and return its connection once the user's code has it."""
    called = Path(replica.spec.project_dir) / "called"
    called.unlink(missing_ok=True)
    connection = replica.connection()
    headers = {"content-type": "application/json", "x-cortex-request-id": new_request_id()}
    connection.request("POST", "/", json.dumps(payload), headers)
    wait_until(called.exists)
    return connection.sock


@pytest.mark.parametrize("do", ["sleep", "hold the interpreter"])
def test_caller_of_a_stuck_call_that_hangs_up_does_not_take_the_slot_along(do: str) -> None:
    with running_replica(HANDLER, timeout_s=3.0) as replica:
        make_calls_slow(replica)
        begin(replica, {"do": do, "s": 3600}).close()
        assert wait_until(lambda: replica.status().processes[0].restarts == 1)
        death = replica.wait_ready().processes[0].death
        assert death is not None
        assert death.cause is DeathCause.TIMED_OUT
        assert replica.request({}).status == 200


def test_process_that_reads_no_request_any_more_is_replaced() -> None:
    with running_replica(HANDLER, timeout_s=3.0) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        assert replica.request({"do": "block all threads soon"}).status == 200
        threading.Event().wait(0.5)
        unread = pool.submit(replica.request, {})
        wait_until(lambda: replica.status().processes[0].restarts == 1)
        # What a new process is sent first by another machine may have waited, or that machine's clock may be behind.
        assert unread.result(60).status in ({200, 504} if replica.spec.listen_host else {504})
        replica.wait_ready()
        assert replica.request({}).status == 200


def test_hang_ups_while_a_call_runs_leave_no_connection_behind() -> None:
    with running_replica(HANDLER) as replica:
        make_calls_slow(replica)
        supervisor, worker = replica.process.pid, replica.pid
        before = descriptors(supervisor), descriptors(worker)
        for _ in range(20):
            begin(replica, {"do": "sleep", "s": 0.02}).close()
        wait_until(lambda: (descriptors(supervisor), descriptors(worker)) <= before, message="connections stay open")
        assert replica.pid == worker


def test_hang_ups_in_large_answers_and_bodies_leave_no_memory_behind() -> None:
    with running_replica(HANDLER) as replica:
        make_calls_slow(replica)
        worker = psutil.Process(replica.pid)
        large = b'{"do": "large answer"}'
        for size, body in ((len(large), large), (4_000_000, b"x" * 3_000_000)):
            head = b"POST / HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % size
            for _ in range(300):
                with replica_socket(replica) as sock, contextlib.suppress(OSError):
                    sock.sendall(head + body)
                    if body is large:
                        sock.recv(1000)
        wait_until(lambda: descriptors(worker.pid) < 30)
        assert worker.memory_info().rss < 200 * 1024**2


@pytest.mark.parametrize(
    "do", ["cancel a child", "cancel itself", "exit", "exit in a stream", "cancelled stream", "cancelled generator"]
)
def test_user_code_that_cancels_or_exits_gets_a_500_and_ends_no_other_call(do: str, tmp_path: Path) -> None:
    with running_replica(ASYNC_HANDLER, timeout_s=15.0) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        other = pool.submit(replica.request, {"do": "wait", "for": str(tmp_path / "go")})
        answer = replica.request({"do": do})
        assert answer.status == 500
        (tmp_path / "go").touch()
        assert other.result(60).status == 200
        assert replica.status().processes[0].restarts == 0


def test_exit_in_a_background_task_ends_no_other_call(tmp_path: Path) -> None:
    with running_replica(ASYNC_HANDLER, timeout_s=15.0) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        other = pool.submit(replica.request, {"do": "wait", "for": str(tmp_path / "go")})
        assert replica.request({"do": "exit in the background"}).status == 200
        wait_until(lambda: "SystemExit" in replica.log(), message="nothing in the log")
        (tmp_path / "go").touch()
        assert other.result(60).status == 200
        wait_until(lambda: "SystemExit" in replica.log(), message="nothing in the log")


def test_closed_stderr_costs_the_log_and_no_answer() -> None:
    with running_replica(HANDLER, timeout_s=5.0) as replica:
        make_calls_slow(replica)
        assert replica.request({"do": "close stderr"}).status == 500
        assert replica.request({}).status == 200
        assert replica.status().processes[0].restarts == 0


@pytest.mark.parametrize(
    "do",
    [
        "no HTTP status",
        "interim status",
        "header with a line break",
        "content type with a line break",
        "header name with a blank",
    ],
)
def test_response_that_is_not_http_is_a_500_that_says_so(do: str) -> None:
    with running_replica(HANDLER, timeout_s=5.0) as replica:
        replica.wait_ready()
        answer = replica.request({"do": do})
        assert answer.status == 500
        assert "the response" in answer.json["error"]


def test_streaming_response_with_no_http_status_is_a_500_that_says_so() -> None:
    with running_replica(ASYNC_HANDLER, timeout_s=5.0) as replica:
        replica.wait_ready()
        answer = replica.request({"do": "stream with no HTTP status"})
        assert answer.status == 500
        assert "status 99" in answer.json["error"]


@pytest.mark.parametrize(
    ("do", "status", "body"), [("body where none may be", 204, b""), ("own transfer coding", 200, b"x")]
)
def test_response_never_reaches_into_the_next_answer(do: str, status: int, body: bytes) -> None:
    with running_replica(HANDLER, timeout_s=5.0) as replica, contextlib.closing(replica.connection()) as connection:
        replica.wait_ready()
        for payload, expected in (({"do": do}, (status, body)), ({}, (200, None)), ({"do": do}, (status, body))):
            connection.request("POST", "/", json.dumps(payload), {"content-type": "application/json"})
            answer = connection.getresponse()
            received = answer.read()
            assert answer.status == expected[0]
            assert received == expected[1] or expected[1] is None


def test_trailers_are_not_headers_and_change_no_deadline() -> None:
    with running_replica(HANDLER, timeout_s=5.0) as replica, replica_socket(replica) as sock:
        replica.wait_ready()
        sock.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\nx-cortex-request-id: 1000000000000\r\nauthorization: admin\r\n\r\n"
        )
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"authorization" not in answer


def test_code_that_writes_into_foreign_descriptors_does_not_end_its_supervisor() -> None:
    with running_replica(HANDLER) as replica:
        before = replica.wait_ready()
        assert replica.request({"do": "write everywhere"}).status == 200
        assert replica.request({}).json["pid"] == before.processes[0].pid
        assert replica.status().supervisor_pid == before.supervisor_pid


def test_process_that_closes_the_socket_to_its_supervisor_is_replaced() -> None:
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        assert replica.request({"do": "close the channel"}).status == 200
        wait_until(lambda: replica.status().processes[0].restarts == 1)
        assert replica.request({}).status == 200


def test_connection_that_a_daemon_inherited_ends_with_the_process() -> None:
    with running_replica(HANDLER, timeout_s=20.0) as replica:
        replica.wait_ready()
        connection = replica.connection()
        connection.timeout = 60
        connection.request("POST", "/", '{"do": "leave a daemon and die"}', {"content-type": "application/json"})
        with pytest.raises(HTTPException):  # cut off; a time-out is an OSError
            connection.getresponse().read()


def test_connections_that_come_in_thousands_while_the_process_is_blocked_are_all_served() -> None:
    allow_descriptors(5000)
    with running_replica(HANDLER, timeout_s=30.0) as replica, contextlib.ExitStack() as stack:
        replica.wait_ready()
        blocked = begin(replica, {"do": "hold the interpreter", "s": 2})
        sockets = [stack.enter_context(replica_socket(replica)) for _ in range(2000)]
        for sock in sockets:
            sock.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        assert Counter(sock.recv(65536)[9:12] for sock in sockets) == {b"200": 2000}
        supervisor, worker = replica.process.pid, replica.pid
        blocked.close()
        stack.close()
        wait_until(lambda: max(descriptors(supervisor), descriptors(worker)) < 100, message="connections stay open")


def test_supervisor_out_of_descriptors_lives_and_starts_its_process_once_it_has_some() -> None:
    with running_replica(HANDLER) as replica:
        pid = replica.wait_ready().processes[0].pid
        assert pid is not None
        supervisor = replica.process.pid
        limit = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (descriptors(supervisor), limit[1]))
        os.kill(pid, signal.SIGKILL)
        os.kill(supervisor, 0)
        wait_until(lambda: descriptors(supervisor) and not Path(f"/proc/{pid}").exists())
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limit)
        assert wait_until(lambda: (status := replica.try_status()) and status.processes[0].state is ProcessState.READY)
        assert replica.request({}).status == 200


def replica_socket(replica: Replica) -> socket.socket:
    """Connect without a word."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    sock.connect(replica.spec.sockets[0])
    return sock


def descriptors(pid: int) -> int:
    """Count what a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def allow_descriptors(wanted: int) -> None:
    """Let this process have so many, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
