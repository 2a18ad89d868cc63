"""An ASGI application without a framework: JSON in, JSON out."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

_HEADERS = [(b"content-type", b"application/json")]


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer `{"x": 1}` with `{"y": 1}`."""
    if scope["type"] != "http":
        raise NotImplementedError(scope["type"])
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    answer = json.dumps({"y": json.loads(body)["x"]}).encode()
    headers = [*_HEADERS, (b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})
