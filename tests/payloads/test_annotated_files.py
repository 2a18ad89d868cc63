"""Frames, images and uploads: what bodies they are read from."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import zlib
from typing import Annotated, Any

import numpy as np
import orjson
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from starlette.datastructures import FormData, Headers, UploadFile

from cortex.payloads.annotated_arrays import Shape
from cortex.payloads.annotations import payload_type
from cortex.payloads.payload_type import PayloadType
from cortex.payloads.validation import PayloadError

FRAME = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})


def kind_of(annotation: Any) -> PayloadType:
    kind = payload_type(annotation)
    assert kind is not None
    return kind


def picture(form: str = "PNG", size: tuple[int, int] = (3, 2)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (255, 0, 0)).save(file, form)
    return file.getvalue()


def upload(data: bytes, name: str = "a.bin", media_type: str = "application/octet-stream") -> UploadFile:
    return UploadFile(io.BytesIO(data), filename=name, headers=Headers({"content-type": media_type}))


@pytest.mark.parametrize(
    "value",
    [
        [{"a": 1, "b": "x"}, {"b": "y", "a": 2}],
        {"a": [1, 2], "b": ["x", "y"]},
        {"columns": ["a", "b"], "data": [[1, "x"], [2, "y"]]},
        {"columns": ["a", "b"], "index": [0, 1], "data": [[1, "x"], [2, "y"]]},
    ],
)
def test_a_frame_is_read_from_records_columns_and_rows(value: Any) -> None:
    kind = kind_of(pd.DataFrame)
    pd.testing.assert_frame_equal(kind.from_json(value, b""), FRAME)
    pd.testing.assert_frame_equal(kind.from_bytes(orjson.dumps(value), ""), FRAME)


def test_a_frame_is_read_from_csv() -> None:
    kind = kind_of(pd.DataFrame)
    data = b"a,b\n1,x\n2,y\n"
    pd.testing.assert_frame_equal(kind.from_bytes(data, "text/csv"), FRAME)
    pd.testing.assert_frame_equal(kind.from_bytes(data, ""), FRAME)
    pd.testing.assert_frame_equal(kind.from_form(FormData([("file", upload(data, "a.csv", "text/csv"))])), FRAME)
    assert kind_of(pd.DataFrame | None).from_json(None, b"null") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "payload: Input should be a list of records, or lists by the name of a column"),
        ([{"a": 1}, 2], "payload[1]: Input should be a record: values by the name of a column"),
        ({"a": [1], "b": 2}, "payload.b: Input should be a list, the values of a column"),
        ({"a": [1], "b": []}, "payload.b: Input should have as many values as the first column, 1, but has 0"),
        ({"columns": ["a"], "data": [[1], [1, 2]]}, "payload.data[1]: Input should have 1 values, one per column, but"),
        ({"columns": ["a", "b", "a"], "data": []}, "payload.columns[2]: Input should be a list of names that differ"),
        ([{str(number): 1} for number in range(2000)], "payload: Input should have records with the same columns"),
    ],
)
def test_other_values_are_no_frames(value: Any, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        kind_of(pd.DataFrame).from_json(value, b"")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"a,b\n1,2\n1,2,3\n", "payload: Input should be CSV: Expected 2 fields in line 3, saw 3"),
        (b"\n", "payload: Input should be CSV in UTF-8"),
        (b"a\n\xff\n", "payload: Input should be CSV in UTF-8"),
        (b"," * 3000 + b"\n" + b"1\n" * 3000, "payload: Input should have rows with as many values as"),
        (b"," * 3000 + b"\r" + b"1\r" * 3000, "payload: Input should have rows with as many values as"),
        (b"a\n1,2\n", "payload: Input should have rows with as many values as the first line has names"),
        (b"a\n" + b"1," * 3000 + b"\n" + b"1\n" * 3000, "payload: Input should have rows with as many values as"),
        (b"," * 20_000 + b"\n1\n", "payload: Input should be CSV with at most 20000 columns"),
        (b"a\n1\n" + b"1," * 30_000, "payload: Input should be CSV with at most 20000 columns"),
        (b"[1", "payload: Input should be JSON, or CSV with the content type text/csv: "),
        (b"5", "payload: Input should be "),
        (b"null", "payload: Input should be "),
    ],
)
def test_other_texts_are_no_csv(body: bytes, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        kind_of(pd.DataFrame).from_bytes(body, "")
    assert str(caught.value).startswith(message)


def test_a_frame_is_not_read_from_the_csv_that_curl_sends_as_a_form() -> None:
    with pytest.raises(PayloadError, match="payload: Input should be JSON, or CSV with the content type text/csv: "):
        kind_of(pd.DataFrame).from_bytes(b"hello world", "application/x-www-form-urlencoded")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"])
def test_an_image_is_read_from_a_body_a_form_and_base64(form: str) -> None:
    kind, data = kind_of(Image.Image), picture(form)
    text = base64.b64encode(data).decode()
    for image in (
        kind.from_bytes(data, "image/png"),
        kind.from_form(FormData([("other", "1"), ("image", upload(data))])),
        kind.from_json(text, b""),
        kind.from_json(f"data:image/png;base64,{text}", b""),
    ):
        assert (image.format, image.size) == (form, (3, 2))
    assert kind_of(list[Image.Image]).from_json([text], orjson.dumps([text]))[0].size == (3, 2)


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(PayloadError, match="an image of at most 1000 pixels"):
        kind_of(Image.Image).from_bytes(picture(size=(100, 100)), "")
    with pytest.raises(PayloadError, match="an image of at most 1000 pixels"):
        kind_of(Image.Image).from_bytes(picture(size=(40, 40)), "")


@pytest.mark.parametrize(
    "body",
    [
        b"not an image",
        picture()[:40],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(touch /tmp/x) system\n",
        b"\x89PNG\r\n\x1a\n" + zlib.compress(b"x" * 100),
    ],
)
def test_other_bodies_are_no_images(body: bytes) -> None:
    with pytest.raises(PayloadError, match="Input should be an image, one of BMP, GIF, JPEG"):
        kind_of(Image.Image).from_bytes(body, "image/png")


def test_a_broken_base64_text_is_no_image() -> None:
    for value in ("no base64!", 1, "é"):
        with pytest.raises(PayloadError, match="Input should be an image in base64"):
            kind_of(Image.Image).from_json(value, b"")


def test_an_upload_is_the_only_file_of_a_form() -> None:
    kind, file = kind_of(UploadFile), upload(b"x")
    assert kind.from_form(FormData([("note", "1"), ("file", file)])) is file
    for form in (FormData([]), FormData([("a", file), ("b", file)])):
        with pytest.raises(PayloadError, match="a form with one file, but has"):
            kind.from_form(form)
    with pytest.raises(PayloadError, match="a form with one file"):
        kind.from_json({}, b"{}")
    with pytest.raises(PayloadError, match="a form with one file"):
        kind.from_bytes(b"x", "text/plain")
    assert kind.reads_bytes
    assert kind_of(list[UploadFile]).from_form(FormData([("a", file), ("note", "1"), ("b", file)])) == [file, file]
    assert kind_of(dict[str, list[UploadFile]]).from_form(FormData([("a", file)])) == {"a": [file]}
    files = FormData([("a", file), ("a", file)])
    assert kind_of(dict[str, list[UploadFile]]).from_form(files) == {"a": [file, file]}
    assert kind_of(dict[str, UploadFile]).from_form(FormData([("a", file)])) == {"a": file}


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["columns", "data", "index", "a"]) | st.text(), inner)
    ),
    max_leaves=20,
)
ALL_TYPES = [
    np.ndarray,
    Annotated[np.ndarray, Shape(-1, 2, dtype="float32")],
    NDArray[np.int8],
    NDArray[np.bool_],
    NDArray[np.object_],
    pd.DataFrame,
    Image.Image,
    list[Image.Image],
    dict[str, NDArray[np.float16]],
    dict,
    list[int | str],
    UploadFile,
]


@given(value=ANY_JSON)
def test_any_json_is_read_or_refused(value: Any) -> None:
    text = json.dumps(value).encode()
    for annotation in ALL_TYPES:
        with contextlib.suppress(PayloadError):
            kind_of(annotation).from_json(value, text)


@given(body=st.binary() | st.text(alphabet='a1,"\n\r[]{}:', min_size=1).map(str.encode))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    for annotation, media_type in ((pd.DataFrame, ""), (pd.DataFrame, "text/csv"), (Image.Image, ""), (str, "")):
        with contextlib.suppress(PayloadError):
            kind_of(annotation).from_bytes(body, media_type)
