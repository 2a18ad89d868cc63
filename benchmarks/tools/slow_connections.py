"""Many clients that send or read a kilobyte per second, in one thread."""

from __future__ import annotations

import heapq
import socket
import threading
import time
from dataclasses import dataclass, field

from benchmarks.tools.endpoint import Endpoint
from benchmarks.tools.workloads import Workload

_STEP_BYTES = 1000
_STEP_S = 1.0
#: Keeps the kernel from taking a whole answer on the reader's behalf.
_RECEIVE_BUFFER_BYTES = 4096


@dataclass
class _Slow:
    socket: socket.socket
    rest: bytes  #: what is still to be sent; a reader has sent its request at once
    received: int = 0
    first: bytes = b""  #: the status line of the answer


@dataclass
class SlowClients:
    """`count` slow clients; each takes a step per second, spread evenly over the second."""

    endpoint: Endpoint
    workload: Workload
    count: int
    uploads: bool
    kept: int = 0  #: still at it at the end
    let_go: dict[str, int] = field(default_factory=dict)  #: status line, or reason, of those the server ended

    def __enter__(self) -> SlowClients:
        self._stopping = threading.Event()
        self._all_began = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow-clients", daemon=True)
        self._thread.start()
        if not self._all_began.wait(60):
            raise TimeoutError("not every slow client could begin within 60 s")
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        queue: list[tuple[float, int, _Slow]] = []
        begin = time.monotonic()
        for number in range(self.count):
            heapq.heappush(queue, (begin + _STEP_S * (1 + number / self.count), number, self._connect()))
        self._all_began.set()
        while queue and not self._stopping.wait(max(0.0, queue[0][0] - time.monotonic())):
            due, number, slow = heapq.heappop(queue)
            ended = self._step(slow)
            if ended:
                self.let_go[ended] = self.let_go.get(ended, 0) + 1
                slow.socket.close()
            else:
                heapq.heappush(queue, (due + _STEP_S, number, slow))
        self.kept = len(queue)
        for _, _, slow in queue:
            slow.socket.close()

    def _connect(self) -> _Slow:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        connection.settimeout(10)
        connection.connect((self.endpoint.host, self.endpoint.port))
        request = self.workload.request(self.endpoint.host, self.endpoint.path)
        at_once = len(request) - len(self.workload.body) + (_STEP_BYTES if self.uploads else len(self.workload.body))
        connection.sendall(request[:at_once])
        connection.setblocking(False)
        return _Slow(connection, request[at_once:])

    def _step(self, slow: _Slow) -> str:
        """Send or read a kilobyte; return why the client is done, or an empty string."""
        try:
            if slow.rest:
                sent = slow.socket.send(slow.rest[:_STEP_BYTES])
                slow.rest = slow.rest[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            return type(error).__name__
        try:
            data = slow.socket.recv(_STEP_BYTES)
        except BlockingIOError:
            return ""
        except OSError as error:
            return type(error).__name__
        slow.first = slow.first or data.partition(b"\r\n")[0]
        slow.received += len(data)
        if data and not slow.rest and not self.uploads and slow.received < len(self.workload.body) + 1_000_000:
            return ""
        return slow.first.decode(errors="replace") or "closed without an answer"
