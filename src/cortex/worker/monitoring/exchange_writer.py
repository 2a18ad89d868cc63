"""The writer of a worker's recording: `networking.record`.

Once an answer is sent, the event loop puts a share of the requests with their answers into a queue that is limited in
bytes, and a thread writes what has gathered. The event loop encodes short exchanges itself: a thread would need the
interpreter lock for it just as long, and find nothing of them in the caches of the CPU. The thread encodes long ones,
and those with values to redact. Both together use at most `max_cpu` of a core, so that recording costs as little of the
throughput, whatever the rate and the size of requests. Those that come while that is used up, or find the queue full,
are counted instead. Recording never fails a request: if it can't go on, it stops with one line in the log, and tries
again after a minute.

`python -m benchmarks.recording` measures what it costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.errors import StorageError
from cortex.masking import secret_values, secrets_of_environment
from cortex.recording.exchange import MAX_BODY_BYTES, ExchangeEncoder, RawExchange, Redaction, encode_head
from cortex.recording.storage import BucketStorage, FolderStorage, RecordingStorage
from cortex.worker.monitoring.metrics import MetricFile, SeriesKind, series_key
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.spec import ReplicaSpec

if TYPE_CHECKING:
    from cortex.worker.http.connection import Connection
    from cortex.worker.http.responses import Header

MAX_QUEUED_BYTES = 32 * 1024 * 1024
#: Writing again is tried after this time.
RETRY_S = 60.0
#: The thread lets exchanges gather for this time, or until they have this size, because each of its turns is expensive.
_GATHER_S, _GATHER_BYTES = 0.25, 1024 * 1024
#: One write to the storage ends with the exchange that makes it so long.
_BATCH_BYTES = 256 * 1024
_CLOSE_S = 2.0
#: The event loop encodes exchanges whose bodies are together at most so long.
_SHORT_BYTES = 4096
_FIXED_BYTES = 1024  #: of an exchange besides its bodies

#: CPU time that was not used is kept for so long.
_BURST_S = 1.0
#: Recording that has used its CPU time pauses for so long at least, because exchanges in a row take half the CPU time.
_PAUSE_S = 0.05

RECORDED = "cortex_recorded_requests_total"
UNRECORDED = "cortex_unrecorded_requests_total"
RECORDED_KEY = series_key(SeriesKind.COUNTER, RECORDED)
#: By reason: recording had used its CPU time, there were more requests than the thread could write, recording had
#: stopped, or it stopped with them.
UNRECORDED_KEYS = {
    reason: series_key(SeriesKind.COUNTER, UNRECORDED, {"reason": reason})
    for reason in ("max_cpu", "queue full", "stopped", "write failed")
}
LIMITED_KEY, FULL_KEY, STOPPED_KEY, FAILED_KEY = UNRECORDED_KEYS.values()


class StreamedAnswer:
    """An answer whose parts are sent one after the other."""

    __slots__ = ("_parts", "headers", "kept_bytes", "media_type", "size_bytes", "status")

    def __init__(self, status: int, media_type: bytes | None, headers: Sequence[Header]) -> None:
        self.status = status
        self.media_type = media_type
        self.headers = headers
        self.size_bytes = self.kept_bytes = 0
        self._parts: list[bytes] = []

    def append(self, data: bytes) -> None:
        """Add a part."""
        self.size_bytes += len(data)
        if kept := data[: MAX_BODY_BYTES - self.kept_bytes]:
            self._parts.append(kept)
            self.kept_bytes += len(kept)

    @property
    def body(self) -> bytes:
        """Return the body, or its beginning."""
        return b"".join(self._parts)


class CpuBudget:
    """CPU time that may be used: a part of the time that passes, of which at most `_BURST_S` is saved up.

    It is kept as the time until which what was used is paid (a leaky bucket).
    """

    def __init__(self, part: float) -> None:
        self._part = part  #: of a core; 1: no limit
        self._paid_until_ns = 0.0  #: monotonic
        self._thread_ns = 0

    def spend(self, now_ns: int, loop_ns: int, thread_ns: int) -> float:
        """Account for CPU time: `loop_ns` was used now, `thread_ns` since the start. Return the pause that it takes."""
        if self._part >= 1:
            return 0.0
        used_ns = loop_ns + thread_ns - self._thread_ns
        self._thread_ns = thread_ns
        self._paid_until_ns = max(self._paid_until_ns, now_ns) + used_ns / self._part
        ahead_s = (self._paid_until_ns - now_ns) / 1e9 - _BURST_S
        return ahead_s + _PAUSE_S if ahead_s > 0 else 0.0


class ExchangeWriter:
    """Records exchanges of one process. `add`, `begin` and `end` are for the event-loop thread."""

    def __init__(
        self,
        share: float,
        max_cpu: float,
        redaction: Redaction,
        storage: RecordingStorage,
        file: MetricFile | None,
        place: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Create the writer for connections of `loop`.

        `max_cpu` is the part of a core that it uses at most; 1: no limit. `place` names the storage in log lines.
        """
        self._loop = loop
        self.limit = round(share * 2**32)  #: of the checksums of request ids that belong to the share
        self.is_paused = False  #: recording has used its CPU time
        self.skipped = 0  #: requests of the share during this pause
        self._cpu_budget = CpuBudget(max_cpu)
        self._thread_ns = 0  #: CPU time of the thread
        self._unrecorded = 0  #: requests of the share since the last one that was recorded
        self._short_bytes = 0 if redaction.paths else _SHORT_BYTES
        self._short_encoder, self._encoder = ExchangeEncoder(redaction), ExchangeEncoder(redaction)
        self._storage = storage
        self._place = place
        self._lock = threading.Lock()
        self._queue: list[RawExchange | bytearray] = []  #: exchanges to be encoded, and lines
        # Each has one writer: the event loop, or the thread.
        self._added_bytes = self._removed_bytes = 0
        self._cells = {
            key: (file.cells, index)
            for key in (RECORDED_KEY, *UNRECORDED_KEYS.values())
            if file is not None and (index := file.index_of(key)) is not None
        }
        self._wake = threading.Event()
        self._has_gathered = threading.Event()
        self._is_closing = False
        self._is_stopped = False
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="cortex-recording", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, for at most two seconds."""
        self._resume()
        self._is_closing = True
        self._wake.set()
        self._has_gathered.set()
        self._thread.join(_CLOSE_S)

    # Event loop, after the answer was sent. `Connection.respond` compares the share and pauses, as this is faster.

    def add(
        self, connection: Connection, status: int, media_type: bytes | None, headers: Sequence[Header], body: bytes
    ) -> None:
        """Record a complete answer of a request that belongs to the share."""
        if connection.is_recordable:
            self._put(connection, status, media_type, headers, body[:MAX_BODY_BYTES], len(body), is_stream=False)

    def begin(
        self, connection: Connection, status: int, media_type: bytes | None, headers: Sequence[Header]
    ) -> StreamedAnswer | None:
        """Begin to record an answer; None if the request is not recorded."""
        if zlib.crc32(connection.request_id) >= self.limit or not connection.is_recordable:
            return None
        if self.is_paused:
            self.skipped += 1
            return None
        return StreamedAnswer(status, media_type, headers)

    def end(self, connection: Connection, answer: StreamedAnswer) -> None:
        """Record the answer, whose last part was sent."""
        self._put(
            connection,
            answer.status,
            answer.media_type,
            answer.headers,
            answer.body,
            answer.size_bytes,
            is_stream=True,
        )

    def _put(
        self,
        connection: Connection,
        status: int,
        media_type: bytes | None,
        headers: Sequence[Header],
        body: bytes,
        size: int,
        is_stream: bool,
    ) -> None:
        if self._pauses:
            self._lose(STOPPED_KEY)
            return
        waiting = self._added_bytes - self._removed_bytes
        if waiting >= MAX_QUEUED_BYTES:
            self._lose(FULL_KEY)
            return
        began_ns = time.thread_time_ns()
        now_ns = time.monotonic_ns()
        request, request_size = connection.recorded_body
        started_ns = connection.started_ns
        fields = (
            connection.request_id,
            time.time_ns(),
            now_ns - (connection.arrived_ns or now_ns),
            (connection.returned_ns or now_ns) - started_ns if started_ns else 0,
            connection.method,
            connection.path_below,
            connection.url.partition(b"?")[2],
            connection.headers,
            request[:MAX_BODY_BYTES],
            request_size,
            status,
            media_type,
            headers,
            body,
            size,
            is_stream,
            self._unrecorded,
        )
        raw = tuple.__new__(RawExchange, fields)
        exchange: RawExchange | bytes = raw
        if request_size + size <= self._short_bytes:
            exchange = self._encoded(raw)
            if not exchange:  # a request of a replay
                return
        self._unrecorded = 0
        self._added_bytes += _size(exchange)
        with self._lock:
            queue = self._queue
            if not isinstance(exchange, bytes):
                queue.append(exchange)
            elif queue and isinstance(lines := queue[-1], bytearray) and len(lines) < _BATCH_BYTES:
                lines += exchange
            else:
                queue.append(bytearray(exchange))
        if not self._wake.is_set():
            self._wake.set()
        if waiting >= _GATHER_BYTES and not self._has_gathered.is_set():
            self._has_gathered.set()
        pause_s = self._cpu_budget.spend(now_ns, time.thread_time_ns() - began_ns, self._thread_ns)
        if pause_s and not self.is_paused:
            self.is_paused = True
            self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self.is_paused = False
        self._lose(LIMITED_KEY, self.skipped)
        self.skipped = 0

    def _encoded(self, exchange: RawExchange) -> RawExchange | bytes:
        try:
            return self._short_encoder.encode(exchange)
        except Exception:
            return exchange  # the thread fails likewise, and counts it

    def _lose(self, key: str, number: int = 1) -> None:
        self._unrecorded += number
        self._count(key, number)

    def _count(self, key: str, number: int = 1) -> None:
        cell = self._cells.get(key)
        if cell is not None:
            cells, index = cell
            cells[index] += number

    @property
    def _pauses(self) -> bool:
        return self._is_stopped and time.monotonic() < self._retry_at

    # Thread.

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._storage.due_s(time.monotonic()))
            self._has_gathered.wait(_GATHER_S)
            self._wake.clear()
            self._has_gathered.clear()
            self._write_queued()
            self._thread_ns = time.thread_time_ns()
        self._write_queued()
        with contextlib.suppress(OSError, StorageError):
            self._storage.close()

    def _write_queued(self) -> None:
        with self._lock:
            queue, self._queue = self._queue, []
        queue.reverse()
        while queue:
            batch: list[RawExchange | bytearray] = []
            size = 0
            while queue and size < _BATCH_BYTES:
                batch.append(queue.pop())
                size += _size(batch[-1])
            if self._pauses:
                number = sum(1 if isinstance(each, RawExchange) else each.count(b"\n") for each in batch)
                self._count(FAILED_KEY, number)
            else:
                self._attempt(partial(self._write, batch))
            self._removed_bytes += size
        self._attempt(lambda: self._storage.flush(time.monotonic()))

    def _write(self, batch: list[RawExchange | bytearray]) -> None:
        lines: list[bytes | bytearray] = []
        for each in batch:
            try:
                lines.append(each if isinstance(each, bytearray) else self._encoder.encode(each))
            except Exception:  # values that are nested too deeply, say; the others are recorded
                self._count(FAILED_KEY)
        content = b"".join(lines)
        if content:
            number = content.count(b"\n")
            try:
                self._storage.write(content)
            except BaseException:
                self._count(FAILED_KEY, number)
                raise
            self._count(RECORDED_KEY, number)
            if self._is_stopped:
                self._is_stopped = False
                write_log(f"recording of requests to {self._place} continues\n")

    def _attempt(self, work: Callable[[], None]) -> None:
        """Write; if that fails, stop recording for a while."""
        try:
            work()
        except Exception as error:  # whatever it is, requests are served
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            self._retry_at = time.monotonic() + RETRY_S
            if not self._is_stopped:
                write_log(f"recording of requests to {self._place} stopped: {reason}; requests are served as before\n")
            self._is_stopped = True


def _size(exchange: RawExchange | bytes | bytearray) -> int:
    if isinstance(exchange, RawExchange):
        return len(exchange.request) + len(exchange.answer) + _FIXED_BYTES
    return len(exchange)


def open_exchange_writer(
    spec: ReplicaSpec, file: MetricFile | None, loop: asyncio.AbstractEventLoop
) -> ExchangeWriter | None:
    """Start to record the requests of this process; None if its API does not record."""
    if not spec.record_share:
        return None
    index = os.environ.get("CORTEX_PROCESS_INDEX", "0")

    def head(started: datetime) -> bytes:
        return encode_head(
            api=spec.api,
            revision=spec.revision,
            replica=spec.id,
            process=int(index),
            started=started,
            redact=list(spec.record_redact),
            share=spec.record_share,
        )

    name = f"{spec.id}-{index}-{os.getpid()}"
    storage: RecordingStorage
    if "://" in spec.record_to:
        place = f"{spec.record_to.rstrip('/')}/{spec.api}"
        storage = BucketStorage(_Bucket(place), name, head, spec.record_max_bytes)
    else:
        place = str(Path(spec.record_to) / spec.api)
        storage = FolderStorage(Path(place), name, head, spec.record_max_bytes)
    values = (
        *secret_values({"handler": {"env": spec.env, "config": spec.config}}),
        *secrets_of_environment(os.environ),
    )
    redaction = Redaction.parse(spec.record_redact, values)
    writer = ExchangeWriter(spec.record_share, spec.record_max_cpu, redaction, storage, file, place, loop)
    writer.start()
    return writer


class _Bucket:
    """The objects below a URL, with the credentials of this process's environment."""

    def __init__(self, url: str) -> None:
        self._url = url

    def put(self, name: str, content: bytes) -> None:
        """Create an object. Raises: StorageError."""
        from cortex.storage.client import write  # noqa: PLC0415 - other processes start faster

        asyncio.run(write(f"{self._url}/{name}", content, os.environ))

    def sizes(self) -> list[tuple[str, int]]:
        """List all objects by name and size in bytes. Raises: StorageError."""
        from cortex.storage.client import list_objects  # noqa: PLC0415

        return [(item.name, item.size_bytes) for item in asyncio.run(list_objects(self._url, os.environ))]

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. Raises: StorageError."""
        from cortex.storage.client import delete  # noqa: PLC0415

        for name in names:
            asyncio.run(delete(f"{self._url}/{name}", os.environ))
