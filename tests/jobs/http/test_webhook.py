"""Webhooks: the request, which responses are success, and the errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from cortex.jobs.http.webhook import MAX_BODY_BYTES, WebhookError, retry_delays, send_webhook

BODY = b'{"job_status": {"status": "succeeded"}}'
Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Receiver:
    """A server that keeps what it was sent and answers with fixed bytes."""

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


def told(receiver: Answering, path: str = "/", scheme: str = "http", user: str = "", timeout_s: float = 5) -> None:
    """Tell a receiver of a job."""

    async def run() -> None:
        server = await asyncio.start_server(receiver, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await send_webhook(f"{scheme}://{user}127.0.0.1:{port}{path}", BODY, "7fff", timeout_s)

    asyncio.run(run())


def refusal(receiver: Answering, path: str = "/", scheme: str = "http", user: str = "", timeout_s: float = 5) -> str:
    """Return what is said about a receiver that does not want it."""
    with pytest.raises(WebhookError) as error:
        told(receiver, path, scheme, user, timeout_s)
    return str(error.value)


@pytest.mark.parametrize("status", [b"200 OK", b"201 Created", b"204 No Content", b"202"])
def test_any_2xx_is_success_and_the_request_says_which_job(status: bytes) -> None:
    receiver = Receiver(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
    told(receiver, "/hooks/a b?x=1&y=é")
    assert receiver.bodies == [BODY]
    lines = receiver.heads[0].split("\r\n")
    assert lines[0] == "POST /hooks/a%20b?x=1&y=%C3%A9 HTTP/1.1"
    assert {"x-cortex-job-id: 7fff", "content-type: application/json", "connection: close"} <= set(lines)
    assert not any(line.startswith("authorization") for line in lines)


def test_user_and_password_of_the_address_are_sent_as_such() -> None:
    receiver = Receiver()
    told(receiver, user="me:s%40crt@")
    assert "authorization: Basic bWU6c0BjcnQ=" in receiver.heads[0].split("\r\n")


def test_informational_answers_come_before_the_real_one() -> None:
    told(Receiver(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"))
    assert "informational" in refusal(Receiver(b"HTTP/1.1 100 Continue\r\n\r\n" * 10))


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
def test_other_answers_are_named(answer: bytes, words: str) -> None:
    receiver = Receiver(answer)
    text = refusal(receiver)
    assert words in text
    assert "http://127.0.0.1:" in text
    assert len(receiver.bodies) == 1


def test_path_and_password_are_not_in_what_is_said() -> None:
    text = refusal(Receiver(b"HTTP/1.1 410 Gone\r\n\r\n"), "/services/T0KEN?key=T0KEN", user="me:T0KEN@")
    assert "T0KEN" not in text


def test_receiver_that_never_answers_costs_the_timeout_and_no_more() -> None:
    assert "did not answer within 0.2 s" in refusal(Receiver(b"HTTP/1.1 2", is_silent=True), timeout_s=0.2)


def test_nobody_there_and_no_tls_are_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(WebhookError, match="can't be reached"):
            asyncio.run(send_webhook(f"http://127.0.0.1:{unused.getsockname()[1]}/", BODY, "7fff"))

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    assert "secure connection" in refusal(plain, scheme="https")


@pytest.mark.parametrize(
    "url", ["ftp://a/", "//a/", "a", "", "file:///etc/passwd", "http://", "http://[", "http://a:99999/", "http://a..b/"]
)
def test_what_is_no_address_of_http_is_refused(url: str) -> None:
    with pytest.raises(WebhookError, match="the webhook"):
        asyncio.run(send_webhook(url, BODY, "7fff"))


def test_no_address_can_add_a_header() -> None:
    receiver = Receiver()
    told(receiver, "/a\r\nx-evil: 1")
    assert "x-evil" not in receiver.heads[0].split("\r\n", 1)[1]


def test_huge_body_is_not_sent() -> None:
    with pytest.raises(WebhookError, match="too much"):
        asyncio.run(send_webhook("http://127.0.0.1:9/", b"x" * (MAX_BODY_BYTES + 1), "7fff"))


def test_retries_become_rarer() -> None:
    delays = retry_delays()
    assert list(delays) == sorted(delays)
    assert sum(delays) < 3600
