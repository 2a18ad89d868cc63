"""A small HTTP server with scripted responses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answering = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """A small HTTP server that returns scripted responses and records requests."""

    def __init__(self) -> None:
        self.answering: Answering = lambda handler: reply(handler, 200, b"{}")
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.parts = 0  #: of chunked bodies
        self.part_came = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def parts(self) -> Iterator[bytes]:
                if self.headers.get("transfer-encoding") != "chunked":
                    yield self.rfile.read(int(self.headers.get("content-length", 0)))
                    return
                while size := int(self.rfile.readline() or b"0", 16):
                    outer.parts += 1
                    outer.part_came.set()
                    yield self.rfile.read(size)
                    self.rfile.readline()

            def answer(self) -> None:
                body = b"".join(self.parts())
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append((self.command, self.path, headers, body))
                outer.answering(self)

            do_GET = do_POST = do_DELETE = answer

        self._http = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Log nothing about clients that disconnect, as tests make them do."""


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
