"""The supervisor against real worker processes; each crash test is named after the crash."""

from __future__ import annotations

import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from cortex.lifecycle import DeathCause, ProcessState
from cortex.payloads.signature import parse_signature
from cortex.worker.requests.runner import DECAY_CALLS
from cortex.worker.spec import StartFailure
from harness.replicas.replicas import Replica, UnixConnection, new_request_id, read, running_replica
from harness.wait import PATIENCE_S, has_ended, wait_until

pytestmark = pytest.mark.processes

HANDLER = """
    import ctypes, os, subprocess, sys, threading, time

    class Handler:
        def __init__(self, config):
            self.config = config
            while os.path.exists(config.get("wait while", "")):
                time.sleep(0.01)
            print("constructed", flush=True)

        def handle_post(self, payload):
            do = payload.get("do")
            if do:
                print("begun", flush=True)
            if do == "sleep":
                time.sleep(payload["s"])
            elif do == "wait":
                while not os.path.exists(payload["for"]):
                    time.sleep(0.01)
            elif do == "stuck in C":
                ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter lock
            elif do == "exit":
                os._exit(3)
            elif do == "null dereference":
                ctypes.string_at(0)
            elif do == "allocate":
                self.hoard = bytearray(os.urandom(1)) * (payload["mib"] * 1024 * 1024)
                time.sleep(payload.get("s", 0))
            elif do == "abort":
                os.abort()
            elif do == "spawn":
                return {"child": subprocess.Popen(["sleep", "600"]).pid}
            return {"pid": os.getpid(), "thread": threading.current_thread().name}
"""


def in_background(pool: ThreadPoolExecutor, replica: Replica, payload: object, **options: object):
    """Send a request; return its future once user code has received it."""
    before = replica.log().count("begun")
    future = pool.submit(replica.request, payload, **options)  # type: ignore[arg-type]
    wait_until(lambda: replica.log().count("begun") > before, message=replica.log())
    return future


def test_a_ready_replica_reports_its_signature() -> None:
    with running_replica(HANDLER) as replica:
        (method,) = parse_signature(replica.wait_ready().signature).methods
        assert (method.verb, method.name) == ("POST", "handle_post")


@pytest.mark.parametrize(
    ("payload", "words", "cause"),
    [
        ({"do": "exit"}, "exited with code 3", DeathCause.EXITED),
        ({"do": "null dereference"}, "segmentation fault", DeathCause.SEGMENTATION_FAULT),
        ({"do": "abort"}, "ended by a signal (SIGABRT)", DeathCause.SIGNALLED),
    ],
)
def test_a_worker_that_dies_in_a_call_is_reported_and_replaced(payload: object, words: str, cause: DeathCause) -> None:
    with running_replica(HANDLER) as replica:
        before = replica.wait_ready()
        request_id = new_request_id()
        answer = replica.request(payload, request_id=request_id)
        assert answer.status == 500
        assert words in answer.json["error"]
        assert answer.json["request_id"] == request_id
        assert replica.request({}).json["pid"] != before.processes[0].pid
        process = replica.wait_ready().processes[0]
        assert process.restarts == 1
        wait_until(lambda: f"{words}" in replica.log())
        wait_until(lambda: f"inside: request {request_id}" in replica.log())
        assert process.death is not None
        assert process.death.cause is cause


def test_a_killed_worker_is_reported_and_replaced() -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        inside = in_background(pool, replica, {"do": "sleep", "s": 30})
        os.kill(replica.pid, signal.SIGKILL)
        answer = inside.result(PATIENCE_S)
        assert answer.status == 500
        assert "killed (SIGKILL)" in answer.json["error"]
        assert replica.request({}).status == 200


def test_a_worker_over_its_memory_limit_is_reported_as_out_of_memory() -> None:
    with running_replica(HANDLER, mem_limit_bytes=300 * 1024 * 1024) as replica:
        replica.wait_ready()
        assert replica.request({"do": "allocate", "mib": 100}).status == 200
        answer = replica.request({"do": "allocate", "mib": 400, "s": 10})
        assert answer.status == 500
        assert "out of memory" in answer.json["error"]
        assert "mem_limit is 300 MiB" in answer.json["error"]
        assert replica.request({}).status == 200


