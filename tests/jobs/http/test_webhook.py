"""Webhooks: the request, which responses are success, and the errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from cortex.errors import WebhookError
from cortex.jobs.http.webhook import MAX_BODY_BYTES, forbidden_host, retry_delays, send_webhook

BODY = b'{"job_status": {"status": "succeeded"}}'
ConnectionHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Receiver:
    """A server that records requests and sends a fixed response."""

    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    is_silent: bool = False
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next(line for line in head.split("\r\n") if line.startswith("content-length"))
        self.bodies.append(await reader.readexactly(int(length.split(": ")[1])))
        writer.write(self.answer)
        if self.is_silent:
            await reader.read()
        writer.close()


def post_webhook(
    receiver: ConnectionHandler, path: str = "/", scheme: str = "http", user: str = "", timeout_s: float = 5
) -> None:
    """Send a webhook to a receiver."""

    async def run() -> None:
        server = await asyncio.start_server(receiver, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await send_webhook(f"{scheme}://{user}127.0.0.1:{port}{path}", BODY, "7fff", timeout_s)

    asyncio.run(run())


def webhook_error(
    receiver: ConnectionHandler, path: str = "/", scheme: str = "http", user: str = "", timeout_s: float = 5
) -> str:
    """Return the error of a webhook that fails."""
    with pytest.raises(WebhookError) as error:
        post_webhook(receiver, path, scheme, user, timeout_s)
    return str(error.value)


@pytest.mark.parametrize("status", [b"200 OK", b"201 Created", b"204 No Content", b"202"])
def test_any_2xx_is_success_and_the_request_names_the_job(status: bytes) -> None:
    receiver = Receiver(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
    post_webhook(receiver, "/hooks/a b?x=1&y=é")
    assert receiver.bodies == [BODY]
    lines = receiver.heads[0].split("\r\n")
    assert lines[0] == "POST /hooks/a%20b?x=1&y=%C3%A9 HTTP/1.1"
    assert {"x-cortex-job-id: 7fff", "content-type: application/json", "connection: close"} <= set(lines)
    assert not any(line.startswith("authorization") for line in lines)


def test_user_and_password_of_the_url_are_sent_as_basic_authentication() -> None:
    receiver = Receiver()
    post_webhook(receiver, user="me:s%40crt@")
    assert "authorization: Basic bWU6c0BjcnQ=" in receiver.heads[0].split("\r\n")


def test_informational_responses_are_skipped() -> None:
    post_webhook(
        Receiver(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\n\r\n")
    )
    assert "informational" in webhook_error(Receiver(b"HTTP/1.1 100 Continue\r\n\r\n" * 10))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 500 Oh\r\n\r\n", "answered 500"),
        (b"HTTP/1.1 404 No\r\n\r\n", "answered 404"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\n\r\n", "answered 302; redirects are not followed"),
        (b"", "hung up without an answer"),
        (b"HTTP/1.1 200 OK\r\n", "hung up without an answer"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "is not HTTP/1"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * 100_000 + b"\r\n\r\n", "too long"),
    ],
)
def test_other_responses_are_errors(answer: bytes, words: str) -> None:
    receiver = Receiver(answer)
    text = webhook_error(receiver)
    assert words in text
    assert "http://127.0.0.1:" in text
    assert len(receiver.bodies) == 1


def test_errors_do_not_contain_the_path_or_password() -> None:
    text = webhook_error(Receiver(b"HTTP/1.1 410 Gone\r\n\r\n"), "/services/T0KEN?key=T0KEN", user="me:T0KEN@")
    assert "T0KEN" not in text


def test_a_silent_receiver_fails_after_the_timeout() -> None:
    assert "did not answer within 0.2 s" in webhook_error(Receiver(b"HTTP/1.1 2", is_silent=True), timeout_s=0.2)


def test_an_unreachable_receiver_and_failed_tls_are_reported() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(WebhookError, match="can't be reached"):
            asyncio.run(send_webhook(f"http://127.0.0.1:{unused.getsockname()[1]}/", BODY, "7fff"))

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    assert "secure connection" in webhook_error(plain, scheme="https")


@pytest.mark.parametrize(
    "url", ["ftp://a/", "//a/", "a", "", "file:///etc/passwd", "http://", "http://[", "http://a:99999/", "http://a..b/"]
)
def test_rejects_urls_other_than_http(url: str) -> None:
    with pytest.raises(WebhookError, match="the webhook"):
        asyncio.run(send_webhook(url, BODY, "7fff"))


def test_a_url_cannot_add_a_header() -> None:
    receiver = Receiver()
    post_webhook(receiver, "/a\r\nx-evil: 1")
    assert "x-evil" not in receiver.heads[0].split("\r\n", 1)[1]


def test_rejects_a_body_over_the_limit() -> None:
    with pytest.raises(WebhookError, match="too much"):
        asyncio.run(send_webhook("http://127.0.0.1:9/", b"x" * (MAX_BODY_BYTES + 1), "7fff"))


def test_retry_delays_grow() -> None:
    delays = retry_delays()
    assert list(delays) == sorted(delays)
    assert sum(delays) < 3600


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f.1", "0.0.0.0", "localhost", "LOCALHOST", "a.localhost."),
        *("[::1]", "[::]", "[::ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
        *("10.0.0.1", "172.16.3.4", "192.168.1.1", "100.64.0.1", "169.254.169.254", "192.0.0.192", "168.63.129.16"),
        *("[fd00:ec2::254]", "[fe80::1]", "[fec0::1]", "224.0.0.1", "255.255.255.255", "240.0.0.1"),
    ],
)
def test_addresses_that_are_not_public_are_forbidden(host: str) -> None:
    assert forbidden_host(f"http://me:x@{host}:8080/x", []) == host.lower().strip("[]")
    assert forbidden_host(f"http://{host}/", ["other.host", "192.0.2.0/24"]) is not None


@pytest.mark.parametrize("host", ["example.org", "8.8.8.8", "[2606:4700::1111]", "[64:ff9b::808:808]"])
def test_names_and_public_addresses_are_not(host: str) -> None:
    assert forbidden_host(f"https://{host}/", []) is None


@pytest.mark.parametrize(
    "url", ["http://10.1.2.3/", "http://[::ffff:10.0.0.1]/", "http://localhost/", "http://[fd00::1]"]
)
def test_nor_are_those_in_the_list_of_the_owner(url: str) -> None:
    assert forbidden_host(url, ["10.0.0.0/8", "localhost", "fd00::/8"]) is None


def test_addresses_of_names_are_checked_when_the_webhook_connects() -> None:
    receiver = Receiver()

    async def send(hosts: list[str]) -> None:
        async with await asyncio.start_server(receiver, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await send_webhook(f"http://localhost:{port}/hook", BODY, "7fff", hosts=hosts)

    with pytest.raises(WebhookError, match=r"is at .*127\.0\.0\.1.*, which is not public; use `cortex submit`, or add"):
        asyncio.run(send(["127.0.0.2/32", "other.host"]))
    assert receiver.heads == []
    asyncio.run(send(["localhost"]))
    asyncio.run(send(["127.0.0.0/8"]))
    assert [head.partition("\r\n")[0] for head in receiver.heads] == ["POST /hook HTTP/1.1"] * 2
