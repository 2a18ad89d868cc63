"""Misbehaving user code and callers do not affect other requests; each test is named after the misbehaviour."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from cortex.lifecycle import DeathCause, ProcessState
from harness.replicas.replicas import Replica, new_request_id, running_replica
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

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

    def block_all_threads():
        while not os.path.exists(os.environ["SHARED_FOLDER"] + "/block"):
            time.sleep(0.01)
        keeping_the_lock = ctypes.PyDLL(None)
        sys.setswitchinterval(60)
        keeping_the_lock.creat(os.environ["SHARED_FOLDER"].encode() + b"/blocked", 0o600)
        keeping_the_lock.sleep(3600)

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload, headers):
            do = payload.get("do")
            open(os.environ["SHARED_FOLDER"] + "/called", "a").close()
            if do == "sleep":
                time.sleep(payload["s"])
            elif do == "hold the interpreter":
                ctypes.PyDLL(None).usleep(int(payload["s"] * 1e6))
            elif do == "close stderr":
                os.close(2)
                sys.stderr = None
                self.taken = open("taken", "w")  # the file has descriptor 2 now
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
                threading.Thread(target=block_all_threads).start()
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


def run_calls_on_threads(replica: Replica) -> None:
    """Make a slow call, so that further calls run on a thread."""
    replica.wait_ready()
    replica.request({"do": "sleep", "s": 0.1})


def begin(replica: Replica, payload: object, ago_s: float = 0) -> socket.socket:
    """Send a request; return its connection once user code has received it."""
    called = Path(replica.spec.run_dir) / "called"
    called.unlink(missing_ok=True)
    connection = replica.connection()
    headers = {"content-type": "application/json", "x-cortex-request-id": new_request_id(ago_s)}
    connection.request("POST", "/", json.dumps(payload), headers)
    wait_until(called.exists)
    return connection.sock


@pytest.fixture(scope="module")
def plain() -> Iterator[Replica]:
    """A replica that every test leaves as it was."""
    with running_replica(HANDLER, timeout_s=5.0) as replica:
        replica.wait_ready()
        yield replica


@pytest.fixture(scope="module")
def asynchronous() -> Iterator[Replica]:
    """The same, with coroutines."""
    with running_replica(ASYNC_HANDLER, timeout_s=PATIENCE_S) as replica:
        replica.wait_ready()
        yield replica


@pytest.mark.parametrize("do", ["sleep", "hold the interpreter"])
def test_a_disconnect_during_a_stuck_call_does_not_leak_its_slot(do: str) -> None:
    with running_replica(HANDLER, timeout_s=15) as replica:
        run_calls_on_threads(replica)
        begin(replica, {"do": do, "s": 3600}, ago_s=12).close()
        assert wait_until(lambda: replica.status().processes[0].restarts == 1)
        death = replica.wait_ready().processes[0].death
        assert death is not None
        assert death.cause is DeathCause.TIMED_OUT
        assert replica.request({}).status == 200


def test_a_worker_that_stops_reading_requests_is_replaced() -> None:
    with running_replica(HANDLER, timeout_s=3.0) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        assert replica.request({"do": "block all threads soon"}).status == 200
        (Path(replica.spec.run_dir) / "block").touch()
        wait_until((Path(replica.spec.run_dir) / "blocked").exists)
        unread = pool.submit(replica.request, {})
        wait_until(lambda: replica.status().processes[0].restarts == 1)
        assert unread.result(60).status == 504
        replica.wait_ready()
        assert replica.request({}).status == 200


def test_disconnects_during_a_call_leave_no_connections() -> None:
    with running_replica(HANDLER) as replica:
        run_calls_on_threads(replica)
        supervisor, worker = replica.process.pid, replica.pid
        before = open_descriptors(supervisor), open_descriptors(worker)
        for _ in range(20):
            begin(replica, {"do": "sleep", "s": 0.02}).close()
        wait_until(
            lambda: (open_descriptors(supervisor), open_descriptors(worker)) <= before, message="connections stay open"
        )
        assert replica.pid == worker


@pytest.mark.long
def test_disconnects_during_large_transfers_leak_no_memory() -> None:
    with running_replica(HANDLER) as replica:
        run_calls_on_threads(replica)
        worker = psutil.Process(replica.pid)
        large = b'{"do": "large answer"}'
        for size, body in ((len(large), large), (4_000_000, b"x" * 3_000_000)):
            head = b"POST / HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % size
            for _ in range(300):
                with replica_socket(replica) as sock, contextlib.suppress(OSError):
                    sock.sendall(head + body)
                    if body is large:
                        sock.recv(1000)
        wait_until(lambda: open_descriptors(worker.pid) < 30)
        assert worker.memory_info().rss < 200 * 1024**2


ENDINGS = ["cancel a child", "cancel itself", "exit", "exit in a stream", "cancelled stream", "cancelled generator"]


@pytest.mark.parametrize(("do", "status"), [*((ending, 500) for ending in ENDINGS), ("exit in the background", 200)])
def test_cancelling_or_exiting_user_code_ends_no_other_call(
    asynchronous: Replica, do: str, status: int, tmp_path: Path
) -> None:
    with ThreadPoolExecutor() as pool:
        other = pool.submit(asynchronous.request, {"do": "wait", "for": str(tmp_path / "go")})
        logged = asynchronous.log().count("SystemExit")
        assert asynchronous.request({"do": do}).status == status
        if status == 200:
            wait_until(lambda: asynchronous.log().count("SystemExit") > logged, message="nothing in the log")
        (tmp_path / "go").touch()
        assert other.result(60).status == 200
        assert asynchronous.status().processes[0].restarts == 0


def test_a_closed_stderr_loses_neither_tracebacks_nor_responses() -> None:
    with running_replica(HANDLER, timeout_s=5.0) as replica:
        run_calls_on_threads(replica)
        assert replica.request({"do": "close stderr"}).status == 500
        wait_until(lambda: "failed:" in replica.log())
        assert "    raise ValueError" in replica.log()
        assert replica.request({}).status == 200
        assert replica.status().processes[0].restarts == 0


RETRY = """
    import asyncio, sys

    def look(n):
        try:
            return {}["x"]
        except KeyError:
            return look(n)

    class Hostile(Exception):
        @property
        def __notes__(self):
            raise SystemExit

        @property
        def __class__(self):
            raise KeyboardInterrupt

    class Handler:
        def __init__(self, config):
            pass

        def handle_get(self):
            raise Hostile("message")

        def handle_post(self, payload):
            return look(payload)

        async def handle_put(self, payload):
            return look(payload)

        def handle_patch(self, payload):
            yield look(payload)
