"""Send a webhook when a job is over: one POST with strict limits on time and size, and without redirects or a proxy.

Only the status of the response is used.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, unquote, urlsplit

from cortex.errors import WebhookError

TIMEOUT_S = 10.0
MAX_BODY_BYTES = 1024 * 1024
#: Size of a response's head, and number of heads, since informational ones may precede it.
_MAX_HEAD_BYTES = 64 * 1024
_MAX_HEADS = 5
#: Characters that need no escape in the target of a request.
_SAFE = "/%:@!$&'()*+,;=~-._?"


def retry_delays() -> tuple[float, ...]:
    """Return the pauses between the six attempts, in seconds: about a quarter of an hour together."""
    return (2.0, 10.0, 60.0, 240.0, 600.0)


async def send_webhook(url: str, body: bytes, job_id: str, timeout_s: float = TIMEOUT_S) -> None:
    """POST a job's JSON to `url` once. Redirects are not followed; any 2xx is success.

    Raises: WebhookError.
    """
    target = _WebhookTarget.of(url)
    if len(body) > MAX_BODY_BYTES:
        raise WebhookError(f"{target}: the job has {len(body)} bytes of JSON, which is too much for a webhook")
    try:
        async with asyncio.timeout(timeout_s):
            status = await _post(target, body, job_id)
    except TimeoutError:
        raise WebhookError(f"{target} did not answer within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise WebhookError(f"{target}: no secure connection: {error.reason or error}") from error
    except (OSError, ValueError, EOFError) as error:
        raise WebhookError(f"{target} can't be reached: {error}") from error
    if not 200 <= status < 300:
        note = "; redirects are not followed" if 300 <= status < 400 else ""
        raise WebhookError(f"{target} answered {status}{note}")


@dataclass(frozen=True)
class _WebhookTarget:
    """A parsed URL; its text form shows no secret."""

    scheme: str
    host: str
    port: int
    path: str = field(repr=False)
    authorization: str = field(repr=False)

    @classmethod
    def of(cls, url: str) -> _WebhookTarget:
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            host = (parts.hostname or "").encode("idna").decode("ascii")
        except ValueError:  # also raised for an invalid host name
            raise WebhookError("the webhook is not a valid URL") from None
        if parts.scheme not in ("http", "https") or not host:
            raise WebhookError("the webhook must be an http:// or https:// address with a host")
        path = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")
        return cls(parts.scheme, host, port, path, _authorization(parts))

    def __str__(self) -> str:
        return f"webhook {self.scheme}://{self.netloc}"

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"


def _authorization(parts: SplitResult) -> str:
    if parts.username is None:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"authorization: Basic {b64encode(pair.encode()).decode()}\r\n"


async def _post(target: _WebhookTarget, body: bytes, job_id: str) -> int:
    context = ssl.create_default_context() if target.scheme == "https" else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context, limit=_MAX_HEAD_BYTES)
    try:
        head = (
            f"POST {target.path} HTTP/1.1\r\nhost: {target.netloc}\r\nuser-agent: cortex\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
            f"x-cortex-job-id: {job_id}\r\n{target.authorization}\r\n"
        )
        writer.write(head.encode("ascii") + body)
        await writer.drain()
        return await _status(reader)
    finally:
        writer.transport.abort()  # nobody waits for what a close of the other side would take


async def _status(reader: asyncio.StreamReader) -> int:
    """Read heads until the one of the final answer. Raises: ValueError if the response is not HTTP, EOFError."""
    for _ in range(_MAX_HEADS):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise ValueError("the head of its answer is too long") from None
        except asyncio.IncompleteReadError:
            raise ValueError("it hung up without an answer") from None
        protocol, _, rest = head.partition(b" ")
        if not protocol.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise ValueError("its answer is not HTTP/1")
        status = int(rest[:3])
        if status >= 200:
            return status
    raise ValueError("it sent too many informational answers")
