"""The access logs of all gateways as the stream of an answer: the lines of one API, past ones and those to come."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import UTC, datetime

from starlette.responses import StreamingResponse

from cortex.errors import EngineError
from cortex.gateway.access_log import AccessSource, Fields
from cortex.operator.http.log_view import show_access

_Batches = AsyncGenerator[list[Fields], None]


def stream_access_log(
    sources: Sequence[AccessSource], api: str, request: str | None, follow: bool, tail: int, is_json: bool
) -> StreamingResponse:
    """Answer with the last `tail` lines of an API, or of one request; with `follow`, go on with what is written."""
    lines = _lines([source.access(api, request, tail, follow) for source in sources], tail)
    texts = (show_access(fields, is_json) async for fields in lines)
    return StreamingResponse(texts, media_type="text/plain; charset=utf-8")


async def _lines(sources: Sequence[_Batches], tail: int) -> AsyncIterator[Fields]:
    """Yield what all had in the order of time, then what comes as it comes."""
    came: asyncio.Queue[list[Fields] | None] = asyncio.Queue(maxsize=len(sources))
    tasks = []
    try:
        past = await asyncio.gather(*(_first(source) for source in sources))
        for fields in deque(heapq.merge(*past, key=lambda fields: str(fields.get("time"))), maxlen=tail):
            yield fields
        tasks = [asyncio.create_task(_pass_on(source, came)) for source in sources]
        left = len(tasks)
        while left:
            found = await came.get()
            if found is None:
                left -= 1
            for fields in found or ():
                yield fields
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(source.aclose() for source in sources))


async def _first(source: _Batches) -> list[Fields]:
    try:
        return await anext(source, [])
    except EngineError as error:
        return [_missing(error)]


async def _pass_on(source: _Batches, came: asyncio.Queue[list[Fields] | None]) -> None:
    try:
        async for found in source:
            if found:
                await came.put(found)
    except EngineError as error:
        await came.put([_missing(error)])
    await came.put(None)


def _missing(error: EngineError) -> Fields:
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    return {"time": at, "error": f"lines of a node are missing: {error}"}
