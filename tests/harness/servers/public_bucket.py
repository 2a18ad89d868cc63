"""An object store for tests that requires no signature, like public buckets and the emulator of gs://."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote_plus, unquote, urlsplit
from xml.sax.saxutils import escape


class PublicBucket(ThreadingHTTPServer):
    """One bucket, `models`: HEAD, GET and list, enough to be read from; records requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.downloads: list[str] = []
        self.signatures: set[str | None] = set()
        self.answers_with: int | None = None  #: a status for every request
        self.page_size = 1000
        self.lists_after: Callable[[str], bytes | None] = lambda key: None  #: another answer for the page after a key
        self.before_download: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def public_bucket() -> Iterator[PublicBucket]:
    """Run one."""
    with PublicBucket() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: PublicBucket
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._object(with_body=False)

    def do_GET(self) -> None:
        query = {
            name: values[0] for name, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()
        }
        if "prefix" in query or "list-type" in query:
            self._list(query)
        else:
            self._object(with_body=True)

    def _object(self, with_body: bool) -> None:
        self.server.signatures.add(self.headers.get("authorization"))
        key = unquote(urlsplit(self.path).path).removeprefix("/models/")
        if with_body:
            self.server.before_download()
            self.server.downloads.append(key)
        data = self.server.objects.get(key)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", with_body)
        else:
            self._answer(200, data, with_body)

    def _list(self, query: dict[str, str]) -> None:
        """Answer version 1 or 2 of a listing; the continuation token is the last key of the page before."""
        self.server.signatures.add(self.headers.get("authorization"))
        after = query.get("continuation-token") or query.get("start-after") or query.get("marker") or ""
        is_encoded = query.get("encoding-type") == "url"
        found = [key for key in sorted(self.server.objects) if key.startswith(query.get("prefix", "")) and key > after]
        page, rest = found[: self.server.page_size], found[self.server.page_size :]
        items = "".join(
            f"<Contents><Key>{quote_plus(key) if is_encoded else escape(key)}</Key>"
            f"<LastModified>2026-01-01T00:00:00Z</LastModified>"
            f'<ETag>"{md5(self.server.objects[key]).hexdigest()}"</ETag><Size>{len(self.server.objects[key])}</Size>'
            f"</Contents>"
            for key in page
        )
        kind = "<EncodingType>url</EncodingType>" if is_encoded else ""
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        body = f"<ListBucketResult>{kind}<IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{token}{items}"
        self._answer(200, self.server.lists_after(after) or f"{body}</ListBucketResult>".encode())

    def _answer(self, status: int, data: bytes, with_body: bool = True) -> None:
        self.send_response(self.server.answers_with or status)
        self.send_header("content-length", str(len(data)))
        self.send_header("last-modified", formatdate(0, usegmt=True))
        self.send_header("etag", f'"{md5(data).hexdigest()}"')
        self.send_header("x-amz-bucket-region", "eu-central-1")
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
