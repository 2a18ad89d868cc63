"""Readiness check: a process must answer a sample request before it receives others, which also warms up lazy code.

The sample is neither counted nor tracked.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from cortex.errors import UserError
from cortex.payloads.validation import BadBody, PayloadError
from cortex.predictor.binding import BoundMethod, result_kind, split_callback
from cortex.predictor.loader import BoundPredictor
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.predictor.user_forks import end_if_forked, process_id
from cortex.worker.channel import Channel
from cortex.worker.requests.batching import batched_method, for_one
from cortex.worker.requests.payload import (
    JSON,
    encode,
    encode_chunk,
    make_headers,
    make_query_params,
    parse,
    parse_typed,
)
from cortex.worker.spec import ReplicaSpec


def check_readiness(
    spec: ReplicaSpec, predictor: BoundPredictor, loop: asyncio.AbstractEventLoop, channel: Channel
) -> None:
    """Call the method for POST, or rpcs, with the API's sample, if it has one, and read the complete result.

    Call it on the main thread, before `loop` runs. A call that exceeds the request timeout ends the process.
    Raises: UserError.
    """
    if spec.readiness is None:
        return
    method = predictor.methods.get("POST")
    if method is None and predictor.service is None:
        raise UserError(f"the readiness sample {spec.readiness} can't be sent: no method answers POST")
    watchdog = threading.Timer(spec.timeout_s, _time_out, (spec, channel, threading.get_ident()))
    watchdog.daemon = True
    watchdog.start()
    parent = process_id()
    try:
        try:
            if method is not None:
                _call(spec, predictor, method, loop)
            elif predictor.service is not None:
                from cortex.worker.grpc.sample_calls import call_sample  # noqa: PLC0415 - other APIs have no grpcio

                call_sample(predictor.service, Path(spec.readiness).read_bytes(), loop)
        finally:
            end_if_forked(parent)
    except BaseException as error:  # the edge of the user's code
        is_ours = isinstance(error, UserError | BadBody | PayloadError)
        text = error.traceback if isinstance(error, UserError) else "" if is_ours else format_user_traceback(error)
        raise UserError(_message(spec, str(error) if is_ours else describe(error)), text) from error
    finally:
        watchdog.cancel()


def _call(spec: ReplicaSpec, predictor: BoundPredictor, method: BoundMethod, loop: asyncio.AbstractEventLoop) -> None:
    body = Path(spec.readiness or "").read_bytes()
    payload = parse(JSON, body) if method.payload_type is None else parse_typed(method.payload_type, JSON, body)
    query_params = make_query_params(b"") if method.needs_query_params else None
    headers = make_headers([(b"content-type", JSON)]) if method.needs_headers else None
    if batched_method(spec, predictor) is not None:
        method = for_one(method)
    result = method.call(payload, query_params, headers)

    async def wait() -> Any:
        return await result

    async def exhaust() -> None:
        async for chunk in result:
            encode_chunk(chunk)

    if result_kind(result) == "async":
        result = loop.run_until_complete(wait())
    kind = result_kind(result)
    if kind == "generator":
        for chunk in result:
            encode_chunk(chunk)
    elif kind == "async_generator":
        loop.run_until_complete(exhaust())
    else:
        encode(split_callback(result, predictor.generation)[0], predictor.generation.json_only)


def _time_out(spec: ReplicaSpec, channel: Channel, thread: int) -> None:
    """End the process, even if its main thread is stuck."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    of_user = [line for line in stack if line.filename.startswith(spec.project_dir)]
    text = "".join(["Traceback (most recent call last):\n", *traceback.format_list(of_user)]) if of_user else ""
    message = _message(spec, f"no answer within {spec.timeout_s:g} s")
    sys.stderr.write(f"{text}{message}\n")
    sys.stderr.flush()
    channel.send_failure(message, text)
    os._exit(1)


def _message(spec: ReplicaSpec, reason: str) -> str:
    return f"the readiness sample {spec.readiness} failed: {reason}"
