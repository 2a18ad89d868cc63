from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.models.protocol import (
    Answer,
    CatalogueUpdate,
    Fetch,
    Fetched,
    FetchFailed,
    Release,
    Request,
    Using,
    Watch,
    read_answer,
    read_request,
    write,
)
from cortex.models.spec import DEFAULT_MODEL, ModelPath, ModelSource

SOURCE = ModelSource(
    "onnx", paths=(ModelPath(DEFAULT_MODEL, "s3://b/m", "predict"),), poll_interval_s=2.5, cache_size=3
)
PLAIN = {
    "layout": "onnx",
    "paths": [{"name": DEFAULT_MODEL, "url": "s3://b/m", "signature_key": "predict"}],
    "dir": None,
    "signature_key": None,
    "poll_interval_s": 2.5,
    "is_live": True,
    "cache_size": 3,
    "disk_cache_size": None,
    "cache_memory_bytes": None,
}


MESSAGES = [
    (Watch("iris", SOURCE), {"op": "watch", "api": "iris", "source": PLAIN}),
    (Using(frozenset({"bb", "aa"})), {"op": "using", "digests": ["aa", "bb"]}),
    (
        Fetch(7, "iris", SOURCE, "m", "12", "abc123"),
        {"op": "fetch", "id": 7, "api": "iris", "source": PLAIN, "model": "m", "version": "12", "digest": "abc123"},
    ),
    (Release("abc123"), {"op": "release", "digest": "abc123"}),
    (Fetched(1, "/a b\n"), {"op": "fetched", "id": 1, "path": "/a b\n"}),
    (FetchFailed(2, "no"), {"op": "failed", "id": 2, "message": "no"}),
    (
        CatalogueUpdate("/a", None, None),
        {"op": "catalogue", "confirmed": "/a", "candidate": None, "error": None},
    ),
]


@pytest.mark.parametrize(("message", "plain"), MESSAGES)
def test_a_message_is_the_line_that_other_versions_exchange(message: Request | Answer, plain: dict[str, Any]) -> None:
    line = write(message)
    assert line.endswith(b"\n")
    assert json.loads(line) == plain
    assert (read_request if isinstance(message, Request) else read_answer)(line) == message


def test_unknown_answers_of_a_newer_agent_are_ignored() -> None:
    assert read_answer(b'{"op": "sing"}') is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"op": "sing"}',
        b'{"op": "using", "digests": [1]}',
        b'{"op": "using", "digests": ["../../etc"]}',
        b'{"op": "release"}',
        b'{"op": "watch", "api": "a", "source": {}}',
        b'{"op": "watch", "api": "a", "source": {"layout": "onnx", "paths": []}}',
        b'{"op": "watch", "api": "a", "source": {"layout": "onnx", "paths": [{"name": "m", "url": 5}]}}',
        b'{"op": "watch", "api": "a", "source": {"layout": "onnx", "paths": [], "dir": "/m", "poll_interval_s": 0}}',
        b'{"op": "watch", "api": "a", "source": {"layout": "onnx", "paths": [], "dir": "/m", "poll_interval_s": "x"}}',
        b'{"op": "watch", "api": "a", "source": {"layout": [], "paths": [], "dir": "/m"}}',
        b'{"op": "fetch", "id": true, "api": "a", "model": "m", "version": "1", "digest": "aa"}',
    ],
)
def test_invalid_requests_are_rejected(line: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_request(line)


@given(st.binary() | st.dictionaries(st.text(), st.text()).map(lambda data: str(data).encode()))
def test_arbitrary_bytes_raise_only_value_errors(line: bytes) -> None:
    for read in (read_request, read_answer):
        with contextlib.suppress(ValueError):
            read(line)
