"""Send a webhook when a job is over: one POST with strict limits on time and size, and without redirects or a proxy.

Only the status of the response is used. A webhook that came through an API's endpoint reaches public addresses only,
besides those that the API's owner allows: the operator is in networks that its callers are not in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from base64 import b64encode
from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, unquote, urlsplit

from cortex.errors import WebhookError

TIMEOUT_S = 10.0
MAX_BODY_BYTES = 1024 * 1024
#: Size of a response's head, and number of heads, since informational ones may precede it.
_MAX_HEAD_BYTES = 64 * 1024
_MAX_HEADS = 5
_GLOBAL_UNICAST, _NAT64 = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")
#: Services of clouds for their machines, at addresses that count as public: of Azure, and of Oracle.
_OF_CLOUDS = ipaddress.ip_network("168.63.129.16/32"), ipaddress.ip_network("192.0.0.0/24")
#: Characters that need no escape in the target of a request.
_SAFE = "/%:@!$&'()*+,;=~-._?"


def retry_delays() -> tuple[float, ...]:
    """Return the pauses between the six attempts, in seconds: about a quarter of an hour together."""
    return (2.0, 10.0, 60.0, 240.0, 600.0)


async def send_webhook(
    url: str, body: bytes, job_id: str, timeout_s: float = TIMEOUT_S, hosts: Collection[str] | None = None
) -> None:
    """POST a job's JSON to `url` once. Redirects are not followed; any 2xx is success.

    With `hosts` (names, addresses and networks), the address must be public or one of theirs. Raises: WebhookError.
    """
    target = _WebhookTarget.of(url)
    if len(body) > MAX_BODY_BYTES:
        raise WebhookError(f"{target}: the job has {len(body)} bytes of JSON, which is too much for a webhook")
    try:
        async with asyncio.timeout(timeout_s):
            status = await _post(target, body, job_id, hosts)
    except TimeoutError:
        raise WebhookError(f"{target} did not answer within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise WebhookError(f"{target}: no secure connection: {error.reason or error}") from error
    except (OSError, ValueError, EOFError) as error:
        raise WebhookError(f"{target} can't be reached: {error}") from error
    if not 200 <= status < 300:
        note = "; redirects are not followed" if 300 <= status < 400 else ""
        raise WebhookError(f"{target} answered {status}{note}")


def forbidden_host(url: str, hosts: Collection[str]) -> str | None:
    """Return the host of a webhook if it is known without DNS that it is neither public nor in `hosts`."""
    host = urlsplit(url).hostname or ""
    is_local = host.rstrip(".").rpartition(".")[2] == "localhost"
    try:  # reads every form of an address, such as 0x7f.1 and 2130706433
        found = socket.getaddrinfo("127.0.0.1" if is_local else host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    return None if any(_is_open(str(address[0]), host, hosts) for *_, address in found) else host


def _is_open(address: str, host: str, hosts: Collection[str]) -> bool:
    """Return True if an address, which `host` has, is public or in `hosts`."""
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    networks = [ipaddress.ip_network(each) for each in hosts if "/" in each]
    return host in hosts or any(ip in network for network in networks) or _is_public(ip)


def _is_public(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if ip in _NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if isinstance(ip, ipaddress.IPv6Address):
        return ip.is_global and ip.sixtofour is None and ip in _GLOBAL_UNICAST
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _OF_CLOUDS)


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


async def _post(target: _WebhookTarget, body: bytes, job_id: str, hosts: Collection[str] | None) -> int:
    reader, writer = await _connect(target, hosts)
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


async def _connect(
    target: _WebhookTarget, hosts: Collection[str] | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    addresses = [target.host]
    if hosts is not None:
        # Connect to an address that was checked: a second query of DNS could return another one.
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        found = [str(address[0]) for *_, address in infos]
        addresses = [address for address in found if _is_open(address, target.host, hosts)]
        if not addresses:
            fix = "use `cortex submit`, or add its host to networking.webhook_hosts of the API"
            raise WebhookError(f"{target} is at {', '.join(found)}, which is not public; {fix}")
    context = ssl.create_default_context() if target.scheme == "https" else None
    name = target.host if context else None
    for address in addresses:
        try:
            return await asyncio.open_connection(
                address, target.port, ssl=context, server_hostname=name, limit=_MAX_HEAD_BYTES
            )
        except OSError:
            if address == addresses[-1]:
                raise
    raise AssertionError("there is an address")


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
