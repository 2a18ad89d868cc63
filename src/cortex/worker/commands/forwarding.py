"""Heads of requests to a command's server, and of its responses, with other paths and without hop-by-hop headers. Pure.

The server gets the path below the endpoint, because servers such as vLLM know nothing of a prefix, and the endpoint as
`X-Forwarded-Prefix`. Redirects of such a server are moved below the endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from cortex.worker.http.responses import Header

#: Headers of one connection only (RFC 9110, section 7.6.1). `Expect` was answered on the gateway's connection.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"expect",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-cortex-endpoint",
        b"x-forwarded-prefix",
    }
)
#: Headers that a client can't have removed by naming them in `Connection`: without its length, a body would be read as
#: the next request, and the others say where the request came from.
_OF_EVERY_REQUEST = frozenset(
    {
        b"content-length",
        b"host",
        b"x-cortex-request-id",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
    }
)
#: Headers of a response that the connection to the gateway writes itself.
_RESPONSE_DROPPED = _HOP_BY_HOP | {b"content-length", b"date"}
_UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\n"


def server_target(target: bytes, endpoint: bytes | None, strips_prefix: bool) -> tuple[bytes, bytes]:
    """Return the target for the server, path and query, and the endpoint through which the request came.

    `endpoint` is None if the path is the endpoint itself.
    """
    path, question, query = target.partition(b"?")
    prefix = (path if endpoint is None else endpoint).rstrip(b"/")
    if strips_prefix:
        path = b"/" + path[len(prefix) :].lstrip(b"/")
    return path + question + query, prefix


def request_head(
    method: bytes, target: bytes, headers: Sequence[Header], prefix: bytes | None, is_upgrade: bool
) -> bytes:
    """Return the head of a request to the server, without its final empty line."""
    dropped = _HOP_BY_HOP | (_nominated(headers) - _OF_EVERY_REQUEST)
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in dropped]
    if prefix is not None:
        lines.append(b"x-forwarded-prefix: %b\r\n" % prefix)
    return b"%b %b HTTP/1.1\r\n%b%b" % (method, target, b"".join(lines), _UPGRADE if is_upgrade else b"")


def response_headers(headers: Sequence[Header], prefix: bytes, strips_prefix: bool, host: bytes) -> tuple[Header, ...]:
    """Return the headers of a response for the client, without its length; `host` is that of the request."""
    dropped = _RESPONSE_DROPPED | _nominated(headers)
    kept = (header for header in headers if header[0] not in dropped)
    if not strips_prefix:
        return tuple(kept)
    return tuple((name, _below(value, prefix, host) if name == b"location" else value) for name, value in kept)


def upgrade_head(headers: Sequence[Header]) -> bytes:
    """Return the head of the response that accepts a WebSocket."""
    kept = (b"%b: %b\r\n" % header for header in headers if header[0] not in _RESPONSE_DROPPED)
    return b"HTTP/1.1 101 Switching Protocols\r\n%b%b\r\n" % (b"".join(kept), _UPGRADE)


def _nominated(headers: Sequence[Header]) -> set[bytes]:
    """Return the headers that a `Connection` header names as those of this connection only."""
    values = [value for name, value in headers if name == b"connection"]
    return {name.strip().lower() for value in values for name in value.split(b",")}


def _below(location: bytes, prefix: bytes, host: bytes) -> bytes:
    """Return a redirect to a path below the endpoint; it may be there already, if the server knows its endpoint."""
    for origin in (b"http://" + host, b"https://" + host) if host else ():
        if location.startswith(origin + b"/"):
            return origin + _below(location[len(origin) :], prefix, b"")
    is_path = location.startswith(b"/") and not location.startswith(b"//")
    is_below = location == prefix or location.startswith((prefix + b"/", prefix + b"?"))
    return prefix + location if is_path and not is_below else location
