"""A worker's line to the operator: HTTP over its unix socket, one request at a time. It knows no jobs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.client import HTTPConnection, HTTPException

from cortex.replica.spec import ReplicaSpec

#: A connection that was silent for longer may be about to be closed by the operator: a new one is made.
_KEEP_S = 2.0
_CONNECT_S = 2.0
#: Answers that will be the same next time.
_FINAL = (400, 401, 403, 404, 409, 413)


class AwayError(Exception):
    """There is no answer. `may_have_arrived` tells whether what was sent may have been taken all the same."""

    def __init__(self, reason: object, may_have_arrived: bool) -> None:
        super().__init__(str(reason))
        self.may_have_arrived = may_have_arrived


class RefusedError(Exception):
    """The operator wants nothing of this, now or later."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class OperatorLine:
    """Posts for one thread; any other may `interrupt`."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._path = spec.jobs_socket or ""
        self._prefix = f"/worker/{spec.id}/"
        self._headers = {"authorization": f"Bearer {spec.jobs_token}", "content-type": "application/json"}
        self._connection: _UnixConnection | None = None
        self._used_at = 0.0
        self._lock = threading.Lock()
        self._is_interrupted = False
        self._waiting: _UnixConnection | None = None

    def post(self, name: str, body: bytes, timeout_s: float, may_interrupt: bool = False) -> bytes:
        """Return the answer's body. Raises: AwayError, RefusedError."""
        connection = self._open(timeout_s)
        with self._lock:
            if may_interrupt and self._is_interrupted:
                raise AwayError("interrupted", may_have_arrived=False)
            self._waiting = connection if may_interrupt else None
        try:
            connection.request("POST", self._prefix + name, body, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            self.close()
            raise AwayError(error, may_have_arrived=True) from error
        finally:
            with self._lock:
                self._waiting = None
        self._used_at = time.monotonic()
        if response.status in _FINAL:
            raise RefusedError(response.status, answer[:1000].decode(errors="replace"))
        if response.status != 200:
            raise AwayError(f"the operator answered {response.status}", may_have_arrived=True)
        return answer

    def interrupt(self) -> None:
        """End the request that may be interrupted, now and from now on."""
        with self._lock:
            self._is_interrupted = True
            if self._waiting is not None:
                with contextlib.suppress(OSError, AttributeError):  # it may be over at this very moment
                    self._waiting.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up; the next request connects anew."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self, timeout_s: float) -> _UnixConnection:
        if self._connection is not None:
            has_hung_up = self._connection.sock is None
            if has_hung_up or time.monotonic() - self._used_at > _KEEP_S:
                self.close()
        if self._connection is None:
            connection = _UnixConnection(self._path)
            try:
                connection.connect()
            except OSError as error:
                connection.close()
                raise AwayError(error, may_have_arrived=False) from error
            self._connection = connection
        self._connection.sock.settimeout(timeout_s)
        return self._connection


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("operator")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CONNECT_S)
        self.sock.connect(self._path)
