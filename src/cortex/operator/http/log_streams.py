"""The lines of one folder of logs as the stream of an answer: of an API's replicas, or of a job's workers.

They come from this machine, and from each node of a cluster.
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

from cortex.engine.log_files import SUPERVISOR, LogLine
from cortex.engine.log_source import LogSource
from cortex.errors import EngineError, InputError
from cortex.operator.http.log_view import LogForm

#: How often it is asked whether what is followed is over.
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
    """Answer with the lines of all replicas, or of one, in the order of time; `tail` limits those already there.

    `form` says which of these are shown, and how. With `follow` the answer goes on with what is written, until
    `is_over`. Raises: InputError.
    """
    if replica is not None and not _REPLICA.fullmatch(replica):
        raise InputError(f"{replica!r} is not the id of a replica")
    if follow:
        lines = _follow(sources, folder, replica, tail, is_over, form)
    else:
        lines = _past(sources, folder, replica, tail, form)
    return StreamingResponse(lines, media_type="text/plain; charset=utf-8")


async def _past(
    sources: Sequence[LogSource], folder: str, replica: str | None, tail: int, form: LogForm
) -> AsyncIterator[str]:
    # Which of the lines are of a request is known only once all are read.
    read = None if form.request is not None else tail
    found = await asyncio.gather(*(_read(source, folder, replica, read) for source in sources))
    for line in deque(filter(form.takes, heapq.merge(*found, key=lambda line: line.at)), maxlen=tail):
        yield form.show(line)


async def _read(source: LogSource, folder: str, replica: str | None, tail: int | None) -> list[LogLine]:
    try:
        return [line async for lines in source.logs(folder, replica, tail, False) for line in lines]
    except EngineError as error:
        return [_missing(error)]


async def _follow(
    sources: Sequence[LogSource],
    folder: str,
    replica: str | None,
    tail: int,
    is_over: Callable[[], Awaitable[bool]],
    form: LogForm,
) -> AsyncIterator[str]:
    following = _Following(sources, folder, replica, tail)
    loop = asyncio.get_running_loop()
    ask_at, over = loop.time(), False
    try:
        while True:
            if not over and loop.time() >= ask_at:
                ask_at, over = loop.time() + _OVER_POLL_S, await is_over()
                if over:
                    following.look_once_more()
            lines = await following.next(max(ask_at - loop.time(), 0.0) if not over else _OVER_POLL_S)
            if text := "".join(form.show(line) for line in lines if form.takes(line)):
                yield text
            if over and following.is_at_the_end:
                return
    finally:
        await following.close()


class _Following:
    """All sources at once."""

    def __init__(self, sources: Sequence[LogSource], folder: str, replica: str | None, tail: int) -> None:
        self._came: asyncio.Queue[list[LogLine]] = asyncio.Queue(maxsize=len(sources) + 1)
        self._looks = [0] * len(sources)  #: how often each found nothing
        self._wanted = [0] * len(sources)
        self._tasks = [
            asyncio.create_task(self._pass_on(number, source.logs(folder, replica, tail, True)))
            for number, source in enumerate(sources)
        ]

    def look_once_more(self) -> None:
        """Have `is_at_the_end` say whether each source has since looked and found nothing."""
        self._wanted = [looks + 2 for looks in self._looks]  # one may have been under way

    @property
    def is_at_the_end(self) -> bool:
        """Tell whether there can be no more lines of before `look_once_more`."""
        done = zip(self._tasks, self._looks, self._wanted, strict=True)
        return self._came.empty() and all(task.done() or looks >= wanted for task, looks, wanted in done)

    async def next(self, timeout_s: float) -> list[LogLine]:
        """Return what came; nothing if that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._came.get()
        return []

    async def close(self) -> None:
        """End all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass_on(self, number: int, batches: AsyncGenerator[list[LogLine], None]) -> None:
        try:
            async for lines in batches:
                if lines:
                    await self._came.put(lines)
                else:
                    self._looks[number] += 1
        except EngineError as error:
            await self._came.put([_missing(error)])
        finally:
            await batches.aclose()


def _missing(error: EngineError) -> LogLine:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return LogLine(at, "operator", 0, SUPERVISOR, f"lines of a node are missing: {error}")
