"""Endpoints of systems, and single requests that wait for a system and check its responses."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.tools.workloads import Workload


@dataclass(frozen=True)
class Endpoint:
    """An address on loopback."""

    port: int
    path: str
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        """The whole URL."""
        return f"http://{self.host}:{self.port}{self.path}"

    def ask(self, workload: Workload, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Send one request on a connection of its own; return status and body. Raises: OSError, HTTPException."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": workload.content_type, **dict(workload.headers)}
            connection.request("POST", self.path, workload.body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def mistake(self, workload: Workload) -> str:
        """Send one request; return what is wrong with the response, or an empty string."""
        try:
            return workload.mistake(*self.ask(workload))
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"


class NotServingError(Exception):
    """A system did not start, or returned a wrong response."""


def wait_until_right(
    endpoint: Endpoint, workload: Workload, timeout_s: float, ended: Callable[[], bool] = lambda: False
) -> None:
    """Wait for a correct response. Raises: NotServingError after `timeout_s`, or when the server has `ended`."""
    deadline = time.monotonic() + timeout_s
    while mistake := endpoint.mistake(workload):
        if ended():
            raise NotServingError(f"the server ended; last answer: {mistake}")
        if time.monotonic() > deadline:
            raise NotServingError(f"no right answer within {timeout_s:.0f} s; last: {mistake}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def is_listening(port: int) -> bool:
    """Return whether a process listens on this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
