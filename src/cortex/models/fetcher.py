"""A worker's connection to the model agent: asks for content and waits for it; says what it no longer needs.

Blocking, for any thread. The agent may be restarted at any time: what was asked and what is held is told to the next.
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
from cortex.models.protocol import MAX_LINE_BYTES, Failed, Fetch, Fetched, Release, Request, read_answer, write
from cortex.models.spec import DEFAULT_MODEL, ModelSource, Version

#: An agent that was killed is back within a second or two; after so long somebody must look.
UNREACHABLE_S = 10.0
_FIRST_RETRY_S = 0.02
_MAX_RETRY_S = 0.5
_READ_BYTES = 65536
_Socket = socket.socket  # there is a parameter of that name


@dataclass
class _Call:
    """One fetch that waits for its answer."""

    request: Fetch
    asked_at: float
    answer: Future[Path] = field(default_factory=Future)


@dataclass
class _Lease:
    """Content that is kept on disk for us."""

    request: Fetch
    count: int = 0  #: fetches, less releases


class Fetcher:
    """Fetches content for one API; connects at the first fetch."""

    def __init__(self, socket: str, api: str, source: ModelSource) -> None:
        self._path = socket
        self._api = api
        self._source = source
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards all below
        self._calls: dict[int, _Call] = {}
        self._leases: dict[str, _Lease] = {}
        self._sock: _Socket | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def fetch(self, model: str, version: Version) -> Path:
        """Return the folder with the files of a version, which stays until `release` was called as often.

        Takes as long as the download does. Raises: ModelError.
        """
        with self._lock:
            if self._is_closed:
                raise ModelError("models can't be fetched any more: the fetcher was closed")
            request = Fetch(next(self._ids), self._api, self._source, model, version.number, version.digest)
            call = _Call(request, time.monotonic())
            self._calls[request.id] = call
            self._leases.setdefault(version.digest, _Lease(request)).count += 1
            self._send(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cortex-model-fetcher", daemon=True)
                self._thread.start()
        try:
            return call.answer.result()
        except BaseException:
            self.release(version)
            raise
        finally:
            with self._lock:
                self._calls.pop(request.id, None)

    def release(self, version: Version) -> None:
        """Say that one fetch of a version is no longer needed; one too many does nothing."""
        with self._lock:
            lease = self._leases.get(version.digest)
            if lease is None:
                return
            lease.count -= 1
            if lease.count == 0:
                del self._leases[version.digest]
                self._send(Release(version.digest))

    def close(self) -> None:
        """Hang up; the agent then takes all as released. What waits fails."""
        with self._lock:
            self._is_closed = True
            self._leases.clear()
            self._hang_up()
        self._fail_waiting(float("inf"), "the process is ending")

    def _run(self) -> None:
        """Keep a connection for as long as something is asked or held."""
        lost_at, retry_s = time.monotonic(), _FIRST_RETRY_S
        while self._is_needed():
            if sock := self._connect():
                with sock:
                    self._listen(sock)
                lost_at, retry_s = time.monotonic(), _FIRST_RETRY_S
                time.sleep(retry_s)
            else:
                now = time.monotonic()
                if now - lost_at > UNREACHABLE_S:
                    self._fail_waiting(now - UNREACHABLE_S, _unreachable(self._path))
                time.sleep(retry_s)
                retry_s = min(retry_s * 2, _MAX_RETRY_S)

    def _is_needed(self) -> bool:
        with self._lock:
            if not self._is_closed and (self._calls or self._leases):
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
            asked = {call.request.digest for call in self._calls.values()}
            for lease in self._leases.values():
                if lease.request.digest not in asked:
                    self._send(lease.request)  # nobody waits for the answer
            for call in self._calls.values():
                self._send(call.request)
        return sock

    def _listen(self, sock: _Socket) -> None:
        """Hand out answers until the connection ends."""
        unread = b""
        with contextlib.suppress(OSError):
            while data := sock.recv(_READ_BYTES):
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(unread) > MAX_LINE_BYTES:
                    break
        with self._lock:
            self._hang_up()

    def _take(self, line: bytes) -> None:
        try:
            answer = read_answer(line)
        except ValueError:
            return
        if not isinstance(answer, Fetched | Failed):
            return
        with self._lock:
            call = self._calls.pop(answer.id, None)
        if call is None:
            return
        if isinstance(answer, Fetched):
            call.answer.set_result(Path(answer.path))
        else:
            call.answer.set_exception(_error(call.request, answer.message))

    def _fail_waiting(self, asked_before: float, why: str) -> None:
        with self._lock:
            failed = [call for call in self._calls.values() if call.asked_at <= asked_before]
            for call in failed:
                del self._calls[call.request.id]
        for call in failed:
            call.answer.set_exception(_error(call.request, why))

    def _send(self, request: Request) -> None:
        """Tell the agent, if it is there; who connects next tells it all again."""
        if self._sock is None:
            return
        try:
            self._sock.sendall(write(request))
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        """Wake the thread that reads; it alone closes the socket, whose number could be another's by then."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock = None


def _unreachable(path: str) -> str:
    return (
        f"the model agent has not answered at {path} for {UNREACHABLE_S:g} s; the operator starts it: "
        "see whether it runs with `cortex status`, and logs/models.log in CORTEX_HOME"
    )


def _error(request: Fetch, why: str) -> ModelError:
    name = "the model" if request.model == DEFAULT_MODEL else f"model {request.model}"
    return ModelError(f"{name}, version {request.version}, can't be fetched: {why}")
