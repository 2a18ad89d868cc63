"""HTTP responses that stream log lines, merged from this machine and the nodes of a cluster.

`stream_logs` streams the lines of an API's replicas or a job's workers, `stream_access_log` those of the gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime

from starlette.responses import StreamingResponse

from cortex.engine.log_writer import SUPERVISOR
from cortex.engine.logs import LogLine, LogSource
from cortex.errors import EngineError, InputError
from cortex.gateway.access_log import AccessSource, Fields
from cortex.operator.http.log_format import LogForm, format_access

_MEDIA_TYPE = "text/plain; charset=utf-8"
#: Interval of the checks whether a followed log is complete.
_OVER_POLL_S = 1.0
_REPLICA = re.compile(r"[a-z0-9][-a-z0-9]{0,127}")


async def _never() -> bool:
    return False


def stream_logs(
    sources: Sequence[LogSource],
    folder: str,
    replica: str | None,
    follow: bool,
    tail: int,
    is_over: Callable[[], Awaitable[bool]] = _never,
    form: LogForm = LogForm(),
) -> StreamingResponse:
    """Stream the lines of one folder of logs in order of time; `tail` limits the lines that exist already.

    `replica` selects one replica, `form` filters and formats the lines. With `follow` the response continues with new
    lines until `is_over`. Raises: InputError.
    """
    _check_replica(replica)
    if follow:
        lines = _follow(sources, folder, replica, tail, is_over, form)
    else:
        lines = _past(sources, folder, replica, tail, form)
    return StreamingResponse(lines, media_type=_MEDIA_TYPE)


async def read_logs(
    sources: Sequence[LogSource], folder: str, replica: str | None, tail: int, form: LogForm
) -> Sequence[LogLine]:
    """Return the last `tail` lines that `form` selects, in order of time. Raises: InputError."""
    _check_replica(replica)
    # Filtering by request needs all lines: `tail` then counts those that match.
    read_tail = None if form.request is not None else tail
    found = await asyncio.gather(*(_read(source, folder, replica, read_tail) for source in sources))
    return deque(filter(form.matches, heapq.merge(*found, key=lambda line: line.at)), maxlen=tail)


async def _past(
    sources: Sequence[LogSource], folder: str, replica: str | None, tail: int, form: LogForm
) -> AsyncIterator[str]:
    for line in await read_logs(sources, folder, replica, tail, form):
        yield form.format(line)


def _check_replica(replica: str | None) -> None:
    if replica is not None and not _REPLICA.fullmatch(replica):
        raise InputError(f"{replica!r} is not a replica id")


async def _read(source: LogSource, folder: str, replica: str | None, tail: int | None) -> list[LogLine]:
    try:
        return [line async for lines in source.logs(folder, replica, tail, False) for line in lines]
    except EngineError as error:
        return [_missing_line(error)]


async def _follow(
    sources: Sequence[LogSource],
    folder: str,
    replica: str | None,
    tail: int,
    is_over: Callable[[], Awaitable[bool]],
    form: LogForm,
) -> AsyncIterator[str]:
    follower = _Follower(sources, folder, replica, tail)
    loop = asyncio.get_running_loop()
    check_at, over = loop.time(), False
    try:
        while True:
            if not over and loop.time() >= check_at:
                check_at, over = loop.time() + _OVER_POLL_S, await is_over()
                if over:
                    follower.begin_last_poll()
            lines = await follower.next(max(check_at - loop.time(), 0.0) if not over else _OVER_POLL_S)
            if text := "".join(form.format(line) for line in lines if form.matches(line)):
                yield text
            if over and follower.is_at_end:
                return
    finally:
        await follower.close()


class _Follower:
    """Reads several log sources concurrently."""

    def __init__(self, sources: Sequence[LogSource], folder: str, replica: str | None, tail: int) -> None:
        self._queue: asyncio.Queue[list[LogLine]] = asyncio.Queue(maxsize=len(sources) + 1)
        self._empty_polls = [0] * len(sources)
        self._required_polls = [0] * len(sources)
        self._tasks = [
            asyncio.create_task(self._forward(number, source.logs(folder, replica, tail, True)))
            for number, source in enumerate(sources)
        ]

    def begin_last_poll(self) -> None:
        """Have `is_at_end` require an empty poll of each source that begins after this call."""
        self._required_polls = [polls + 2 for polls in self._empty_polls]  # one may be in progress

    @property
    def is_at_end(self) -> bool:
        """Return True if no line from before `begin_last_poll` can be outstanding."""
        sources = zip(self._tasks, self._empty_polls, self._required_polls, strict=True)
        return self._queue.empty() and all(task.done() or polls >= required for task, polls, required in sources)

    async def next(self, timeout_s: float) -> list[LogLine]:
        """Return the next lines; none after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        return []

    async def close(self) -> None:
        """Stop reading."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(self, number: int, batches: AsyncGenerator[list[LogLine], None]) -> None:
        try:
            async for lines in batches:
                if lines:
                    await self._queue.put(lines)
                else:
                    self._empty_polls[number] += 1
        except EngineError as error:
            await self._queue.put([_missing_line(error)])
        finally:
            await batches.aclose()


def _missing_line(error: EngineError) -> LogLine:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return LogLine(at, "operator", 0, SUPERVISOR, f"log lines of a node are missing: {error}")


# Access logs.


def stream_access_log(
    sources: Sequence[AccessSource], api: str, request: str | None, follow: bool, tail: int, is_json: bool
) -> StreamingResponse:
    """Stream the last `tail` access log lines of an API, or of one request; with `follow`, continue with new lines."""
    lines = _access_lines([source.access(api, request, tail, follow) for source in sources], tail)
    texts = (format_access(fields, is_json) async for fields in lines)
    return StreamingResponse(texts, media_type=_MEDIA_TYPE)


async def _access_lines(sources: Sequence[AsyncGenerator[list[Fields], None]], tail: int) -> AsyncIterator[Fields]:
    """Yield the past lines of all sources in order of time, then new lines as they arrive."""
    queue: asyncio.Queue[list[Fields] | None] = asyncio.Queue(maxsize=len(sources))
    tasks = []
    try:
        past = await asyncio.gather(*(_first_batch(source) for source in sources))
        for fields in deque(heapq.merge(*past, key=lambda fields: str(fields.get("time"))), maxlen=tail):
            yield fields
        tasks = [asyncio.create_task(_forward_access(source, queue)) for source in sources]
        open_sources = len(tasks)
        while open_sources:
            batch = await queue.get()
            if batch is None:
                open_sources -= 1
            for fields in batch or ():
                yield fields
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(source.aclose() for source in sources))


async def _first_batch(source: AsyncGenerator[list[Fields], None]) -> list[Fields]:
    try:
        return await anext(source, [])
    except EngineError as error:
        return [_missing_access(error)]


async def _forward_access(
    source: AsyncGenerator[list[Fields], None], queue: asyncio.Queue[list[Fields] | None]
) -> None:
    try:
        async for batch in source:
            if batch:
                await queue.put(batch)
    except EngineError as error:
        await queue.put([_missing_access(error)])
    await queue.put(None)


def _missing_access(error: EngineError) -> Fields:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    return {"time": at, "error": f"log lines of a node are missing: {error}"}
