"""Compressed requests in a real replica: methods, routes and batches receive the body as if it had come without."""

from __future__ import annotations

import gzip
import zlib

import pytest

from harness.replicas.replicas import Replica, running_replica

pytestmark = pytest.mark.processes

SOURCE = """
    import cortex

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload, headers):
            return [repr(payload), "content-encoding" in headers]

        async def handle_put(self, payload: dict):
            return payload

        @cortex.route("POST", "/items/{item}")
        async def store(self, item: int, payload: bytes):
            return [item, len(payload)]
"""
BATCHED = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload: list[int]):
            return payload
"""


def send(replica: Replica, body: bytes, coding: str = "gzip", **options: str) -> tuple[int, object]:
    headers = {"content-encoding": coding} | {
        name.replace("_", "-"): value for name, value in options.items() if name not in ("path", "method")
    }
    answer = replica.request(
        body=body, headers=headers, path=options.get("path", "/"), method=options.get("method", "POST")
    )
    return answer.status, answer.json.get("error") if answer.status != 200 else answer.json


def test_methods_and_routes_receive_decoded_bodies() -> None:
    with running_replica(SOURCE, max_body_bytes=50_000_000) as replica:
        replica.wait_ready()
        assert send(replica, gzip.compress(b'{"a": 1}')) == (200, ["{'a': 1}", False])
        assert send(replica, b'{"a": 1}', "identity") == (200, ["{'a': 1}", False])
        binary = gzip.compress(b"\0\1")
        assert send(replica, binary, content_type="application/octet-stream") == (200, [repr(b"\0\1"), False])
        assert send(replica, zlib.compress(b"[1]"), "deflate", method="PUT")[0] == 422
        assert send(replica, zlib.compress(b'{"a": 1}'), "deflate", method="PUT") == (200, {"a": 1})
        below = {"path": "/api/items/5", "x_cortex_endpoint": "/api"}
        assert send(replica, gzip.compress(b"abc"), **below) == (200, [5, 3])
        status, message = send(replica, gzip.compress(bytes(60_000_000)), **below)
        assert (status, message) == (
            413,
            "the decompressed body is larger than 100 times the compressed one; send it uncompressed, "
            "or tensors in binary form",
        )
        assert send(replica, b"abc", **below)[0] == 400
        assert send(replica, b"abc", "zstd", **below)[0] == 415
        get = replica.request(method="GET", headers={"content-encoding": "zstd"})
        assert get.status == 200, "without a body, there is nothing to decode"
        assert replica.request({"a": 1}).status == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_batches_receive_decoded_bodies(coding: str) -> None:
    with running_replica(BATCHED, max_batch_size=4, batch_interval_s=0.01) as replica:
        replica.wait_ready()
        body = gzip.compress(b"7") if coding == "gzip" else zlib.compress(b"7")
        assert send(replica, body, coding) == (200, 7)
        assert send(replica, body[:-3], coding)[0] == 400
