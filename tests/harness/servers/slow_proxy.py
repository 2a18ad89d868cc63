"""HTTP proxy that records requests, and delays or refuses some of them."""

from __future__ import annotations

import contextlib
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit


class SlowProxy:
    """Forwards requests without a change of anything that a signature covers."""

    def __init__(self, target: str) -> None:
        self.requests: list[tuple[str, str]] = []  #: method and path, without query
        self.listed: list[str] = []  #: the prefixes that were listed in S3
        self.held = threading.Event()
        self._target = urlsplit(target).netloc
        self._refused: str | None = None
        self._hold: tuple[str, int] | None = None
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def refuse(self, ending: str | None) -> None:
        """Refuse GETs of paths with this ending with 403."""
        self._refused = ending

    def hold(self, ending: str | None, after_bytes: int = 0) -> None:
        """Pause responses to GETs of paths with this ending after some bytes, until this is called again."""
        self._hold = (ending, after_bytes) if ending else None
        self.held.clear()
        if ending is None:
            self._released.set()
        else:
            self._released.clear()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    proxy.pass_on(self)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def pass_on(self, request: BaseHTTPRequestHandler) -> None:
        path, query = urlsplit(request.path).path, parse_qs(urlsplit(request.path).query)
        self.requests.append((request.command, path))
        if "list-type" in query:
            self.listed += query.get("prefix", [""])
        if self._refused and path.endswith(self._refused):
            request.send_error(403)
            return
        upstream = http.client.HTTPConnection(self._target, timeout=30)
        headers = dict(request.headers.items())  # `Host` is signed: the server sees the client's
        upstream.request(request.command, request.path, headers=headers)
        answer = upstream.getresponse()
        body = answer.read()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date"):
                request.send_header(name, value)
        length = answer.getheader("content-length") if request.command == "HEAD" else str(len(body))
        request.send_header("Content-Length", length or "0")
        request.end_headers()
        if request.command == "HEAD":
            return
        if self._hold and path.endswith(self._hold[0]):
            request.wfile.write(body[: self._hold[1]])
            body = body[self._hold[1] :]
            self.held.set()
            self._released.wait(60)
        request.wfile.write(body)