def test_requests_waiting_in_the_sockets_survive_a_worker_death() -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor(8) as pool:
        replica.wait_ready()
        replica.request({"do": "sleep", "s": 0.1})  # slow calls move to a thread
        killer = in_background(pool, replica, {"do": "sleep", "s": 30})
        waiting = [pool.submit(replica.request, {}) for _ in range(5)]
        wait_until(lambda: _connections(replica) == 6)
        os.kill(replica.pid, signal.SIGKILL)
        assert killer.result(PATIENCE_S).status == 500
        assert [future.result(PATIENCE_S).status for future in waiting] == [200] * 5


def test_requests_waiting_for_a_killed_worker_go_to_another_while_the_next_one_starts(
    tmp_path: Path,
) -> None:
    obstacle = tmp_path / "obstacle"
    config = {"wait while": str(obstacle)}
    with (
        running_replica(HANDLER, processes=2, config=config) as replica,
        ThreadPoolExecutor(8) as pool,
    ):
        replica.wait_ready()
        replica.request({"do": "sleep", "s": 0.1})  # slow calls move to a thread
        killed, other = (process.pid for process in replica.status().processes)
        killer = in_background(pool, replica, {"do": "sleep", "s": 30})
        waiting = [pool.submit(replica.request, {}) for _ in range(5)]
        wait_until(lambda: _connections(replica) == 6)
        obstacle.touch()
        os.kill(killed, signal.SIGKILL)
        assert killer.result(PATIENCE_S).status == 500
        assert {future.result(PATIENCE_S).json["pid"] for future in waiting} == {other}
        obstacle.unlink()
        wait_until(lambda: replica.request({}).json["pid"] not in (killed, other))


