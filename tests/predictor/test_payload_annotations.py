"""Annotations of payloads that nothing can be read as are mistakes, in every kind of API that reads them."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.errors import UserError

CLASS = """
    from __future__ import annotations
    import typing
    import pydantic
    import pydantic.v1
    import numpy as np
    from typing import TYPE_CHECKING, Annotated, Any
    from pydantic import BaseModel

    if TYPE_CHECKING:
        from nowhere import Iris

    class Old(pydantic.v1.BaseModel):
        x: int

    class Own:
        pass

    class Tree(BaseModel):
        children: "list[Tree]" = []

    class Broken(BaseModel):
        part: "Missing"

    class Nested(BaseModel):
        model_config = {"arbitrary_types_allowed": True}
        part: Any

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload: ANNOTATION):
            return payload
"""


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ("Iris", "NameError: name 'Iris' is not defined"),
        ("list[Iris]", "NameError"),
        ("Broken", "name 'Missing' is not defined"),
        ("list[Broken]", "name 'Missing' is not defined"),
        ("Own", "Unable to generate pydantic-core schema"),
        ("list[Own]", "Unable to generate pydantic-core schema"),
        ("Old", "V1"),
        ("list[Old]", "V1"),
        ("dict[str, Old] | None", "V1"),
        ("np.array", ""),
        ("'the body of the request'", "SyntaxError"),
        ("np.datetime64", ""),
    ],
)
def test_an_annotation_that_nothing_can_be_read_as_is_refused(project: Any, annotation: str, reason: str) -> None:
    with pytest.raises(UserError, match=r"handle_post\(\): the annotation of payload can't be used: ") as caught:
        project.load("handler", CLASS.replace("ANNOTATION", annotation))
    assert reason in str(caught.value)
    assert str(caught.value).endswith("; annotate another type, Any, or nothing")


@pytest.mark.parametrize(
    "annotation",
    ["Any", "object", "dict", "list", "str", "bytes", "np.ndarray", "Tree", "Nested", "int | str", "typing.Hashable"],
)
def test_annotations_that_are_understood_are_accepted(project: Any, annotation: str) -> None:
    assert project.load("handler", CLASS.replace("ANNOTATION", annotation)).methods


def test_older_generations_ignore_their_annotations(project: Any) -> None:
    text = CLASS.replace("Handler", "PythonPredictor").replace("handle_post", "predict")
    for annotation in ("Iris", "Own", "'the body'"):
        assert project.load("predictor", text.replace("ANNOTATION", annotation)).methods
