"""Annotations that type checkers see and replicas do not are mistakes, with their line."""

from __future__ import annotations

import textwrap

import pytest

from cortex.predictor.checks.annotation_checks import check_annotations

FILE = """
    from __future__ import annotations
    import typing
    from typing import TYPE_CHECKING, Annotated, Literal
    import numpy as np

    if TYPE_CHECKING:
        from flowers import Iris
        import pandas as pd

    class Item:
        pass

    class Handler:
        def __init__(self, config): ...

        class Inner: ...

        def handle_post(self, payload: ANNOTATION, headers: Anything): ...
"""


def mistakes(annotation: str, text: str = FILE, interface: str = "handler") -> list[str]:
    source = textwrap.dedent(text).replace("ANNOTATION", annotation)
    return [str(found) for found in check_annotations(source, "handler.py", interface)]


@pytest.mark.parametrize(
    "annotation",
    ["Item", "list[Item] | None", "'Item'", "list['Item']", "typing.Optional[Item]", "Inner", "dict[str, int]",
     "Literal['a', 'b']", "Annotated[np.ndarray, 'float32', Undefined]", "'any text, really'", "(1 if x else 2)"],
)  # fmt: skip
def test_names_that_exist_are_fine(annotation: str) -> None:
    assert mistakes(annotation) == []


@pytest.mark.parametrize("annotation", ["Iris", "'Iris'", "list[Iris]", "list['Iris']", "Annotated[Iris, 1]"])
def test_names_for_type_checkers_are_mistakes(annotation: str) -> None:
    assert mistakes(annotation) == [
        'handler.py:19:36: handle_post(): "Iris" in the annotation of payload is imported only for type checkers '
        "(import it outside of `if TYPE_CHECKING:`)"
    ]


def test_undefined_names_are_mistakes_with_a_guess() -> None:
    assert mistakes("Itme") == [
        'handler.py:19:36: handle_post(): "Itme" in the annotation of payload is not defined (did you mean Item?)'
    ]
    assert "import or define it" in mistakes("Zebra")[0]
    assert mistakes("pd.DataFrame")[0].startswith('handler.py:19:36: handle_post(): "pd" in')


def test_only_typed_generations_are_checked() -> None:
    assert (
        mistakes("Itme", FILE.replace("Handler", "PythonPredictor").replace("handle_post", "predict"), "predictor")
        == []
    )
    assert mistakes("Itme", FILE + "    from x import *\n") == []
    assert mistakes("Itme", "class Handler(") == []