#: A class whose constructor waits while the file `obstacle` exists; its method says which process answers.
WAITS = """
    import os, time

    while os.path.exists(os.environ["SHARED_FOLDER"] + "/obstacle"):
        time.sleep(0.01)
"""
BATCHES = (
    WAITS
    + """
    class Handler:
        def __init__(self, config):
            pass
        def handle_post(self, payload):
            return [os.getpid() for _ in payload]
"""
)
SERVICE = (
    WAITS
    + """
    class Handler:
        def __init__(self, config, proto_module_pb2):
            pass
        def Ask(self, payload, context):
            from google.protobuf.wrappers_pb2 import StringValue
            return StringValue(value=f"pid {os.getpid()}")
"""
)
PROTO = """
    syntax = "proto3";
    import "google/protobuf/wrappers.proto";
    service Desk { rpc Ask (google.protobuf.StringValue) returns (google.protobuf.StringValue); }
"""
SERVES = (
    WAITS
    + """
    import http.server, sys

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(str(os.getpid()).encode())

    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
)
COMMAND = {"type": "command", "path": "", "endpoint": "/own", "command": (sys.executable, "handler.py", "$PORT")}


@pytest.mark.parametrize(
    ("source", "path", "fields"),
    [
        pytest.param(BATCHES, "/", {"max_batch_size": 4}, id="batches"),
        pytest.param(BATCHES, "/", {"max_batch_size": 4, "threads": 2}, id="batches of threads"),
        pytest.param(SERVICE, "/Desk/Ask", {"protobuf_path": "desk.proto", "files": {"desk.proto": PROTO}}, id="gRPC"),
        pytest.param(SERVES, "/own/", COMMAND, id="commands"),
    ],
)
def test_requests_of_every_kind_go_to_another_process_while_theirs_starts(
    source: str, path: str, fields: dict[str, Any]
) -> None:
    is_grpc = "protobuf_path" in fields
    headers = {"content-type": "application/grpc", "te": "trailers"} if is_grpc else {}
    body = bytes(5) if is_grpc else b"{}"
    with running_replica(source, processes=2, **fields) as replica, ThreadPoolExecutor(8) as pool:
        replica.wait_ready()
        killed, other = (process.pid for process in replica.status().processes)
        obstacle = Path(replica.spec.run_dir) / "obstacle"
        obstacle.touch()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: replica.status().processes[0].state is ProcessState.STARTING)
        ask = partial(replica.request, path=path, body=body, headers=headers)
        answers = [future.result(PATIENCE_S) for future in [pool.submit(ask) for _ in range(5)]]
        assert [answer.status for answer in answers] == [200] * 5
        assert all(str(other).encode() in answer.body for answer in answers)
        obstacle.unlink()
        replica.wait_ready()
        assert ask().status == 200


def test_requests_waiting_for_a_worker_that_starts_are_answered_when_the_replica_is_stopped(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    with running_replica(HANDLER, config={"wait while": str(obstacle)}) as replica:
        replica.wait_ready()
        obstacle.touch()
        os.kill(replica.pid, signal.SIGKILL)
        replica.wait_state(ProcessState.STARTING)
        waiting = replica.connection()
        waiting.request("POST", "/", b"{}", {"content-type": "application/json"})  # it is in the socket now
        replica.process.terminate()
        answer = read(waiting.getresponse(), 0)
        assert (answer.status, answer.json["error"]) == (503, "no replica is ready: the process was stopped")


def test_idle_connections_survive_a_worker_death() -> None:
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        kept = replica.connection()
        headers = {"content-type": "application/json"}
        kept.request("POST", "/", b"{}", headers)
        first = read(kept.getresponse(), 0).json["pid"]
        replica.request({"do": "exit"})
        kept.request("POST", "/", b"{}", headers)
        assert read(kept.getresponse(), 0).json["pid"] != first
        kept.close()


def test_a_call_stuck_in_c_frees_its_slot_at_the_timeout() -> None:
    with running_replica(HANDLER, timeout_s=15) as replica:
        replica.wait_ready()
        for _ in range(2):
            answer = replica.request({"do": "stuck in C"}, request_id=new_request_id(ago_s=14))
            assert answer.status == 504
            assert "timed out after 15 s" in answer.json["error"]
            assert replica.request({}).status == 200


def test_the_timeout_counts_from_the_arrival_at_the_gateway() -> None:
    with running_replica(HANDLER, timeout_s=3600) as replica:
        replica.wait_ready()
        answer = replica.request({"do": "sleep", "s": 3600}, request_id=new_request_id(ago_s=3599.5))
        assert answer.status == 504
        assert replica.request({}, request_id=new_request_id(ago_s=3601)).status == 504


def test_stuck_call_lets_the_calls_on_other_threads_finish(tmp_path: Path) -> None:
    with running_replica(HANDLER, timeout_s=15, threads=2) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        replica.request({"do": "sleep", "s": 0.1})
        other = in_background(pool, replica, {"do": "wait", "for": str(tmp_path / "go")})
        stuck = in_background(pool, replica, {"do": "sleep", "s": 60}, request_id=new_request_id(ago_s=12))
        assert stuck.result(PATIENCE_S).status == 504
        (tmp_path / "go").touch()
        assert other.result(PATIENCE_S).status == 200
        wait_until(lambda: replica.status().processes[0].restarts == 1)
        assert replica.request({}).status == 200


def test_children_of_user_code_end_with_its_worker() -> None:
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        child = replica.request({"do": "spawn"}).json["child"]
        replica.request({"do": "exit"})
        wait_until(lambda: has_ended(child))


def test_a_constructor_that_raises_is_reported_and_retried() -> None:
    source = """
        class Handler:
            def __init__(self, config):
                self.load(config["weights"])

            def load(self, path):
                raise FileNotFoundError(path)

            def handle_post(self, payload):
                return {}
    """
    with running_replica(source, config={"weights": "w.bin"}) as replica:
        process = replica.wait_state(ProcessState.BACKING_OFF).processes[0]
        assert process.failure is not None
        assert process.failure.message == "FileNotFoundError: w.bin"
        assert 'File "handler.py", line 7, in load' in process.failure.traceback
        assert "cortex/" not in process.failure.traceback
        answer = replica.request({})
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        reason = f"FileNotFoundError while it started; `cortex get {replica.spec.api}` shows why"
        assert answer.json["error"] == f"no replica is ready: {reason}"
        wait_until(lambda: replica.status().processes[0].failed_starts >= 2)
        (shown,) = replica.status().describe_processes()
        assert shown["restarts"] >= 2


def test_each_failed_start_is_reported_with_its_own_cause(tmp_path: Path) -> None:
    source = f"""
        import os, pathlib, signal, time
        folder = pathlib.Path({str(tmp_path)!r})
        number = len(list(folder.glob("started-*"))) + 1
        (folder / f"started-{{number}}").touch()
        while not (folder / f"fail-{{number}}").exists():
            time.sleep(0.01)
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        elif number == 3:
            os._exit(7)
        raise ValueError("bad weights")
    """

    def reported(replica: Replica, number: int) -> StartFailure:
        (tmp_path / f"fail-{number}").touch()
        wait_until(lambda: replica.status().processes[0].failed_starts == number)
        failure = replica.status().processes[0].failure
        assert failure is not None
        return replace(failure, traceback="")

    with running_replica(source) as replica:
        assert reported(replica, 1) == StartFailure("ValueError: bad weights", summary="ValueError while it started")
        killed = "the process ended while it started: killed (SIGKILL)"
        assert reported(replica, 2) == StartFailure(killed, was_killed=True, summary=killed)
        exited = "the process ended while it started: exited with code 7"
        assert reported(replica, 3) == StartFailure(exited, summary=exited)


def test_a_stop_finishes_running_requests() -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        inside = in_background(pool, replica, {"do": "sleep", "s": 1})
        replica.command(command="stop", drain_s=PATIENCE_S)
        assert inside.result(PATIENCE_S).status == 200
        assert replica.process.wait(PATIENCE_S) == 0
        assert not Path(replica.spec.sockets[0]).exists()


def test_a_stop_ends_at_its_deadline() -> None:
    with running_replica(HANDLER) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        inside = in_background(pool, replica, {"do": "stuck in C"})
        replica.command(command="stop", drain_s=0.3)
        assert replica.process.wait(PATIENCE_S) == 0
        answer = inside.result(PATIENCE_S)
        assert answer.status == 500
        assert answer.json["error"].endswith("died: stopped before the call was finished")


def test_calls_that_a_process_leaves_behind_when_it_is_stopped_are_answered_with_the_reason() -> None:
    source = """
        import asyncio

        class Handler:
            def __init__(self, config):
                pass

            async def handle_post(self, payload):
                print("begun", flush=True)
                await asyncio.Event().wait()

            async def handle_put(self, payload):
                print("begun", flush=True)
                await asyncio.Event().wait()
                yield ""
    """
    with running_replica(source) as replica, ThreadPoolExecutor() as pool:
        replica.wait_ready()
        calls = [in_background(pool, replica, {}, method=method) for method in ("POST", "PUT")]
        replica.command(command="stop", drain_s=0)
        reason = "the process that handled this request died: stopped before the call was finished"
        for call in calls:
            answer = call.result(PATIENCE_S)
            assert (answer.status, answer.json["error"]) == (500, reason)


def test_connections_of_slow_clients_are_reported_as_lent() -> None:
    source = """
        class Handler:
            def __init__(self, config):
                pass

            def handle_post(self, payload):
                return b"x" * 4_000_000
    """
    with running_replica(source) as replica, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow_reader:
        replica.wait_ready()
        slow_reader.connect(replica.spec.sockets[0])
        slow_reader.sendall(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow_writer:
            slow_writer.connect(replica.spec.sockets[0])
            slow_writer.sendall(b"POST / HTTP/1.1\r\ncontent-length: 100\r\n\r\nabc")
            wait_until(lambda: replica.status().processes[0].lent == 2)
            assert replica.request({}).status == 200  # lent connections hold no slot
        wait_until(lambda: replica.status().processes[0].lent == 1)


def test_short_calls_are_reported_until_a_call_takes_long() -> None:
    source = """
        import os, pathlib, time

        class Handler:
            def __init__(self, config):
                self.end = pathlib.Path(os.environ["SHARED_FOLDER"], "end")

            def handle_post(self, payload):
                while payload == "long" and not self.end.exists():
                    time.sleep(0.01)
    """
    with running_replica(source) as replica, ThreadPoolExecutor(1) as pool:
        assert not replica.wait_ready().processes[0].has_short_calls
        connection = replica.connection()

        def has_short_calls() -> bool:
            for _ in range(DECAY_CALLS):
                connection.request("POST", "/", b"1", {"x-cortex-request-id": new_request_id()})
                connection.getresponse().read()
            return replica.status().processes[0].has_short_calls

        wait_until(has_short_calls)
        call = pool.submit(replica.request, "long")
        wait_until(lambda: not replica.status().processes[0].has_short_calls)
        (Path(replica.spec.run_dir) / "end").touch()
        assert call.result(PATIENCE_S).status == 200
        assert not replica.status().processes[0].has_short_calls


def test_status_is_pushed_after_each_change() -> None:
    with running_replica(HANDLER) as replica, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        replica.wait_ready()
        control.connect(replica.spec.control_socket)
        control.settimeout(PATIENCE_S)
        lines = control.makefile()
        lines.readline()
        replica.request({"do": "exit"})
        assert any('"restarts": 1' in line for line in lines)  # on a loaded machine, after one about a slow client


def test_hostile_control_input_is_ignored() -> None:
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        deep = b"[" * 60_000 + b"\n"
        for junk in (b"\n\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"command": "stop"}\n', b'{"command": 1}\n', deep):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
                control.connect(replica.spec.control_socket)
                control.sendall(junk)
                control.shutdown(socket.SHUT_WR)
                control.makefile("rb").read()  # until it closes the connection
        assert replica.request({}).status == 200


def test_a_removed_socket_is_opened_again() -> None:
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        pid = replica.pid
        kept = UnixConnection(replica.spec.sockets[0])
        kept.connect()
        for path in (replica.spec.sockets[0], replica.spec.control_socket):
            Path(path).unlink()
            wait_until(Path(path).exists)
        assert replica.request({}).status == 200
        assert replica.pid == pid
        kept.request("POST", "/", b"{}", {"content-type": "application/json"})
        assert read(kept.getresponse(), 0).status == 200
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: replica.status().processes[0].pid not in (None, pid))
        assert replica.request({}).status == 200
        replica.command(command="stop", drain_s=0)
        assert replica.process.wait(PATIENCE_S) == 0
        assert not Path(replica.spec.sockets[0]).exists()
        assert not Path(replica.spec.control_socket).exists()


def test_a_socket_replaced_by_another_file_is_opened_again() -> None:
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        socket_file = Path(replica.spec.sockets[0])
        moved = socket_file.with_name("moved")
        socket_file.rename(moved)
        wait_until(socket_file.exists)
        moved.rename(socket_file)  # no process listens on it any more
        wait_until(lambda: answers(replica))


def answers(replica: Replica) -> bool:
    try:
        return replica.request({}).status == 200
    except OSError:
        return False


def _connections(replica: Replica) -> int:
    if replica.spec.listen_host:
        port = int(replica.status().processes[0].socket.rpartition(":")[2])
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(
            int(words[1].partition(":")[2], 16) == port and words[3] == "01" for words in rows
        )  # 01: established
    found = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(words[-1] == replica.spec.sockets[0] and words[5] != "01" for words in found)  # 01: it listens


def test_a_replica_starts_in_a_fraction_of_a_second() -> None:
    """Check a bound of CPU time far above the documented figure, to detect heavy imports."""
    with running_replica(HANDLER) as replica:
        replica.wait_ready()
        used = [psutil.Process(pid).cpu_times() for pid in (replica.process.pid, replica.pid)]
        assert sum(each.user + each.system for each in used) < 3


def test_limits_change_while_the_replica_runs() -> None:
    with running_replica(HANDLER, timeout_s=3600) as replica:
        pid = replica.wait_ready().processes[0].pid
        replica.command(command="configure", timeout_s=15, max_body_bytes=20)
        wait_until(lambda: replica.request({"long": "x" * 50}).status == 413)
        assert replica.request({}).json["pid"] == pid
        answer = replica.request(body=b'{"do":"stuck in C"}', request_id=new_request_id(ago_s=14))
        assert answer.status == 504
        assert replica.request({}).status == 200
