"""Real replicas for tests: a supervisor process for a project written on the spot, and a client for its sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cortex.lifecycle import ProcessState
from cortex.processes.daemon import kill_session
from cortex.processes.identity import Identity
from cortex.worker.spec import ReplicaSpec, ReplicaStatus
from harness.connections import UnixConnection
from harness.replicas.specs import replica_spec
from harness.replicas.supervisor_forks import SupervisorProcess, start_supervisor
from harness.wait import PATIENCE_S, SLACK, wait_until


class TcpConnection(HTTPConnection):
    """HTTP over TCP, with the secret in each request, as the gateway sends it."""

    def __init__(self, address: str, secret: str) -> None:
        host, _, port = address.rpartition(":")
        super().__init__(host.strip("[]"), int(port), timeout=PATIENCE_S)
        self._secret = secret

    def putrequest(self, *args: Any, **options: Any) -> None:
        super().putrequest(*args, **options)
        if self._secret:
            self.putheader("X-Cortex-Gateway", self._secret)


@dataclass
class Answer:
    """A complete response."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Replica:
    """A running supervisor."""

    spec: ReplicaSpec
    process: SupervisorProcess

    def connection(self, index: int = 0) -> HTTPConnection:
        if not self.spec.listen_host:
            return UnixConnection(self.spec.sockets[index])
        return TcpConnection(self.status().processes[index].socket, self.spec.gateway_secret)

    def request(
        self,
        payload: Any = None,
        *,
        method: str = "POST",
        path: str = "/",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        request_id: str = "",
        index: int = 0,
    ) -> Answer:
        """Send one request on a connection of its own; `payload` goes as JSON."""
        sent = {"content-type": "application/json", "x-cortex-request-id": request_id or new_request_id()}
        connection = self.connection(index)
        started = time.monotonic()
        data = json.dumps(payload).encode() if body is None and method != "GET" else body
        connection.request(method, path, data, {**sent, **(headers or {})})
        response = connection.getresponse()
        answer = read(response, started)
        connection.close()
        return answer

    def status(self) -> ReplicaStatus:
        """Query the supervisor as the engine does."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self.spec.control_socket)
            return ReplicaStatus.from_json(sock.makefile().readline())

    @contextlib.contextmanager
    def statuses(self) -> Iterator[Iterator[ReplicaStatus]]:
        """Follow the supervisor's reports until it ends."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self.spec.control_socket)
            yield (ReplicaStatus.from_json(line) for line in sock.makefile())

    def command(self, **fields: Any) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self.spec.control_socket)
            sock.sendall(json.dumps(fields).encode() + b"\n")
            sock.settimeout(PATIENCE_S)
            sock.makefile().readline()

    def wait_ready(self) -> ReplicaStatus:
        return wait_until(lambda: (status := self.try_status()) and status.is_ready and status, message=self.log())

    def try_status(self) -> ReplicaStatus | None:
        with contextlib.suppress(OSError):
            return self.status()
        return None

    def wait_state(self, state: ProcessState) -> ReplicaStatus:
        def reached() -> ReplicaStatus | None:
            status = self.try_status()
            return status if status and all(p.state is state for p in status.processes) else None

        status = wait_until(reached, message=f"{state}: {self.log()}")
        assert status is not None
        return status

    @property
    def pid(self) -> int:
        pid = self.status().processes[0].pid
        assert pid is not None
        return pid

    def log(self) -> str:
        return complete_lines(Path(self.spec.log_path))


def complete_lines(path: Path) -> str:
    """Read a file to which another process appends: its last line may be in the middle of being written."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].decode()


def new_request_id(ago_s: float = 0.0) -> str:
    """Make an id as the gateway does; it begins with the arrival in UNIX milliseconds."""
    return f"{int((time.time() - ago_s) * 1000)}-1-{os.urandom(3).hex()}"


def read(response: HTTPResponse, started: float) -> Answer:
    body = response.read()
    return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, body, time.monotonic() - started)


#: Environment variable: a folder that a test and its user code share. It is the replica's `run_dir`.
SHARED_FOLDER = "SHARED_FOLDER"
#: Fields that every replica of `running_replica` gets besides its own.
DEFAULTS: dict[str, Any] = {}


@contextlib.contextmanager
def running_replica(
    source: str,
    interface: str = "handler",
    processes: int = 1,
    files: Mapping[str, str] = MappingProxyType({}),
    **fields: Any,
) -> Iterator[Replica]:
    """Run a project of one file, and of other `files`; its folder is short-named: unix sockets need short paths."""
    with tempfile.TemporaryDirectory(prefix="cx-") as folder:
        root = Path(folder)
        project = root / "project"
        project.mkdir()
        for name, text in {**files, "handler.py": source}.items():
            (project / name).write_text(textwrap.dedent(text))
        spec = replace(
            replica_spec(
                id="api-00000000-000001",
                api="api",
                revision="00000000",
                interface=interface,
                project_dir=str(project),
                python=sys.executable,
                run_dir=str(root),
                sockets=tuple(str(root / f"{index}.sock") for index in range(processes)),
                control_socket=str(root / "control.sock"),
                log_path=str(root / "replica.log"),
            ),
            **(DEFAULTS | fields),
        )
        (root / "spec.json").write_text(spec.to_json())
        process = start_supervisor(spec.python, str(root / "spec.json"), {**os.environ, SHARED_FOLDER: folder})
        identity = Identity.of(process.pid)
        try:
            replica = Replica(spec, process)
            # All sockets listen once the supervisor responds; a file exists before its socket listens.
            wait_until(lambda: replica.try_status() or process.poll() is not None, timeout_s=PATIENCE_S / SLACK)
            assert process.poll() is None
            yield replica
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            kill_session(identity)  # workers too: some may outlive their supervisor
            process.wait(PATIENCE_S)
