"""The sample that a process must answer before it gets requests: a first call warms up what is made on demand.

It is neither counted nor tracked.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any

from cortex.errors import UserError
from cortex.predictor.loader import BoundMethod, BoundPredictor, result_kind, split_callback
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.replica.batches import batched_method, for_one
from cortex.replica.channel import Channel
from cortex.replica.payload import JSON, BadBody, encode, encode_chunk, make_headers, make_query_params, parse
from cortex.replica.spec import ReplicaSpec


def answer_sample(
    spec: ReplicaSpec, predictor: BoundPredictor, loop: asyncio.AbstractEventLoop, channel: Channel
) -> None:
    """Call the method for POST with the API's sample, if it has one, and take all of the answer.

    On the main thread, before `loop` runs; a call that takes longer than requests may ends the process. Raises:
    UserError.
    """
    if spec.readiness is None:
        return
    method = predictor.methods.get("POST")
    if method is None:
        raise UserError(f"the readiness sample {spec.readiness} can't be sent: no method answers POST")
    watchdog = threading.Timer(spec.timeout_s, _give_up, (spec, channel, threading.get_ident()))
    watchdog.daemon = True
    watchdog.start()
    try:
        _answer(spec, predictor, method, loop)
    except BaseException as error:  # the edge of the user's code
        is_ours = isinstance(error, UserError | BadBody)
        told = error.traceback if isinstance(error, UserError) else "" if is_ours else format_user_traceback(error)
        raise UserError(_failed(spec, str(error) if is_ours else describe(error)), told) from error
    finally:
        watchdog.cancel()


def _answer(spec: ReplicaSpec, predictor: BoundPredictor, method: BoundMethod, loop: asyncio.AbstractEventLoop) -> None:
    payload = parse(JSON, Path(spec.readiness or "").read_bytes())
    query_params = make_query_params(b"") if method.needs_query_params else None
    headers = make_headers([(b"content-type", JSON)]) if method.needs_headers else None
    if batched_method(spec, predictor) is not None:
        method = for_one(method)
    result = _finished(method.call(payload, query_params, headers), loop)
    kind = result_kind(result)
    if kind == "generator":
        for chunk in result:
            encode_chunk(chunk)
    elif kind == "async_generator":
        loop.run_until_complete(_take_all(result))
    else:
        encode(split_callback(result, predictor.generation)[0], predictor.generation.json_only)


def _finished(result: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Return what an awaitable comes to; anything else as it is."""

    async def wait() -> Any:
        return await result

    return loop.run_until_complete(wait()) if result_kind(result) == "async" else result


async def _take_all(chunks: AsyncIterable[Any]) -> None:
    async for chunk in chunks:
        encode_chunk(chunk)


def _give_up(spec: ReplicaSpec, channel: Channel, thread: int) -> None:
    """End the process, whatever its main thread is stuck in."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    of_user = [line for line in stack if line.filename.startswith(spec.project_dir)]
    told = "".join(["Traceback (most recent call last):\n", *traceback.format_list(of_user)]) if of_user else ""
    message = _failed(spec, f"no answer within {spec.timeout_s:g} s")
    sys.stderr.write(f"{told}{message}\n")
    sys.stderr.flush()
    channel.send_failure(message, told)
    os._exit(1)


def _failed(spec: ReplicaSpec, why: str) -> str:
    return f"the readiness sample {spec.readiness} failed: {why}"
