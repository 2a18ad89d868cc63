"""An operator with scripted responses to job workers, over a real unix socket.

It keeps leases as the store does: a report must continue where the previous one ended, else its token is lost.
"""

from __future__ import annotations

import contextlib
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from cortex.jobs.http import wire
from cortex.jobs.spec import (
    HOOK_SEQ,
    Assignment,
    BatchFailure,
    ExchangeReply,
    Lease,
    LeasedBatch,
    RenewalReply,
    Report,
    StopSignal,
)

TOKEN = "secret"


@dataclass
class _Held:
    pid: int
    next: int
    last: int
    seqs: tuple[int, ...]


@dataclass
class ScriptedJob:
    """One job: its batches and their outcomes."""

    id: str
    payloads: list[bytes]
    log_path: str
    config: dict[str, Any] = field(default_factory=dict)
    lease_s: float = 30.0
    batch_timeout_s: float | None = None
    output: str | None = None
    has_hook: bool = False
    min_lease: int = 0  #: a lease has so many batches even if the worker, which may be slow, asks for fewer
    max_lease: int = 512
    open: list[int] = field(default_factory=list)
    succeeded: list[int] = field(default_factory=list)
    failures: list[BatchFailure] = field(default_factory=list)
    results: dict[int, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    hooks: list[BatchFailure | None] = field(default_factory=list)  #: outcome of each hook
    hook_given: bool = False
    is_over: bool = False
    held: dict[str, _Held] = field(default_factory=dict)
    leases: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open = list(range(len(self.payloads)))

    @property
    def resolved(self) -> int:
        return len(self.succeeded) + len(self.failures)

    def assignment(self) -> Assignment:
        spec = {"job_id": self.id, "output": self.output}
        return Assignment(self.id, self.config, spec, {}, self.log_path, self.lease_s, self.batch_timeout_s)


class ScriptedOperator:
    """Holds one or more jobs, assigned in turn to the processes that join."""

    def __init__(self, socket: str) -> None:
        self.socket = socket
        self.jobs: list[ScriptedJob] = []
        self.joins: list[int] = []
        self.renewals: list[wire.RenewalRequest] = []
        self.exchanges: list[wire.ExchangeRequest] = []
        self.refuse_with: int | None = None
        self.stop = False
        self.swallow_answers = 0  #: this many exchanges are carried out without a response
        self.wait_s = 20.0
        self._turn = threading.Condition()
        self._server: _Server | None = None
        self._tokens = 0

    # What tests do.

    def start(self) -> None:
        Path(self.socket).unlink(missing_ok=True)
        self._server = _Server(self.socket, self)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.end()
            self._server = None
            Path(self.socket).unlink(missing_ok=True)

    def add(self, job: ScriptedJob) -> ScriptedJob:
        with self._turn:
            self.jobs.append(job)
            self._turn.notify_all()
        return job

    def change(self, **values: Any) -> None:
        with self._turn:
            for name, value in values.items():
                setattr(self, name, value)
            self._turn.notify_all()

    def give_back(self, job: ScriptedJob, fail: Sequence[int] = ()) -> None:
        """End the leases of a dead process: the batches in `fail` become dead letters, the others are open again."""
        with self._turn:
            for held in job.held.values():
                job.open += [seq for seq in held.seqs if seq >= held.next and seq not in fail]
            job.failures += [BatchFailure(seq, "the worker's process died") for seq in fail]
            job.held.clear()
            self._turn.notify_all()

    def lose(self, job: ScriptedJob) -> None:
        """Revoke every lease; nobody else gets the batches."""
        with self._turn:
            job.held.clear()

    # What workers do.

    def join(self, pid: int) -> Assignment | StopSignal | None:
        with self._turn:
            self.joins.append(pid)
            self._turn.wait_for(lambda: self.stop or self._current() is not None, self.wait_s)
            job = self._current()
            return StopSignal() if self.stop else job.assignment() if job else None

    def _current(self) -> ScriptedJob | None:
        return next((job for job in self.jobs if not job.is_over), None)

    def exchange(self, asked: wire.ExchangeRequest) -> ExchangeReply:
        job = next(job for job in self.jobs if job.id == asked.job_id)
        with self._turn:
            self.exchanges.append(replace(asked, reports=asked.reports))
            lost = tuple(report.token for report in asked.reports if not self._take(job, report))
            answer = self._answer(job, asked)
            if asked.max_batches and asked.wait_s and answer == ExchangeReply():
                deadline = time.monotonic() + min(asked.wait_s, self.wait_s)
                while answer == ExchangeReply() and (left := deadline - time.monotonic()) > 0:
                    self._turn.wait(left)
                    answer = self._answer(job, asked)
            return replace(answer, lost=lost)

    def _answer(self, job: ScriptedJob, asked: wire.ExchangeRequest) -> ExchangeReply:
        if self.stop:
            return ExchangeReply(stop=True)
        if job.is_over:
            return ExchangeReply(is_done=True)
        if not asked.max_batches:
            return ExchangeReply()
        if job.open:
            seqs, job.open = self._cut(job, min(max(asked.max_batches, job.min_lease), job.max_lease))
            self._tokens += 1
            token = f"lease-{self._tokens}"
            job.held[token] = _Held(asked.pid, seqs[0], seqs[-1], seqs)
            job.leases.append((token, seqs))
            return ExchangeReply(lease=Lease(token, tuple(LeasedBatch(seq, job.payloads[seq]) for seq in seqs)))
        if not job.held:
            if job.has_hook and not job.hook_given:
                job.hook_given = True
                job.held["hook-1"] = _Held(asked.pid, HOOK_SEQ, HOOK_SEQ, (HOOK_SEQ,))
                return ExchangeReply(lease=Lease("hook-1", (LeasedBatch(HOOK_SEQ, b""),)))
            if not job.has_hook:
                job.is_over = True
                return ExchangeReply(is_done=True)
        return ExchangeReply()

    def _cut(self, job: ScriptedJob, count: int) -> tuple[tuple[int, ...], list[int]]:
        job.open.sort()
        return tuple(job.open[:count]), job.open[count:]

    def _take(self, job: ScriptedJob, report: Report) -> bool:
        held = job.held.get(report.token)
        if held is None or not held.next <= report.upto <= held.last:
            return False
        if report.upto == HOOK_SEQ:
            job.hooks.append(report.failures[0] if report.failures else None)
            job.is_over = True
            self._turn.notify_all()
            return True
        failed = {failure.seq for failure in report.failures}
        job.failures += report.failures
        job.succeeded += [seq for seq in held.seqs if held.next <= seq <= report.upto and seq not in failed]
        job.results |= dict(report.results)
        job.seconds += report.seconds
        held.next = report.upto + 1
        if report.upto == held.last:
            del job.held[report.token]
        self._turn.notify_all()
        return True

    def renew(self, renewal: wire.RenewalRequest) -> RenewalReply:
        with self._turn:
            self.renewals.append(renewal)
            known = {token for job in self.jobs for token in job.held}
            return RenewalReply(tuple(token for token in renewal.tokens if token not in known), self.stop)

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, bytes]:
        if self.refuse_with is not None:
            return self.refuse_with, b"{}"
        if authorization != f"Bearer {TOKEN}":
            return 401, b"{}"
        name = path.rpartition("/")[2]
        if name == "join":
            return 200, wire.write_joined(self.join(wire.parse(wire.JoinRequest, body).pid))
        if name == "exchange":
            answer = wire.write_exchanged(self.exchange(wire.parse_exchange(body)))
            if self.swallow_answers:
                self.swallow_answers -= 1
                return 0, b""
            return 200, answer
        return 200, wire.write(self.renew(wire.parse(wire.RenewalRequest, body)))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().handle()

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        body = self.rfile.read(length)
        if len(body) < length:  # the worker died
            self.close_connection = True
            return
        status, answer = self.server.operator.answer(self.path, self.headers["authorization"], body)
        if not status:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def address_string(self) -> str:
        return "worker"

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, path: str, operator: ScriptedOperator) -> None:
        super().__init__(path, _Handler)
        self.operator = operator
        self.open: set[Any] = set()

    def end(self) -> None:
        """Hang up on everyone, as the death of a process does."""
        self.server_close()
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(2)


@contextlib.contextmanager
def scripted_operator(folder: Path) -> Iterator[ScriptedOperator]:
    operator = ScriptedOperator(str(folder / "jobs"))
    operator.start()
    try:
        yield operator
    finally:
        operator.die()
