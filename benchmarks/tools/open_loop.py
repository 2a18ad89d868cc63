"""Open-loop load: requests are sent at a constant rate, independent of the responses.

Latency is measured from the time at which a request was due, not from the time at which it could be sent. A server that
stalls is therefore charged for all requests that had to wait (no coordinated omission). The generator is one thread on
`epoll` in a process of its own: `python -m benchmarks.tools.open_loop` reads its plan from stdin and prints the result.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import json
import select
import socket
import subprocess
import sys
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.tools.endpoint import Endpoint
from benchmarks.tools.load import Load
from benchmarks.tools.paths import REPOSITORY
from benchmarks.tools.workloads import Workload

#: Lets waits end to the microsecond instead of 50 µs late (nanoseconds; prctl(2)).
_PR_SET_TIMERSLACK = 29

#: Share of the time from which on the generator counts as saturated.
BUSY = 0.95
#: Share of the due rate below which the server, or the machine that both share, counts as overloaded.
SUSTAINED = 0.98

#: Waits after the last request for the answers that are still due.
DRAIN_S = 5.0


@dataclass(frozen=True)
class OpenLoad(Load):
    """Results of the generator, including its own lateness."""

    rate: float = 0.0  #: requests per second that were due
    late_p99_us: float = 0.0  #: how late requests left while a connection was free: the generator's own fault
    busy: float = 0.0  #: share of the time in which the generator ran, or waited for a processor
    generator_cpu_us: float = 0.0  #: per request

    @property
    def is_sustained(self) -> bool:
        """Return whether the latencies are the server's.

        A generator without idle time adds a queue of its own to them, and a queue that grows until the load ends has
        no percentiles.
        """
        return self.busy < BUSY and self.per_s > SUSTAINED * self.rate


def open_loop(endpoint: Endpoint, workload: Workload, rate: float, seconds: float, connections: int = 128) -> OpenLoad:
    """Run the generator in its own process."""
    plan = _plan(endpoint, workload, rate, seconds, connections)
    command = [sys.executable, "-m", "benchmarks.tools.open_loop"]
    timeout_s = seconds + DRAIN_S + 30
    done = subprocess.run(
        command, cwd=REPOSITORY, check=True, input=plan, stdout=subprocess.PIPE, text=True, timeout=timeout_s
    )
    return OpenLoad(**json.loads(done.stdout))


def _plan(endpoint: Endpoint, workload: Workload, rate: float, seconds: float, connections: int) -> str:
    request = base64.b64encode(workload.request(endpoint.host, endpoint.path)).decode()
    plan = {"host": endpoint.host, "port": endpoint.port, "request": request}
    return json.dumps({**plan, "rate": rate, "seconds": seconds, "connections": connections})


class _Connection:
    """One keep-alive connection with at most one request on it."""

    __slots__ = ("due", "received", "socket")

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.due = 0
        self.received = b""


@dataclass
class _Generator:
    address: tuple[str, int]
    request: bytes
    interval_ns: float
    latencies: array[int] = field(default_factory=lambda: array("q"))
    lateness: array[int] = field(default_factory=lambda: array("q"))
    errors: int = 0
    unanswered: int = 0

    def run(self, count: int, connections: int) -> float:
        """Send `count` requests; return the seconds from the first due time to the last response."""
        poll = select.epoll()
        by_fd: dict[int, _Connection] = {}
        free: deque[_Connection] = deque()
        for _ in range(connections):
            self._connect(poll, by_fd, free)
        start = time.perf_counter_ns() + 10_000_000
        sent = answered = 0
        stop = start + int(count * self.interval_ns + DRAIN_S * 1e9)
        starved = False
        now = start
        while answered < count and now < stop:
            now = time.perf_counter_ns()
            while sent < count and free and (due := start + int(sent * self.interval_ns)) <= now:
                if not starved:
                    self.lateness.append(now - due)
                self._send(free.popleft(), due)
                sent += 1
                now = time.perf_counter_ns()
            # With no connection free, what goes out next is late because the server is slow, not we.
            starved = not free
            wait_s = 0.05 if sent == count or starved else max(0.0, start + sent * self.interval_ns - now) / 1e9
            # Python's epoll waits whole milliseconds; `select` on the epoll waits microseconds, and spinning would
            # take a core from the server.
            if wait_s and not select.select((poll,), (), (), wait_s)[0]:
                continue
            for fd, _ in poll.poll(0, connections):
                answered += self._receive(by_fd[fd], poll, by_fd, free)
        self.unanswered = count - answered
        self.errors += self.unanswered
        end = time.perf_counter_ns()
        # Missing responses took at least this long.
        self.latencies.extend(max(0, end - start - int(index * self.interval_ns)) for index in range(answered, count))
        return (end - start) / 1e9

    def _connect(self, poll: select.epoll, by_fd: dict[int, _Connection], free: deque[_Connection]) -> None:
        connection = _Connection(self.address)
        by_fd[connection.socket.fileno()] = connection
        poll.register(connection.socket, select.EPOLLIN)
        free.append(connection)

    def _send(self, connection: _Connection, due: int) -> None:
        connection.due = due
        try:
            connection.socket.send(self.request)
        except OSError:
            # The reader sees the end of the connection and counts it.
            return

    def _receive(
        self, connection: _Connection, poll: select.epoll, by_fd: dict[int, _Connection], free: deque[_Connection]
    ) -> int:
        """Read available data; return 1 if it completed a response."""
        try:
            data = connection.socket.recv(65536)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if data:
            received = connection.received + data if connection.received else data
            if not is_whole(received):
                connection.received = received
                return 0
            self._finish(connection, received.startswith(b"HTTP/1.1 200"))
            free.append(connection)
            return 1
        waiting = connection.due != 0
        if waiting:
            self._finish(connection, ok=False)
        else:
            free.remove(connection)
        poll.unregister(connection.socket)
        del by_fd[connection.socket.fileno()]
        connection.socket.close()
        self._connect(poll, by_fd, free)
        return int(waiting)

    def _finish(self, connection: _Connection, ok: bool) -> None:
        self.latencies.append(time.perf_counter_ns() - connection.due)
        self.errors += not ok
        connection.due = 0
        connection.received = b""


def is_whole(data: bytes) -> bool:
    """Return whether these bytes are a complete response."""
    head = data.find(b"\r\n\r\n")
    if head < 0:
        return False
    lower = data[:head].lower()
    mark = lower.find(b"content-length:")
    if mark < 0:
        return data.endswith(b"0\r\n\r\n")
    end = lower.find(b"\r\n", mark)
    return len(data) >= head + 4 + int(lower[mark + 15 : end if end > 0 else head])


def _percentile(values: array[int], share: float) -> float:
    """Return the value in microseconds below which `share` of the latencies lie."""
    ordered = sorted(values) or [0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e3


def _busy_ns() -> int:
    """Return for how long this process has run or waited for a processor (proc(5), schedstat)."""
    running_ns, waiting_ns, _ = Path("/proc/self/schedstat").read_text().split()
    return int(running_ns) + int(waiting_ns)


def main() -> None:
    """Read a plan, execute it, and print the result."""
    plan = json.load(sys.stdin)
    count = max(1, int(plan["rate"] * plan["seconds"]))
    request = base64.b64decode(plan["request"])
    generator = _Generator((plan["host"], plan["port"]), request, 1e9 / plan["rate"])
    gc.disable()  # its pauses would be charged to the server
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1_000, 0, 0, 0)
    before_ns, before_cpu_ns = _busy_ns(), time.process_time_ns()
    seconds = generator.run(count, plan["connections"])
    busy_ns, cpu_ns = _busy_ns() - before_ns, time.process_time_ns() - before_cpu_ns
    result = {
        "requests": count - generator.unanswered,
        "seconds": seconds,
        "p50_us": _percentile(generator.latencies, 0.5),
        "p99_us": _percentile(generator.latencies, 0.99),
        "errors": generator.errors,
        "rate": plan["rate"],
        "late_p99_us": _percentile(generator.lateness, 0.99),
        "busy": busy_ns / 1e9 / seconds,
        "generator_cpu_us": cpu_ns / 1e3 / count,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
