"""The messages of rpcs: from bytes or JSON to objects of protobuf, and back.

Clients of gRPC send messages in bytes; others, and sample requests, send JSON (protobuf's JSON mapping).
"""

from __future__ import annotations

import json
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from cortex.errors import type_name
from cortex.predictor.protobuf import BoundRpc, is_json_object
from cortex.worker.grpc.wire import RpcError


def parse_message(rpc: BoundRpc, data: bytes) -> Any:
    """Return the message of a request in bytes. Raises: RpcError."""
    message = rpc.request_class()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise _invalid(message, grpc.StatusCode.INTERNAL, error) from error
    return message


def parse_json(rpc: BoundRpc, data: bytes) -> Any:
    """Return the message of a request in JSON. Raises: RpcError."""
    message = rpc.request_class()
    if is_json_object(message.DESCRIPTOR) and not data.lstrip().startswith(b"{"):
        # protobuf takes an empty array or text for an empty message.
        raise _invalid(message, grpc.StatusCode.INVALID_ARGUMENT, "it must be a JSON object")
    try:
        json_format.Parse(data, message)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise _invalid(message, grpc.StatusCode.INVALID_ARGUMENT, error) from error
    return message


def _invalid(message: Any, code: grpc.StatusCode, error: Exception | str) -> RpcError:
    return RpcError(code, f"the request is not a valid {message.DESCRIPTOR.full_name}: {error}")


def json_messages(body: bytes, name: str, streams: bool) -> list[bytes]:
    """Return the messages of a request in JSON to the rpc `name`: one object, or an array if the request streams.

    Raises: RpcError.
    """
    if not streams:
        return [body or b"{}"]
    try:
        items = json.loads(body or b"[]")
    except (ValueError, RecursionError) as error:
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"the request body is not JSON: {error}") from error
    if not isinstance(items, list):
        message = f"{name} takes a stream: the request body must be a JSON array of messages"
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, message)
    return [json.dumps(item).encode() for item in items]


def message_of(rpc: BoundRpc, result: Any) -> Any:
    """Return the message that the user's method returned, or the dict of its fields, as a message.

    Raises: TypeError for another result, ParseError for a dict with other fields.
    """
    wanted = rpc.response_class
    if isinstance(result, dict):
        return json_format.ParseDict(result, wanted())
    if getattr(getattr(result, "DESCRIPTOR", None), "full_name", None) != wanted.DESCRIPTOR.full_name:
        raise not_a_message(rpc, result)
    return result


def not_a_message(rpc: BoundRpc, result: Any) -> TypeError:
    """Return the error for a result that is no message of the rpc."""
    verb = "yielded" if rpc.response_streams else "returned"
    name = rpc.response_class.DESCRIPTOR.full_name
    return TypeError(f"{rpc.name} {verb} {type_name(result)}, not {name} or a dict with its fields")


def to_json(rpc: BoundRpc, message: Any) -> bytes:
    """Return a message of a response in JSON; on one line if the response is a stream."""
    indent = None if rpc.response_streams else 2
    text: str = json_format.MessageToJson(message, indent=indent, ensure_ascii=False)
    return text.encode()
