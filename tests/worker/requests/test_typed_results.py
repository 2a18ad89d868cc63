"""Results that libraries define: models, frames and images."""

from __future__ import annotations

import datetime
import io
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pydantic
import pytest
from PIL import Image

from cortex.errors import UserError
from cortex.worker.requests.payload import PNG, encode


class Flower(pydantic.BaseModel):
    model_config = {"arbitrary_types_allowed": True}

    name: str = pydantic.Field("iris", serialization_alias="flower")
    picked: datetime.date = datetime.date(2026, 1, 31)
    score: float = 0.5
    values: Any = None
    petals: list[Flower] = []


class Root(pydantic.RootModel[list[int]]):
    pass


def encoded(value: Any) -> Any:
    return orjson.loads(encode(value).body)


PLAIN = {"flower": "iris", "picked": "2026-01-31", "score": 0.5, "values": None, "petals": []}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Flower(), PLAIN),
        ([Flower(), {"a": Flower()}], [PLAIN, {"a": PLAIN}]),
        (Flower(petals=[Flower(score=float("nan"))]), PLAIN | {"petals": [PLAIN | {"score": None}]}),
        (Flower(values=np.array([1.5, np.inf])), PLAIN | {"values": [1.5, None]}),
        ({1: Flower(values={"x": np.float32(1.5)})}, {"1": PLAIN | {"values": {"x": 1.5}}}),
        (Root([1, 2]), [1, 2]),
        ([Flower(), 2**70], [PLAIN, 2**70]),
    ],
)
def test_models_are_objects_with_their_aliases(value: Any, expected: Any) -> None:
    assert encoded(value) == expected


@pytest.mark.parametrize("value", [Flower(values=object()), [Flower(values={"x": {1, object()}})]])
def test_a_model_that_json_cannot_hold_is_named(value: Any) -> None:
    with pytest.raises(UserError, match=r"^result(\[0\])?: test_typed_results.Flower can't be encoded as JSON: "):
        encode(value)


def test_frames_are_lists_of_records() -> None:
    frame = pd.DataFrame(
        {
            "n": [1, 2],
            "x": [0.1, np.nan],
            "t": pd.to_datetime(["2026-01-31", None]),
            "s": ["a", None],
            "i": pd.array([1, None], dtype="Int64"),
        }
    )
    records = [
        {"n": 1, "x": 0.1, "t": "2026-01-31T00:00:00", "s": "a", "i": 1},
        {"n": 2, "x": None, "t": None, "s": None, "i": None},
    ]
    assert encoded(frame) == records
    assert encoded({"rows": frame, "first": frame["x"], "t": pd.NaT}) == {
        "rows": records, "first": [0.1, None], "t": None,
    }  # fmt: skip


def test_a_frame_whose_columns_share_a_name_is_refused_instead_of_losing_one() -> None:
    with pytest.raises(UserError, match=r"result\['rows'\] is a frame with several columns named 'a'"):
        encode({"rows": pd.DataFrame([[1, 2]], columns=["a", "a"])})


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "1"])
def test_images_are_png(mode: str) -> None:
    response = encode(Image.new(mode, (3, 2)))
    assert response.media_type == PNG
    assert Image.open(io.BytesIO(response.body)).size == (3, 2)
    with pytest.raises(UserError, match=r"^result\[0\]: PIL.Image.Image is not JSON serializable; save it to bytes"):
        encode([Image.new(mode, (3, 2))])
