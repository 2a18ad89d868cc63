"""The request of each workload, and the correct response."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MEGABYTE = 1_000_000
CHUNK_COUNT = 100
JSON = "application/json"
BYTES = "application/octet-stream"


@dataclass(frozen=True)
class Workload:
    """One request that is sent repeatedly, and its correct response."""

    name: str
    body: bytes
    content_type: str
    #: A JSON value; or, where the answer is bytes, how many (None: as many as the server sends), or a part of them.
    expected: Any
    headers: tuple[tuple[str, str], ...] = ()  #: in addition to the content type

    def mistake(self, status: int, body: bytes) -> str:
        """Return what is wrong with a response, or an empty string."""
        if status != 200:
            return f"status {status}: {body[:200]!r}"
        if self.name == "stream":
            found = body.count(b"chunk ")
            return "" if found == CHUNK_COUNT else f"{found} chunks of {CHUNK_COUNT}"
        if isinstance(self.expected, bytes):
            return "" if self.expected in body else f"{body[:200]!r} without {self.expected!r}"
        if isinstance(self.expected, int):
            return "" if len(body) == self.expected else f"{len(body)} bytes, not {self.expected}"
        try:
            found = json.loads(body)
        except ValueError:
            return f"not JSON: {body[:200]!r}"
        return "" if found == self.expected else f"{body[:200]!r}, not {self.expected}"

    def request(self, host: str, path: str) -> bytes:
        """Return the whole HTTP request."""
        headers = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        return (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {self.content_type}\r\n{headers}"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        ).encode() + self.body


_FLOWER = {"sepal_length": 6.3, "sepal_width": 3.3, "petal_length": 6.0, "petal_width": 2.5}

NOOP = Workload("noop", b'{"x": 1}', JSON, {"y": 1})
IRIS = Workload("iris", json.dumps(_FLOWER).encode(), JSON, {"label": "virginica"})
UPLOAD = Workload("upload", b"x" * MEGABYTE, BYTES, {"length": MEGABYTE})
DOWNLOAD = Workload("download", b'{"x": 1}', JSON, MEGABYTE)
STREAM = Workload("stream", b'{"x": 1}', JSON, None)

#: One API that takes any of three requests; for slow clients, which must share it with the normal ones.
MIXED = Workload("mixed", b'{"x": 1}', JSON, {"y": 1})
MIXED_UPLOAD = Workload("mixed", b"x" * MEGABYTE, BYTES, {"length": MEGABYTE})
MIXED_DOWNLOAD = Workload("mixed", b'{"x": "download"}', JSON, MEGABYTE)

SMALL = (NOOP, IRIS)
LARGE = (UPLOAD, DOWNLOAD)