"""


@pytest.mark.parametrize("fields", [{}, {"max_batch_size": 4}], ids=["single", "batched"])
def test_an_exception_that_is_hard_to_format_fails_its_call_only(fields: dict[str, int]) -> None:
    with running_replica(RETRY, **fields) as replica:
        replica.wait_ready()
        for method in ("POST", "PUT", "PATCH"):
            answer = replica.request(1, method=method)
            assert (answer.status, "RecursionError" in answer.json["error"]) == (500, True)
        answer = replica.request(method="GET")
        assert (answer.status, "Hostile" in answer.json["error"]) == (500, True)
        wait_until(lambda: "Hostile" in replica.log())
        assert replica.log().count("RecursionError: maximum recursion depth exceeded") == 3
        assert replica.status().processes[0].restarts == 0


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "type('Mine', (BaseException,), {})('mine')"])
def test_a_constructor_shows_the_frames_of_the_user_only(raised: str) -> None:
    source = f"""
    class Handler:
        def __init__(self, config):
            import sys
            sys.stderr = None
            raise {raised}

        def handle_post(self, payload):
            return payload
    """
    with running_replica(source) as replica:
        status = replica.wait_state(ProcessState.BACKING_OFF)
        failure = status.processes[0].failure
        assert failure is not None
        wait_until(lambda: "Traceback" in replica.log())
        for text in (failure.traceback, replica.log()):
            assert "in __init__" in text
            assert "cortex" not in text


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
def test_an_invalid_response_is_a_500_with_the_reason(plain: Replica, do: str) -> None:
    answer = plain.request({"do": do})
    assert answer.status == 500
    assert "the response" in answer.json["error"]


def test_a_streaming_response_with_an_invalid_status_is_a_500_with_the_reason(asynchronous: Replica) -> None:
    answer = asynchronous.request({"do": "stream with no HTTP status"})
    assert answer.status == 500
    assert "status 99" in answer.json["error"]


@pytest.mark.parametrize(
    ("do", "status", "body"), [("body where none may be", 204, b""), ("own transfer coding", 200, b"x")]
)
def test_a_response_never_spills_into_the_next(plain: Replica, do: str, status: int, body: bytes) -> None:
    with contextlib.closing(plain.connection()) as connection:
        for payload, expected in (({"do": do}, (status, body)), ({}, (200, None)), ({"do": do}, (status, body))):
            connection.request("POST", "/", json.dumps(payload), {"content-type": "application/json"})
            answer = connection.getresponse()
            received = answer.read()
            assert answer.status == expected[0]
            assert received == expected[1] or expected[1] is None


def test_trailers_are_not_headers_and_change_no_deadline(plain: Replica) -> None:
    with replica_socket(plain) as sock:
        sock.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\nx-cortex-request-id: 1000000000000\r\nauthorization: admin\r\n\r\n"
        )
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"authorization" not in answer


def test_writes_to_foreign_descriptors_do_not_end_the_supervisor() -> None:
    with running_replica(HANDLER) as replica:
        before = replica.wait_ready()
        assert replica.request({"do": "write everywhere"}).status == 200
        assert replica.request({}).json["pid"] == before.processes[0].pid
        assert replica.status().supervisor_pid == before.supervisor_pid


def test_a_worker_that_closes_its_channel_is_replaced() -> None:
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        assert replica.request({"do": "close the channel"}).status == 200
        wait_until(lambda: replica.status().processes[0].restarts == 1)
        assert replica.request({}).status == 200


def test_a_connection_inherited_by_a_daemon_ends_with_the_worker() -> None:
    with running_replica(HANDLER, timeout_s=20.0) as replica:
        replica.wait_ready()
        connection = replica.connection()
        connection.timeout = 60
        connection.request("POST", "/", '{"do": "leave a daemon and die"}', {"content-type": "application/json"})
        with pytest.raises(HTTPException):  # cut off; a time-out is an OSError
            connection.getresponse().read()


@pytest.mark.long
def test_thousands_of_connections_to_a_blocked_worker_are_served() -> None:
    raise_descriptor_limit(5000)
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
        wait_until(
            lambda: max(open_descriptors(supervisor), open_descriptors(worker)) < 100, message="connections stay open"
        )


def test_a_supervisor_without_free_descriptors_starts_its_worker_later() -> None:
    with running_replica(HANDLER) as replica:
        pid = replica.wait_ready().processes[0].pid
        assert pid is not None
        supervisor = replica.process.pid
        limit = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (open_descriptors(supervisor), limit[1]))
        os.kill(pid, signal.SIGKILL)
        os.kill(supervisor, 0)
        wait_until(lambda: open_descriptors(supervisor) and not Path(f"/proc/{pid}").exists())
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limit)
        assert wait_until(lambda: (status := replica.try_status()) and status.processes[0].state is ProcessState.READY)
        assert replica.request({}).status == 200


def replica_socket(replica: Replica) -> socket.socket:
    """Connect without sending anything."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(replica.spec.sockets[0])  # with a timeout, this would not wait for room in the backlog
    sock.settimeout(PATIENCE_S)
    return sock


def open_descriptors(pid: int) -> int:
    """Return the number of descriptors."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def raise_descriptor_limit(wanted: int) -> None:
    """Raise this process's limit of descriptors, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
