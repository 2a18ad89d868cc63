"""A worker's client of the model agent: fetch model files and release them. Blocking, for any thread.

The agent may restart at any time: after a reconnect the pending fetches and the held leases are sent again.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from cortex.errors import ModelError
from cortex.models.protocol import MAX_LINE_BYTES, Fetch, Fetched, FetchFailed, Release, Request, read_answer, write
from cortex.models.spec import DEFAULT_MODEL, ModelSource, Version
from cortex.processes.backoff import Backoff

#: Pending fetches fail when the agent is unreachable for this long; a killed agent restarts within two seconds.
UNREACHABLE_S = 10.0
_BACKOFF = Backoff(0.02, 0.5)
_READ_BYTES = 65536
_Socket = socket.socket  # a parameter of `__init__` has the name of the module


@dataclass
class _PendingFetch:
    """A fetch that waits for its answer."""

    request: Fetch
    sent_at: float
    answer: Future[Path] = field(default_factory=Future)


@dataclass
class _ContentLease:
    """A content that the agent keeps on disk for this process."""

    request: Fetch
    count: int = 0  #: fetches minus releases


class AgentFetcher:
    """Fetches model files for one API through the model agent; connects at the first fetch."""

    def __init__(self, socket: str, api: str, source: ModelSource) -> None:
        self._path = socket
        self._api = api
        self._source = source
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards everything below
        self._pending: dict[int, _PendingFetch] = {}
        self._leases: dict[str, _ContentLease] = {}
        self._sock: _Socket | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def fetch(self, model: str, version: Version) -> Path:
        """Return the folder with the files of a version; it exists until `release` was called as often as `fetch`.

        Blocks for the duration of the download. Raises: ModelError.
        """
        with self._lock:
            if self._is_closed:
                raise ModelError("models can't be fetched any more: the process is ending")
            request = Fetch(next(self._ids), self._api, self._source, model, version.number, version.digest)
            pending = _PendingFetch(request, time.monotonic())
            self._pending[request.id] = pending
            self._leases.setdefault(version.digest, _ContentLease(request)).count += 1
            self._send(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cortex-model-fetcher", daemon=True)
                self._thread.start()
        try:
            return pending.answer.result()
        except BaseException:
            self.release(version)
            raise
        finally:
            with self._lock:
                self._pending.pop(request.id, None)

    def release(self, version: Version) -> None:
        """Release one fetch of a version; without one, do nothing."""
        with self._lock:
            lease = self._leases.get(version.digest)
            if lease is None:
                return
            lease.count -= 1
            if lease.count == 0:
                del self._leases[version.digest]
                self._send(Release(version.digest))

    def close(self) -> None:
        """Disconnect, upon which the agent releases everything; pending fetches fail."""
        with self._lock:
            self._is_closed = True
            self._leases.clear()
            self._disconnect()
        self._fail_pending(float("inf"), "the process is ending")

    def _run(self) -> None:
        """Stay connected while a fetch is pending or a lease is held."""
        lost_at, failures = time.monotonic(), 0
        while self._is_needed():
            if sock := self._connect():
                with sock:
                    self._read_answers(sock)
                lost_at, failures = time.monotonic(), 0
                time.sleep(_BACKOFF.first_s)
            else:
                now = time.monotonic()
                if now - lost_at > UNREACHABLE_S:
                    self._fail_pending(now - UNREACHABLE_S, _unreachable(self._path))
                failures += 1
                time.sleep(_BACKOFF.delay_s(failures))

    def _is_needed(self) -> bool:
        with self._lock:
            if not self._is_closed and (self._pending or self._leases):
                return True
            self._thread = None
            return False

    def _connect(self) -> _Socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            return None
        with self._lock:
            self._sock = sock
            pending = {each.request.digest for each in self._pending.values()}
            for lease in self._leases.values():
                if lease.request.digest not in pending:
                    self._send(lease.request)  # renews the lease; the answer is ignored
            for each in self._pending.values():
                self._send(each.request)
        return sock

    def _read_answers(self, sock: _Socket) -> None:
        """Handle answers until the connection ends."""
        unread = b""
        with contextlib.suppress(OSError):
            while data := sock.recv(_READ_BYTES):
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._handle(line)
                if len(unread) > MAX_LINE_BYTES:
                    break
        with self._lock:
            self._disconnect()

    def _handle(self, line: bytes) -> None:
        try:
            answer = read_answer(line)
        except ValueError:
            return
        if not isinstance(answer, Fetched | FetchFailed):
            return
        with self._lock:
            pending = self._pending.pop(answer.id, None)
        if pending is None:
            return
        if isinstance(answer, Fetched):
            pending.answer.set_result(Path(answer.path))
        else:
            pending.answer.set_exception(_error(pending.request, answer.message))

    def _fail_pending(self, sent_before: float, reason: str) -> None:
        with self._lock:
            failed = [each for each in self._pending.values() if each.sent_at <= sent_before]
            for each in failed:
                del self._pending[each.request.id]
        for each in failed:
            each.answer.set_exception(_error(each.request, reason))

    def _send(self, request: Request) -> None:
        """Send a request if connected; otherwise the next connection starts with it."""
        if self._sock is None:
            return
        try:
            self._sock.sendall(write(request))
        except OSError:
            self._disconnect()

    def _disconnect(self) -> None:
        """Wake the reading thread. Only that thread closes the socket: its file descriptor could be reused."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock = None


def _unreachable(path: str) -> str:
    return (
        f"the model agent has not answered at {path} for {UNREACHABLE_S:g} s; the operator starts it: "
        "check that it runs with `cortex status`, and read logs/models.log in CORTEX_HOME"
    )


def _error(request: Fetch, reason: str) -> ModelError:
    name = "the model" if request.model == DEFAULT_MODEL else f"model {request.model}"
    return ModelError(f"{name}, version {request.version}, can't be fetched: {reason}")
