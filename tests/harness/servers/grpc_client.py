"""A gRPC client of `NUMBERS`, a service with calls of all four forms; grpcio's own, without generated stubs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cortex.predictor.protobuf import load_definition
from harness.wait import PATIENCE_S

# Tests start processes while channels are open; these processes never use them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

NUMBERS = """
syntax = "proto3";
package PACKAGE;

service Numbers {
    rpc Double (Number) returns (Number);
    rpc Sum (stream Number) returns (Number);
    rpc Count (Number) returns (stream Number);
    rpc Echo (stream Number) returns (stream Number);
    rpc Do (Text) returns (Text);
}
message Number { int64 value = 1; bytes ballast = 2; }
message Text { string text = 1; }
"""


class NumbersClient:
    """The methods of the service by name, as callables of grpcio: `client.Double(client.number(2))`."""

    def __init__(self, channel: Any, folder: Path, package: str) -> None:
        (folder / f"client_{package}.proto").write_text(NUMBERS.replace("PACKAGE", package))
        self.messages: Any = load_definition(folder, f"client_{package}.proto")
        self.channel = channel
        for rpc in self.messages.service.methods:
            forms = {False: "unary", True: "stream"}
            make = getattr(channel, f"{forms[rpc.client_streaming]}_{forms[rpc.server_streaming]}")
            response: Any = getattr(self.messages.module, rpc.output_type.name)
            serialize: Callable[[Any], bytes] = lambda message: message.SerializeToString()  # noqa: E731
            path = f"/{package}.Numbers/{rpc.name}"
            setattr(self, rpc.name, make(path, request_serializer=serialize, response_deserializer=response.FromString))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def number(self, value: int, ballast: bytes = b"") -> Any:
        return self.messages.module.Number(value=value, ballast=ballast)

    def do(self, text: str, **options: Any) -> str:
        return str(self.Do(self.messages.module.Text(text=text), **{"timeout": PATIENCE_S} | options).text)


@contextmanager
def numbers_client(
    address: str, folder: Path, package: str, credentials: Any = None, options: Any = ()
) -> Iterator[NumbersClient]:
    """Connect to a gateway."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), *options]
    if credentials is None:
        channel = grpc.insecure_channel(address, unlimited)
    else:
        channel = grpc.secure_channel(address, credentials, unlimited)
    with channel:
        yield NumbersClient(channel, folder, package)


def stalled_call(address: tuple[str, int], path: str) -> socket.socket:
    """Begin a call by frames of HTTP/2 whose message never becomes complete; return its connection."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "content-type": "application/grpc",
    }
    literal = (bytes((0, len(name))) + name.encode() + bytes((len(v),)) + v.encode() for name, v in fields.items())
    sock = socket.create_connection(address)
    settings, headers = _frame(4, 0, 0, b""), _frame(1, 4, 1, b"".join(literal))
    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + headers + _frame(0, 0, 1, b"\0\0\0\0\x64ab"))
    return sock


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def failure(call: Callable[[], Any]) -> Any:
    """Return the `grpc.RpcError` of a call that fails."""
    try:
        result = call()
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"the call succeeded: {result!r}")
