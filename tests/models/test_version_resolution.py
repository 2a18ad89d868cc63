"""Resolution of model names and versions, and its errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import ModelError
from cortex.models.registry import resolve_version
from cortex.models.spec import DEFAULT_MODEL, Catalogue, Model, ModelPath, ModelProblem, ModelSource, Version

DIR = ModelSource("python", dir="s3://bucket/models")
PATHS = ModelSource("python", paths=(ModelPath("a", "s3://b/a"), ModelPath("b", "s3://b/b")))
PATH = ModelSource("python", paths=(ModelPath(DEFAULT_MODEL, "s3://bucket/iris"),))


def catalogue(*problems: ModelProblem, **models: list[str]) -> Catalogue:
    found = tuple(
        Model(name, tuple(Version(number, name + number, 1, 0.0) for number in numbers))
        for name, numbers in models.items()
    )
    return Catalogue(found, problems)


AB = catalogue(a=["1", "9", "10"], b=["1"])
DEFAULT = catalogue(**{DEFAULT_MODEL: ["3"]})


def test_latest_is_the_greatest_number_not_the_greatest_text() -> None:
    assert resolve_version(DIR, AB, "a", "latest")[1].number == "10"


def test_a_version_is_found_by_its_number() -> None:
    model, version = resolve_version(PATHS, AB, "a", "9")
    assert (model.name, version.number) == ("a", "9")


@pytest.mark.parametrize("name", [None, "anything", "b", 5])
def test_path_ignores_the_name(name: object) -> None:
    assert resolve_version(PATH, DEFAULT, name, "latest")[1].number == "3"


@pytest.mark.parametrize(
    ("source", "name", "version", "message"),
    [
        (DIR, "a", 1, 'model_version must be str, not int; write "1"'),
        (DIR, "a", True, 'model_version must be str, not bool; write "1" or "latest"'),
        (DIR, "a", None, 'model_version must be str, not NoneType; write "1" or "latest"'),
        (DIR, "a", 1.5, 'model_version must be str, not float; write "1" or "latest"'),
        (DIR, "a", "x", "model_version must be either a parse-able numeric value or 'latest', not 'x'"),
        (DIR, "a", "", "model_version must be either a parse-able numeric value or 'latest', not ''"),
        (DIR, "a", "1.0", "model_version must be either a parse-able numeric value or 'latest', not '1.0'"),
        (DIR, None, "latest", "model_name was not specified, choose one of the following: ['a', 'b']"),
        (PATHS, None, "latest", "model_name was not specified, choose one of the following: ['a', 'b']"),
        (DIR, ["a"], "latest", "model_name must be str, not list; choose one of the following: ['a', 'b']"),
        (DIR, "x", "latest", "'x' model wasn't found in the list of available models: ['a', 'b']"),
        (PATHS, "x", "1", "'x' model wasn't found in the list of available models: ['a', 'b']"),
        (DIR, "a", "2", "model a of version 2 wasn't found; available versions: ['1', '9', '10']"),
        (DIR, "a", "-1", "model a of version -1 wasn't found; available versions: ['1', '9', '10']"),
    ],
)
def test_errors_list_the_available_models_or_versions(
    source: ModelSource, name: object, version: object, message: str
) -> None:
    with pytest.raises(ModelError) as raised:
        resolve_version(source, AB, name, version)
    assert str(raised.value) == message


def test_the_model_of_path_is_called_by_its_location() -> None:
    with pytest.raises(ModelError) as raised:
        resolve_version(PATH, DEFAULT, None, "4")
    assert str(raised.value) == "model s3://bucket/iris of version 4 wasn't found; available versions: ['3']"


def test_a_named_model_without_versions_is_reported_as_removed() -> None:
    with pytest.raises(ModelError) as raised:
        resolve_version(PATHS, catalogue(a=["1"]), "b", "latest")
    assert str(raised.value) == "'b' model's versions have been removed; add at least a version to serve it"


def test_the_known_problem_of_a_model_is_added_to_the_error() -> None:
    broken = catalogue(ModelProblem("b", None, "no files below s3://b/b", 0.0), a=["1"])
    with pytest.raises(ModelError, match="its files can't be served: no files below s3://b/b"):
        resolve_version(PATHS, broken, "b", "latest")
    broken = catalogue(ModelProblem("a", "2", "saved_model.pb is missing", 0.0), a=["1"])
    with pytest.raises(ModelError, match="its files can't be served: saved_model.pb is missing"):
        resolve_version(DIR, broken, "a", "2")
    with pytest.raises(ModelError) as raised:
        resolve_version(DIR, broken, "a", "3")
    assert "saved_model.pb" not in str(raised.value)


def test_a_list_of_very_many_models_is_truncated() -> None:
    many = catalogue(**{f"m{number:04}": ["1"] for number in range(1000)})
    with pytest.raises(ModelError) as raised:
        resolve_version(DIR, many, "x" * 10_000, "latest")
    assert "'m0049'] and 950 more" in str(raised.value)
    assert len(str(raised.value)) < 1000


@given(st.one_of(st.text(), st.integers(), st.none(), st.binary()), st.one_of(st.text(), st.integers(), st.none()))
def test_arbitrary_arguments_give_a_model_or_a_model_error(name: object, version: object) -> None:
    try:
        model, found = resolve_version(DIR, AB, name, version)
    except ModelError:
        return
    assert found in model.versions


def test_a_number_too_long_for_python_is_rejected_as_a_version() -> None:
    with pytest.raises(ModelError, match="parse-able numeric value"):
        resolve_version(DIR, AB, "a", "1" * 5000)
