"""Heads of requests to a command's server, and of its responses."""

from __future__ import annotations

import pytest

from cortex.worker.commands.forwarding import request_head, response_headers, server_target, upgrade_head


@pytest.mark.parametrize(
    ("target", "endpoint", "strips", "sent", "prefix"),
    [
        (b"/llm/v1/models?a=1", b"/llm", True, b"/v1/models?a=1", b"/llm"),
        (b"/llm/v1/models", b"/llm", False, b"/llm/v1/models", b"/llm"),
        (b"/llm", None, True, b"/", b"/llm"),
        (b"/llm/", None, True, b"/", b"/llm"),
        (b"/llm?a=/llm", None, True, b"/?a=/llm", b"/llm"),
        (b"/llm", None, False, b"/llm", b"/llm"),
        (b"/llm//x", b"/llm", True, b"/x", b"/llm"),
        (b"/a/b%20c/d", b"/a", True, b"/b%20c/d", b"/a"),
    ],
)
def test_the_server_gets_the_path_below_the_endpoint(
    target: bytes, endpoint: bytes | None, strips: bool, sent: bytes, prefix: bytes
) -> None:
    assert server_target(target, endpoint, strips) == (sent, prefix)


def test_headers_of_one_connection_are_not_passed_on() -> None:
    headers = [
        (b"host", b"example.com"),
        (b"connection", b"close, X-Once"),
        (b"x-once", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"expect", b"100-continue"),
        (b"x-forwarded-prefix", b"/of-the-client"),
        (b"x-cortex-endpoint", b"/llm"),
        (b"content-length", b"3"),
    ]
    assert request_head(b"POST", b"/x", headers, b"/llm", is_upgrade=False) == (
        b"POST /x HTTP/1.1\r\nhost: example.com\r\ncontent-length: 3\r\nx-forwarded-prefix: /llm\r\n"
    )


def test_a_client_cannot_remove_what_frames_its_request_and_says_where_it_comes_from() -> None:
    headers = [
        (b"host", b"example.com"),
        (b"connection", b"close, Content-Length,host , x-forwarded-for, X-Cortex-Request-ID, x-forwarded-proto"),
        (b"connection", b"x-forwarded-host, transfer-encoding, x-mine"),
        (b"x-mine", b"1"),
        (b"content-length", b"3"),
        (b"x-forwarded-for", b"10.0.0.1"),
        (b"x-forwarded-host", b"example.com"),
        (b"x-forwarded-proto", b"https"),
        (b"x-cortex-request-id", b"1"),
    ]
    assert request_head(b"POST", b"/x", headers, b"/llm", is_upgrade=False) == (
        b"POST /x HTTP/1.1\r\nhost: example.com\r\ncontent-length: 3\r\nx-forwarded-for: 10.0.0.1\r\n"
        b"x-forwarded-host: example.com\r\nx-forwarded-proto: https\r\nx-cortex-request-id: 1\r\n"
        b"x-forwarded-prefix: /llm\r\n"
    )


def test_a_request_for_a_websocket_asks_the_server_for_it() -> None:
    head = request_head(b"GET", b"/x", [(b"upgrade", b"websocket"), (b"connection", b"Upgrade")], b"/llm", True)
    assert head.endswith(b"connection: upgrade\r\nupgrade: websocket\r\n")
    answer = upgrade_head([(b"upgrade", b"websocket"), (b"sec-websocket-accept", b"k"), (b"date", b"now")])
    assert answer == (
        b"HTTP/1.1 101 Switching Protocols\r\nsec-websocket-accept: k\r\n"
        b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("location", "strips", "moved"),
    [
        (b"/login?a=1", True, b"/llm/login?a=1"),
        (b"/llm/login", True, b"/llm/login"),
        (b"/llm", True, b"/llm"),
        (b"/llmx", True, b"/llm/llmx"),
        (b"login", True, b"login"),
        (b"//other.com/login", True, b"//other.com/login"),
        (b"https://other.com/login", True, b"https://other.com/login"),
        (b"http://example.com:8888/login", True, b"http://example.com:8888/llm/login"),
        (b"https://example.com:8888/llm/login", True, b"https://example.com:8888/llm/login"),
        (b"http://example.com:88880/login", True, b"http://example.com:88880/login"),
        (b"/login", False, b"/login"),
    ],
)
def test_redirects_stay_below_the_endpoint(location: bytes, strips: bool, moved: bytes) -> None:
    headers = [(b"location", location), (b"content-length", b"0"), (b"date", b"now"), (b"keep-alive", b"timeout=5")]
    assert response_headers(headers, b"/llm", strips, b"example.com:8888") == ((b"location", moved),)
