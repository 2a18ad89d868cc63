"""Renews leases for a worker that can't, one request at a time and without ever waiting. It decides nothing."""

from __future__ import annotations

import contextlib
import socket

from cortex.jobs.http.wire import RenewalRequest, write_renew
from cortex.replica.spec import ReplicaSpec

#: An operator that has not answered after so long is asked again.
_PATIENCE_S = 5.0
_RENEWALS_PER_LEASE = 3


class LeaseRenewal:
    """The supervisor's own line to the operator."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._path = spec.jobs_socket or ""
        self._head = (
            f"POST /worker/{spec.id}/renew HTTP/1.1\r\nhost: operator\r\nauthorization: Bearer {spec.jobs_token}\r\n"
            "content-type: application/json\r\nconnection: close\r\ncontent-length: "
        ).encode()
        self._sock: socket.socket | None = None
        self._begun_at = float("-inf")

    def is_due(self, now: float, lease_s: float) -> bool:
        """Tell whether it is time for the next one."""
        return self._sock is None and now - self._begun_at >= lease_s / _RENEWALS_PER_LEASE

    def begin(self, now: float, pid: int, tokens: tuple[str, ...]) -> None:
        """Ask to keep these leases; an operator that is away is asked again when the next one is due."""
        self._begun_at = now
        body = write_renew(RenewalRequest(pid, tokens))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            sock.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        except OSError:
            sock.close()
            return
        self._sock = sock

    def tick(self, now: float) -> None:
        """Hang up once the answer is there; what it says, the worker is told when it asks."""
        if self._sock is None:
            return
        with contextlib.suppress(BlockingIOError):
            with contextlib.suppress(ConnectionError):
                self._sock.recv(4096)
            self.close()
            return
        if now - self._begun_at > _PATIENCE_S:
            self.close()

    def close(self) -> None:
        """Hang up."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
