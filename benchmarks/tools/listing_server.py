"""S3 endpoint that only lists: fixed keys in pages of 1,000. It counts requests.

It is fast, so that the client dominates the measurement.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000


class ListingServer:
    """Server of ListObjectsV2 for one bucket; everything else is a 404."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.requests: Counter[str] = Counter()  #: "first page", "next page", "other"
        self._keys = sorted(keys)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        """Serve, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        listing = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
                if "list-type" not in query:
                    listing.requests["other"] += 1
                    self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                    return
                listing.requests["next page" if "continuation-token" in query else "first page"] += 1
                self._answer(200, listing._page(tuple(sorted(query.items()))))

            def do_HEAD(self) -> None:
                listing.requests["other"] += 1
                self._answer(404, b"")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/xml")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Suppress the log."""

        return Handler

    @lru_cache(maxsize=1000)  # noqa: B019 - one server lives as long as its process
    def _page(self, query: tuple[tuple[str, str], ...]) -> bytes:
        asked = dict(query)
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        after = asked.get("continuation-token") or asked.get("start-after", "")
        index = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
        entries: list[str] = []
        last = ""
        while index < len(self._keys) and self._keys[index].startswith(prefix):
            if len(entries) == PAGE:
                return _document(entries, last)
            rest, mark, _ = self._keys[index][len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if mark:
                last = f"{prefix}{rest}{mark}\uffff"
                entries.append(f"<CommonPrefixes><Prefix>{escape(prefix + rest + mark)}</Prefix></CommonPrefixes>")
                index = bisect_right(self._keys, last)
            else:
                last = self._keys[index]
                entries.append(_entry(last))
                index += 1
        return _document(entries, None)


def _entry(key: str) -> str:
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"{hash(key) & (1 << 128) - 1:032x}"</ETag><Size>1000</Size>'
        f"<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _document(entries: list[str], next_token: str | None) -> bytes:
    more = (
        f"<IsTruncated>true</IsTruncated><NextContinuationToken>{escape(next_token)}</NextContinuationToken>"
        if next_token
        else "<IsTruncated>false</IsTruncated>"
    )
    return f'<?xml version="1.0"?><ListBucketResult>{more}{"".join(entries)}</ListBucketResult>'.encode()
