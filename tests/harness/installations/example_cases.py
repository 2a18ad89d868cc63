"""The examples and the answer of each to its sample: for tests that call them directly and tests that deploy them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

EXAMPLES_DIR = Path(__file__).parents[3] / "examples"


@dataclass(frozen=True)
class Example:
    """One folder under `examples/`."""

    name: str
    api: str
    endpoint: str
    artefact: str
    sample: str
    content_type: str
    answer: Any

    @property
    def folder(self) -> Path:
        """The project folder, which holds its cortex.yaml."""
        return EXAMPLES_DIR / self.name

    @property
    def sample_bytes(self) -> bytes:
        """The body of a request."""
        return (self.folder / self.sample).read_bytes()


EXAMPLES = [
    Example(
        name="iris-functions",
        api="classifier",
        endpoint="/iris/classifier",
        artefact="model.npz",
        sample="sample.json",
        content_type="application/json",
        answer="versicolor",
    ),
    Example(
        name="iris-predictor",
        api="iris-predictor",
        endpoint="/iris-predictor",
        artefact="model.onnx",
        sample="sample.json",
        content_type="application/json",
        answer={"label": "virginica", "probability": 0.95},
    ),
    Example(
        name="iris-classifier",
        api="iris-classifier",
        endpoint="/iris-classifier",
        artefact="model.npz",
        sample="sample.json",
        content_type="application/json",
        answer={"label": "setosa", "probability": 0.9769},
    ),
    Example(
        name="text-stream",
        api="text-stream",
        endpoint="/text-stream",
        artefact="model.json",
        sample="sample.json",
        content_type="application/json",
        answer="the boats of the pier, but she could see a boy with ",
    ),
    Example(
        name="digit-image",
        api="digit-image",
        endpoint="/digit-image",
        artefact="model.npz",
        sample="sample.png",
        content_type="image/png",
        answer={"digit": 7, "probability": 0.9999},
    ),
]


@dataclass(frozen=True)
class ModelExample:
    """An example whose models cortex loads; `make_model.py` creates them."""

    name: str
    sample: Any
    answers: dict[str, Any]  #: query string → answer

    @property
    def folder(self) -> Path:
        """The project folder, which holds its cortex.yaml."""
        return EXAMPLES_DIR / self.name


MODEL_EXAMPLES = [
    ModelExample(
        name="onnx-iris",
        sample={"sepal_length": 6.0, "sepal_width": 2.7, "petal_length": 5.1, "petal_width": 1.6},
        answers={"": {"label": "virginica", "probability": 0.6275}},
    ),
    ModelExample(
        name="tensorflow-iris",
        sample={"sepal_length": 6.0, "sepal_width": 2.7, "petal_length": 5.1, "petal_width": 1.6},
        answers={"": {"label": "virginica", "probability": 0.6501}},
    ),
    ModelExample(
        name="onnx-multi-model",
        sample=[6.0, 2.7, 5.1, 1.6],
        answers={
            "?model=iris": {"class": 2, "probability": 0.6275},
            "?model=iris&version=1": {"class": 2, "probability": 0.7},
        },
    ),
    ModelExample(
        name="sklearn-live-reload",
        sample=[0.0381, 0.0507, 0.0617, 0.0219, -0.0442, -0.0348, -0.0434, -0.0026, 0.0199, -0.0176],
        answers={"": {"progression": 179.4, "patients": 100}},
    ),
]


@dataclass(frozen=True)
class BatchExample:
    """An example whose sample is a job; its README copies the job's files to `/tmp`."""

    name: str
    copied: tuple[str, ...]  #: files and folders that the job reads
    shown: Any  #: a part of the results that the README shows
    results: list[Any]  #: what the job's batches return, in their order

    @property
    def folder(self) -> Path:
        """The project folder, which holds its cortex.yaml."""
        return EXAMPLES_DIR / self.name


@dataclass(frozen=True)
class AsyncExample:
    """An example of an AsyncAPI."""

    name: str
    sample: str
    content_type: str
    result: Any

    @property
    def folder(self) -> Path:
        """The project folder, which holds its cortex.yaml."""
        return EXAMPLES_DIR / self.name


#: Their README is tested as it is.
TASK_EXAMPLES = {"task-disk-report"}
COMMAND_EXAMPLES = {"own-server"}
#: Tested in `tests/examples/test_llm_example.py`, and by its client in `tests/e2e/test_applications.py`.
ROUTE_EXAMPLES = {"llm-chat"}
#: They have no sample: each path is tested.
APPLICATION_EXAMPLES = {"fastapi-app", "gradio-chat"}

ASYNC_EXAMPLES = [
    AsyncExample(
        name="async-word-count",
        sample="sample.txt",
        content_type="text/plain",
        result={"words": 23, "most": [["the", 5], ["sea", 3], ["was", 3]]},
    )
]

DIGITS = [2, 8, 2, 6, 6, 7, 1, 9, 8, 5, 2, 8, 6, 6, 6, 6, 1, 0, 5, 8]

BATCH_EXAMPLES = [
    BatchExample(
        name="batch-digit-classifier",
        copied=("digits",),
        shown={"file": "/tmp/digits/00.png", "digit": 2},
        results=[
            [{"file": f"/tmp/digits/{number:02}.png", "digit": DIGITS[number]} for number in range(first, first + 5)]
            for first in range(0, 20, 5)
        ],
    ),
    BatchExample(name="batch-sum", copied=(), shown={"batches": 10, "sum": 5050}, results=[]),
    BatchExample(
        name="batch-onnx-iris",
        copied=("flowers.ndjson",),
        shown=["setosa"] * 4,
        results=[["setosa"] * 4, ["versicolor"] * 3 + ["virginica"], ["virginica"] * 2],
    ),
]


def with_what_is_installed(project: Path) -> Path:
    """Run it on the tests' packages, which must satisfy its requirements: installing others takes half a minute."""
    asked_for = project / "requirements.txt"
    for line in asked_for.read_text().splitlines():
        asked = Requirement(line)
        assert asked.specifier.contains(version(asked.name)), line
    asked_for.unlink()
    return project


def near(answer: Any) -> Any:
    """Compare approximately: training gives slightly different results on other processors."""
    if isinstance(answer, dict):
        return {name: near(value) for name, value in answer.items()}
    return pytest.approx(answer, rel=0.01) if isinstance(answer, float) else answer
