from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.models.protocol import (
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


@pytest.mark.parametrize(
    "request_",
    [
        Watch("iris", SOURCE),
        Watch("iris", ModelSource("python", dir="/models", is_live=False)),
        Using(frozenset({"aa", "bb"})),
        Using(frozenset()),
        Fetch(7, "iris", SOURCE, "m", "12", "abc123"),
        Release("abc123"),
    ],
)
def test_a_request_is_read_as_it_was_written(request_: Request) -> None:
    line = write(request_)
    assert line.count(b"\n") == 1
    assert read_request(line) == request_


@pytest.mark.parametrize(
    "answer",
    [
        Fetched(1, "/a b\n"),
        FetchFailed(2, "no"),
        CatalogueUpdate("/a", None, None),
        CatalogueUpdate(None, None, "down"),
    ],
)
def test_an_answer_is_read_as_it_was_written(answer: Fetched | FetchFailed | CatalogueUpdate) -> None:
    line = write(answer)
    assert line.count(b"\n") == 1
    assert read_answer(line) == answer


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
