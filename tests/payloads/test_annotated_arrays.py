"""Frames: the same columns in whatever form they arrive, with NaN for null and exact whole numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cortex.payloads.annotations import payload_type
from cortex.payloads.validation import PayloadError
from cortex.worker.requests.payload import JSON, parse_typed

FRAME = payload_type(pd.DataFrame)
LARGE = 2**53 + 1


def read(value: Any, content_type: bytes = JSON) -> pd.DataFrame:
    assert FRAME is not None
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    frame = parse_typed(FRAME, content_type, body)
    assert isinstance(frame, pd.DataFrame)
    return frame


def in_all_forms(values: list[Any]) -> dict[str, pd.DataFrame]:
    """Return the frame with one column `x` of these values, and a second one without nulls, by its form."""
    lines = ["x,y", *(f"{'' if value is None else value},1" for value in values)]
    return {
        "records": read([{"x": value, "y": 1} for value in values]),
        "records without the key": read([{"y": 1} | ({} if value is None else {"x": value}) for value in values]),
        "columns": read({"x": values, "y": [1] * len(values)}),
        "split": read({"columns": ["x", "y"], "data": [[value, 1] for value in values]}),
        "csv": read("\n".join(lines).encode(), b"text/csv"),
    }


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([None], "float64"),
        ([None, None], "float64"),
        ([None, 3], "float64"),
        ([3, 4], "int64"),
        ([0.5, 3], "float64"),
        ([LARGE], "int64"),
        ([LARGE, 1], "int64"),
        ([LARGE, None], "Int64"),
        ([-LARGE, None, 1], "Int64"),
        ([2**63 + 1], "uint64"),
        ([2**63 + 1, None], "UInt64"),
        ([2**63 + 1, -1, None], "object"),
        ([2**80 + 1, None], "object"),
        ([2**80 + 1, 1], "object"),
        ([LARGE, 0.5], "object"),
        ([LARGE, 0.5, None], "object"),
        ([2**54, None, 0.5], "float64"),
        ([1e300, None], "float64"),
    ],
)
def test_numbers_have_one_type_in_every_form(values: list[Any], dtype: str) -> None:
    for form, frame in in_all_forms(values).items():
        if form == "records without the key" and not any(value is not None for value in values):
            continue  # then there is no such column
        assert str(frame["x"].dtype) == dtype, form
        assert [None if pd.isna(each) else each for each in frame["x"]] == values, form
        assert str(frame["y"].dtype) == "int64"


@pytest.mark.parametrize("values", [["a", None], [True, None], [[1], None], ["a", 1, None]])
def test_null_is_nan_beside_other_values(values: list[Any]) -> None:
    for frame in (read([{"x": value} for value in values]), read({"x": values})):
        assert frame["x"].tolist()[:-1] == values[:-1]
        assert isinstance(frame["x"].tolist()[-1], float)
        assert math.isnan(frame["x"].tolist()[-1])


@pytest.mark.parametrize(
    ("value", "shape"),
    [([], (0, 0)), ([{}, {}], (2, 0)), ({}, (0, 0)), ({"x": []}, (0, 1)), ({"columns": ["x"], "data": []}, (0, 1))],
)
def test_empty_frames_keep_their_shape(value: Any, shape: tuple[int, int]) -> None:
    assert read(value).shape == shape


@pytest.mark.parametrize(
    "value",
    [
        {"dataframe_records": [{"a": 1}]},
        {"dataframe_split": {"columns": ["a"], "data": [[1]]}},
        {"instances": [[1, 2]], "parameters": {}},
        {"instances": [{"a": 1}]},
        {"inputs": {"a": [1]}},
    ],
)
def test_the_forms_of_other_systems_are_refused_by_their_names(value: dict[str, Any]) -> None:
    name = next(iter(value))
    with pytest.raises(PayloadError, match=f"Input should be a list of records.*not an object with the key '{name}'"):
        read(value)


def test_columns_may_have_the_names_of_such_forms() -> None:
    assert read({"instances": [1, 2], "inputs": ["a", "b"]}).shape == (2, 2)
    assert read([{"inputs": [1, 2]}]).shape == (1, 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"a,b,a\n1,2,3\n", "names that differ, but 'a' is there twice"),
        (b"a;b\n1;2\n", "CSV with commas, but its first line has ';'"),
        (b"\na\tb\n1\t2\n", "CSV with commas, but its first line has '\\\\t'"),
    ],
)
def test_csv_that_pandas_would_change_silently_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        read(body, b"text/csv")


def test_csv_may_have_quoted_names_and_columns_without_name() -> None:
    assert list(read(b'\xef\xbb\xbf"a;b",c\n1,2\n', b"text/csv")) == ["a;b", "c"]
    assert read(b"a,,\n1,2,3\n", b"text/csv").shape == (1, 3)


@pytest.mark.parametrize("values", [[2**70], [2**63, -1], [2**70, 0.5]])
def test_whole_numbers_that_no_array_holds_are_refused(values: list[float]) -> None:
    arrays = payload_type(np.ndarray)
    assert arrays is not None
    with pytest.raises(PayloadError, match=r"payload\[0\]: Input should be a whole number in the range of int64"):
        parse_typed(arrays, JSON, json.dumps(values).encode())
    assert parse_typed(arrays, JSON, b"[9223372036854775808, 1]").dtype == "uint64"
    assert parse_typed(arrays, JSON, b"[1e300, 1]").dtype == "float64"


@pytest.mark.parametrize("content_type", [b"image/png", b"video/mp4", b"application/xml", b"multipart/mixed"])
def test_a_body_of_another_kind_is_no_csv(content_type: bytes) -> None:
    with pytest.raises(PayloadError, match="Input should be JSON or CSV, not "):
        read(b"a,b\n1,2\n", content_type)
