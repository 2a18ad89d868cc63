"""Sends the requests of a recording at their pace, on several connections, and compares the answers.

    Recording ── exchanges, in order ──▶ queue ──▶ threads, one connection each ──▶ compare ──▶ ReplayStatistics

The recording is read as a stream and the queue is short, so memory does not grow with the number of requests.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import islice
from queue import Full, Queue
from urllib.parse import quote

from cortex import __version__
from cortex.recording.exchange import REPLAY_AGENT, Exchange
from cortex.recording.files import Recording
from cortex.replay.comparison import ComparisonRules, Difference, ReplayedAnswer, compare
from cortex.replay.statistics import ReplayStatistics

_REQUEST_ID = "x-cortex-request-id"
_POLL_S = 0.2
_PROGRESS_S = 0.2
_MS_PER_S = 1000
_ASCII = bytes(range(0x21, 0x7F)).decode()
#: A part of `Server-Timing`.
_PART = re.compile(r"(\w+);dur=([0-9.]+)")


@dataclass(frozen=True)
class ReplayTarget:
    """The API or the replica that answers the requests."""

    name: str  #: for people
    connect: Callable[[], HTTPConnection]
    path: str  #: of the endpoint, without a final slash
    headers: Callable[[Exchange], dict[str, str]]  #: of each request, besides the recorded ones


@dataclass(frozen=True)
class ReplaySettings:
    """Pace, concurrency and number of the requests."""

    speed: float | None = None  #: 1.0: the pace of the recording; None: as fast as possible
    concurrency: int = 8
    limit: int | None = None  #: number of requests


class ReplaySession:
    """One replay."""

    def __init__(
        self,
        recording: Recording,
        target: ReplayTarget,
        settings: ReplaySettings,
        rules: ComparisonRules,
        on_progress: Callable[[int], object] = lambda sent: None,
    ) -> None:
        """Create a session; `on_progress` gets the number of answers a few times per second."""
        self._recording = recording
        self._target = target
        self._settings = settings
        self._rules = rules
        self._on_progress = on_progress
        self._queue: Queue[Exchange | None] = Queue(2 * settings.concurrency)
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._statistics = ReplayStatistics()

    def run(self) -> ReplayStatistics:
        """Send all requests. Raises: InputError for a damaged recording."""
        statistics = self._statistics
        statistics.unfinished = sum(file.has_unfinished_line() for file in self._recording.files)
        threads = [
            threading.Thread(target=self._send_all, name=f"cortex-replay-{number}", daemon=True)
            for number in range(self._settings.concurrency)
        ]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        self._feed(began)
        for _ in threads:
            self._put(None)
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]
        statistics.seconds = time.monotonic() - began
        return statistics

    def _feed(self, began: float) -> None:
        speed, first, shown_at = self._settings.speed, None, began
        for exchange in islice(self._recording.exchanges(), self._settings.limit):
            if self._failures:
                return
            self._statistics.recorded_requests += 1
            self._statistics.original_requests += exchange.stands_for
            if not exchange.is_sendable:
                self._statistics.skipped += 1
                continue
            if speed is not None:
                first = exchange.started_s if first is None else first
                wait_s = began + (exchange.started_s - first) / speed - time.monotonic()
                if wait_s > 0:
                    time.sleep(wait_s)
                else:
                    self._statistics.late_s = max(self._statistics.late_s, -wait_s)
            self._put(exchange)
            if time.monotonic() - shown_at > _PROGRESS_S:
                shown_at = time.monotonic()
                self._on_progress(self._statistics.compared)

    def _put(self, exchange: Exchange | None) -> None:
        while True:
            try:
                self._queue.put(exchange, timeout=_POLL_S)
                return
            except Full:
                if self._failures:
                    return

    # Threads.

    def _send_all(self) -> None:
        client = _ReplayClient(self._target)
        try:
            while (exchange := self._queue.get()) is not None:
                self._send(client, exchange)
        except BaseException as error:  # the edge of the thread; `run` raises it
            self._failures.append(error)
        finally:
            client.close()

    def _send(self, client: _ReplayClient, exchange: Exchange) -> None:
        began = time.perf_counter()
        try:
            answer = client.send(exchange)
        except (OSError, HTTPException) as error:
            client.close()
            with self._lock:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                difference = Difference("(answer)", "no answer", "(answer)", str(exchange.status), reason)
                self._statistics.add(exchange, 0, [difference])
            return
        seconds = time.perf_counter() - began
        differences = compare(exchange, answer, self._rules)
        timing = dict(_PART.findall(answer.headers.get("server-timing", "")))
        duration_ms = float(timing.get("total", seconds * _MS_PER_S))
        handler_ms = float(timing["handler"]) if "handler" in timing else None
        with self._lock:
            self._statistics.add(exchange, answer.status, differences)
            self._statistics.add_durations(exchange, duration_ms, handler_ms)


class _ReplayClient:
    """One connection, which is opened again once the server has closed it."""

    def __init__(self, target: ReplayTarget) -> None:
        self._target = target
        self._connection: HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def send(self, exchange: Exchange) -> ReplayedAnswer:
        """Send a request and read its answer, once more if the server had closed the idle connection.

        Raises: OSError, HTTPException.
        """
        target, body = self._target, exchange.request.content
        url = target.path + exchange.path or "/"
        if exchange.query:
            url += f"?{exchange.query}"
        url = quote(url, safe=_ASCII, encoding="latin-1")  # http.client sends no other characters
        headers = {name: value for name, value in exchange.headers if name.lower() != "user-agent"}
        headers |= {"user-agent": f"{REPLAY_AGENT}/{__version__}"} | target.headers(exchange)
        if exchange.request.content_type:
            headers["content-type"] = exchange.request.content_type
        was_open = self._connection is not None
        while True:
            connection = self._connection = self._connection or target.connect()
            try:
                connection.request(exchange.method, url, body or None, headers)
                response = connection.getresponse()
                content = response.read()
            except (ConnectionError, HTTPException):
                self.close()
                if not was_open:
                    raise
                was_open = False
                continue
            if response.will_close:
                self.close()
            received = {name.lower(): value for name, value in response.getheaders()}
            # Without a gateway, the id is the one that was sent.
            return ReplayedAnswer(response.status, content, {_REQUEST_ID: headers.get(_REQUEST_ID, ""), **received})
