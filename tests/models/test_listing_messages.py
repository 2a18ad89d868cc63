from __future__ import annotations

import contextlib
import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.models.listing import FileMarks, ModelFolder, Prefix, VersionContent
from cortex.models.listing_rpc import (
    MAX_MODELS_BYTES,
    ListAnswer,
    ListFailed,
    ListPending,
    ListReply,
    ListRequest,
    read_answer,
    read_models,
    read_request,
    write,
    write_models,
)

CONTENT = VersionContent(
    "ab12", 3, 2**40, 1769860805.25, FileMarks.SAVED_MODEL | FileMarks.VARIABLES_DATA, 1, "a.onnx", None
)


@pytest.mark.parametrize("request_", [ListRequest(PREFIX, 10, 2.5, "state"), ListRequest(Prefix("gs://b"), 0.5)])
def test_a_request_is_read_as_it_was_written(request_: ListRequest) -> None:
    assert read_request(write(request_)) == request_


@pytest.mark.parametrize("answer", [ListReply(1.5, 0.25, 7, True, "state", 12), ListFailed("no bucket"), ListPending()])
def test_an_answer_is_read_as_it_was_written(answer: ListAnswer) -> None:
    assert read_answer(write(answer)) == answer


def test_the_json_keys_are_those_of_earlier_versions() -> None:
    assert orjson.loads(write(ListRequest(PREFIX, 10, 2.5, "id"))) == {
        "op": "list", "url": "s3://bucket/models", "is_dir": True, "max_age_s": 10, "newer_than_s": 2.5, "known": "id"
    }  # fmt: skip
    assert orjson.loads(write(ListReply(1.5, 0.25, 7, True, "id", 12))) == {
        "op": "listed", "taken_at": 1.5, "age_s": 0.25, "objects": 7, "is_cut": True, "state": "id", "size": 12
    }  # fmt: skip


def test_a_listing_is_complete_again_on_the_other_side() -> None:
    flawed = VersionContent("cd", 1, 0, 0.0, FileMarks(0), 0, "..", "../x: leads out of the folder")
    models = {"iris": ModelFolder({"1": CONTENT, "10": flawed}, None), "": ModelFolder({}, CONTENT, is_file=True)}
    assert read_models(write_models(models)) == models
    listing = read_answer(write(ListReply(1769860805.123456, 1, 7, False, "s", 1)))
    assert isinstance(listing, ListReply)
    assert listing.listing(PREFIX, models).taken_at == 1769860805.123456


def test_a_name_that_is_no_text_changes_nothing_for_the_others() -> None:
    models = {"\udc80": ModelFolder({}, CONTENT), "iris": ModelFolder({"1": CONTENT}, None)}
    assert read_models(write_models(models)) == models


@pytest.mark.parametrize(
    "line",
    [b"[]", b"{}", b'{"op":"listed"}', b'{"op":"unlisted","message":1}', b'{"url":1,"is_dir":true,"max_age_s":1}', b""],
)
def test_nonsense_is_a_value_error(line: bytes) -> None:
    for read in (read_request, read_answer):
        with pytest.raises(ValueError):
            read(line)


@pytest.mark.parametrize("size", [-1, MAX_MODELS_BYTES + 1])
def test_a_listing_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="a listing of"):
        read_answer(write(ListReply(0, 0, 0, False, "", size)))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_only_value_errors_come_of_any_models(plain: object) -> None:
    with contextlib.suppress(ValueError):
        read_models(orjson.dumps(plain))


def test_an_age_without_limit_is_written_as_none() -> None:
    assert read_request(write(ListRequest(PREFIX, 1, math.inf))).newer_than_s == math.inf
