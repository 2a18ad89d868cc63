"""The readiness sample of a gRPC API: calls of its rpcs without a client, before the process is ready.

The sample is the request in JSON of the only rpc of the service, as clients send it, or an object with the requests of
one or more rpcs by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from cortex.errors import UserError
from cortex.predictor.binding import result_kind
from cortex.predictor.protobuf import BoundRpc, BoundService
from cortex.worker.grpc.context import AbortedError, Context
from cortex.worker.grpc.messages import json_messages, message_of, parse_json
from cortex.worker.grpc.wire import RpcError


def call_sample(service: BoundService, body: bytes, loop: asyncio.AbstractEventLoop) -> None:
    """Call the rpcs of a sample one after the other. Raises: UserError, and what user code raises."""
    for rpc, request in _requests(service, body):
        try:
            messages = [parse_json(rpc, part) for part in json_messages(request, rpc.name, rpc.request_streams)]
        except RpcError as error:
            raise UserError(error.message) from None
        context = Context(None, (), "ipv4:127.0.0.1", None)
        with contextlib.suppress(AbortedError):
            _call(rpc, messages, context, loop)
        if (code := context.code()) not in (None, grpc.StatusCode.OK):
            raise UserError(f"{rpc.name} ended with the status {code.name}: {context.details()}")


def _requests(service: BoundService, body: bytes) -> list[tuple[BoundRpc, bytes]]:
    """Return the requests in JSON. Raises: UserError."""
    if len(service.rpcs) == 1:
        return [(next(iter(service.rpcs.values())), body)]
    found = json.loads(body)
    if not isinstance(found, dict) or not found or not found.keys() <= service.rpcs.keys():
        raise UserError(f"it must be an object with the request of one or more of {', '.join(service.rpcs)}")
    return [(service.rpcs[name], json.dumps(request).encode()) for name, request in found.items()]


def _call(rpc: BoundRpc, messages: list[Any], context: Context, loop: asyncio.AbstractEventLoop) -> None:
    if not rpc.request_streams:
        request = messages[0]
    else:
        request = _stream(messages) if rpc.is_async else iter(messages)
    if rpc.is_async:
        loop.run_until_complete(_await(rpc, request, context))
        return
    result = rpc.call(request, context)
    results = result if rpc.response_streams and isinstance(result, Iterable) else [result]
    for each in results:
        _check(rpc, each, context)


async def _await(rpc: BoundRpc, request: Any, context: Context) -> None:
    result = rpc.call(request, context)
    if result_kind(result) == "async":
        result = await result
    if rpc.response_streams:
        async for each in result:
            _check(rpc, each, context)
    else:
        _check(rpc, result, context)


async def _stream(messages: list[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


def _check(rpc: BoundRpc, result: Any, context: Context) -> None:
    """Check that a result is a message of the rpc. Raises: UserError; ParseError for a dict with other fields."""
    try:
        message_of(rpc, result)
    except TypeError as error:
        if context.code() is None:  # else the status is the response
            raise UserError(str(error)) from None
