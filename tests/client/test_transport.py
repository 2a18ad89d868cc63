"""Transport to the operator: responses, classes of errors, streams, broken connections."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from cortex import errors
from cortex.client.transport import Transport, encode_query
from cortex.errors import ConfigError, CortexError, Diagnostic, InputError, OperatorUnavailableError, UserError
from harness.servers.answering import Server, reply

pytestmark = pytest.mark.processes


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_a_call_sends_token_query_and_body_and_decodes_the_response(server: Server) -> None:
    server.answering = lambda handler: reply(handler, 200, b'{"a": [1]}')

    answer = Transport(server.url, "secret").call(
        "POST", "/v1/x", query={"force": True, "left_out": None, "name": "a b&c"}, body=b"zip", content_type="a/b"
    )

    assert answer == {"a": [1]}
    method, path, headers, body = server.requests[0]
    assert (method, path, body) == ("POST", "/v1/x?force=true&name=a+b%26c", b"zip")
    assert headers["authorization"] == "Bearer secret"
    assert headers["content-type"] == "a/b"


def _all_errors(base: type[CortexError] = CortexError) -> Iterator[type[CortexError]]:
    if "code" in vars(base) and base is not errors.UnknownWorkloadError:  # it has the code of NotFoundError
        yield base
    for kind in base.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from _all_errors(kind)


@pytest.mark.parametrize("kind", [kind for kind in _all_errors() if kind is not ConfigError])
def test_every_error_code_raises_its_class(server: Server, kind: type[CortexError]) -> None:
    body = json.dumps({"error": "what, where, why", "code": kind.code, "traceback": "frames"}).encode()
    server.answering = lambda handler: reply(handler, kind.http_status, body)

    with pytest.raises(CortexError) as caught:
        Transport(server.url).call("GET", "/v1/apis")

    assert type(caught.value) is kind
    assert str(caught.value) == "what, where, why"
    if isinstance(caught.value, UserError):
        assert caught.value.traceback == "frames"


def test_the_address_of_a_gateway_is_reported_as_such(server: Server) -> None:
    server.answering = lambda handler: reply(handler, 404, b'{"error": "no API has the path /v1/apis"}')
    transport = Transport(server.url, hint="look there")

    for ask in (lambda: transport.call("GET", "/v1/apis"), lambda: next(transport.blocks("/v1/apis"))):
        with pytest.raises(InputError) as caught:
            ask()
        assert (
            str(caught.value)
            == f"{server.url} is the address of a gateway; use the address of its operator; look there"
        )
        assert caught.value.exit_code == 2


def test_a_config_error_keeps_every_diagnostic(server: Server) -> None:
    found = [Diagnostic("cortex.yaml", 3, 5, "a.b", "wrong", "do this"), Diagnostic("h.py", 1, 1, "", "odd", "")]
    body = json.dumps({"error": "x", "code": "bad_config", "diagnostics": [item.__dict__ for item in found]}).encode()
    server.answering = lambda handler: reply(handler, 400, body)

    with pytest.raises(ConfigError) as caught:
        Transport(server.url).call("POST", "/v1/deploy", body=b"")

    assert list(caught.value.diagnostics) == found


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b"<html>", errors.NotFoundError),
        (401, b"", errors.UnauthorizedError),
        (409, b"[]", errors.ConflictError),
        (422, b'{"detail": "bad"}', InputError),
        (418, b'{"code": "from the future", "error": "new"}', InputError),
        (502, b"Bad Gateway", CortexError),
    ],
)
def test_responses_of_other_servers_raise_errors_by_status(
    server: Server, status: int, body: bytes, kind: type[CortexError]
) -> None:
    server.answering = lambda handler: reply(handler, status, body)

    with pytest.raises(CortexError) as caught:
        Transport(server.url).call("GET", "/")

    assert type(caught.value) is kind


def test_a_response_that_is_not_json_raises_a_cortex_error(server: Server) -> None:
    server.answering = lambda handler: reply(handler, 200, b"<html>")

    with pytest.raises(CortexError, match="not JSON"):
        Transport(server.url).call("GET", "/")


def test_a_refused_connection_explains_what_to_start() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        with pytest.raises(OperatorUnavailableError, match="connection refused.*cortex up"):
            Transport(url).call("GET", "/")


def test_an_operator_that_dies_during_a_request_is_unavailable(server: Server) -> None:
    server.answering = lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)

    with pytest.raises(OperatorUnavailableError):
        Transport(server.url).call("GET", "/")


def test_an_error_response_before_the_end_of_the_upload_is_read() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    body = json.dumps({"error": "too large", "code": "bad_input"}).encode()

    def answer_early() -> None:
        connection, _ = listener.accept()
        connection.recv(1024)
        connection.sendall(b"HTTP/1.1 413 Large\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass
        connection.close()

    thread = threading.Thread(target=answer_early)
    thread.start()
    try:
        with pytest.raises(InputError, match="too large"):
            Transport(f"http://127.0.0.1:{listener.getsockname()[1]}").call("POST", "/", body=bytes(8 << 20))
    finally:
        thread.join()
        listener.close()


def test_lines_are_yielded_as_soon_as_they_are_sent(server: Server) -> None:
    may_go_on = threading.Event()

    def stream(handler: BaseHTTPRequestHandler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"8\r\nfirst\r\n\xff\r\n")
        handler.wfile.flush()
        may_go_on.wait(10)
        handler.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    server.answering = stream
    lines = Transport(server.url).lines("/v1/apis/a/logs", {"follow": True})

    assert next(lines) == "first"
    may_go_on.set()
    assert list(lines) == ["\N{REPLACEMENT CHARACTER}last"]
    assert server.requests[0][1] == "/v1/apis/a/logs?follow=true"


def test_lines_raise_the_error_of_the_operator(server: Server) -> None:
    server.answering = lambda handler: reply(handler, 404, b'{"error": "a is not deployed", "code": "not_found"}')

    with pytest.raises(errors.NotFoundError, match="a is not deployed"):
        list(Transport(server.url).lines("/v1/apis/a/logs"))


def test_an_empty_query_is_omitted() -> None:
    assert encode_query(None) == encode_query({"a": None}) == ""
