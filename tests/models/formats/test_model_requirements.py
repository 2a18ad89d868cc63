from __future__ import annotations

import pytest

from cortex.errors import ModelFormatError
from cortex.models.formats.requirements import (
    ModelRequirement,
    check_installed,
    installed_version,
    required_by_file,
    saved_by,
    saved_by_older,
    tensorflow_requirement,
    with_minimum_versions,
)


@pytest.mark.parametrize(
    ("requirement", "installed", "fits"),
    [
        (saved_by("scikit-learn", "1.9.1"), "1.9.0", True),
        (saved_by("scikit-learn", "1.9.1"), "1.9.3.post1", True),
        (saved_by("scikit-learn", "1.9.1"), "1.8.9", False),
        (saved_by("scikit-learn", "1.9.1"), "1.10.0", False),
        (saved_by("scikit-learn", "1.9.1"), None, False),
        (saved_by("scikit-learn", "?"), "0.1", True),
        (saved_by_older("xgboost", "3.2.0"), "3.2.0", True),
        (saved_by_older("xgboost", "3.2.0"), "4.0.0", True),
        (saved_by_older("xgboost", "3.2.0"), "3.1.9", False),
        (tensorflow_requirement("2.21.0"), "2.4.0", True),
        (tensorflow_requirement("2.21.0"), "1.15.5", False),
        (ModelRequirement("onnxruntime", "onnxruntime>=1.18", ">=1.18", "it uses ONNX opset 21"), "1.17.3", False),
    ],
)
def test_an_installed_version_fits_or_not(requirement: ModelRequirement, installed: str | None, fits: bool) -> None:
    if fits:
        check_installed([requirement], "model.bin", lambda package: installed)
        return
    with pytest.raises(ModelFormatError, match="model.bin can't be loaded here") as caught:
        check_installed([requirement], "model.bin", lambda package: installed)
    assert str(caught.value).endswith(f"write into requirements.txt: {requirement.line}")


def test_all_mismatches_are_one_message() -> None:
    required = [saved_by("scikit-learn", "1.9.1"), ModelRequirement("skops", "skops")]
    with pytest.raises(ModelFormatError) as caught:
        check_installed(required, "m.skops", {"scikit-learn": "1.8.0"}.get)
    assert str(caught.value) == (
        "m.skops can't be loaded here: it was saved by scikit-learn 1.9.1, but scikit-learn 1.8.0 is installed; "
        "skops is not installed; write into requirements.txt: scikit-learn==1.9.1, skops"
    )


def test_a_requirements_file_is_read_line_by_line() -> None:
    text = "a==1.2.3\nb>=2,<3  # why\n-r x\nhttps://host/c.whl\nd @ https://host/d.whl\ne; python_version < '3'\nf\n"
    found = required_by_file(text)
    assert [(each.package, each.line, each.accepts) for each in found] == [
        ("a", "a==1.2.3", "==1.2.*"),
        ("b", "b>=2,<3", "<3,>=2"),
        ("f", "f", ""),
    ]


def test_packages_that_provide_the_same_module_count() -> None:
    assert installed_version("xgboost") == installed_version("xgboost-cpu") is not None
    assert installed_version("no-such-package") is None


@pytest.mark.parametrize(
    ("line", "safe"),
    [
        ("onnxruntime==1.20.1", ("onnxruntime>=1.24", ">=1.24")),
        ("onnxruntime==1.26.0", ("onnxruntime==1.26.0", "==1.26.*")),
        ("onnxruntime", ("onnxruntime>=1.24", ">=1.24")),
        ("onnxruntime>=1.15,<1.30", ("onnxruntime>=1.24,<1.30", ">=1.24,<1.30")),
        ("onnxruntime<1.24", ("onnxruntime>=1.24", ">=1.24")),
        ("onnx~=1.15", ("onnx>=1.16", ">=1.16")),
        ("lightgbm==4.5.0", ("lightgbm>=4.6", ">=4.6")),
        ("scipy==1.1.0", ("scipy==1.1.0", "==1.1.*")),
    ],
)
def test_packages_of_models_that_nobody_trusts_have_a_minimum_version(line: str, safe: tuple[str, str]) -> None:
    [found] = with_minimum_versions(required_by_file(line))
    assert (found.line, found.accepts) == safe


def test_a_saved_model_needs_a_version_of_tensorflow_without_known_holes() -> None:
    [found] = with_minimum_versions([tensorflow_requirement("2.4.0")])
    assert (found.line, found.accepts) == ("tensorflow-cpu>=2.12", ">=2.12")
    assert with_minimum_versions([tensorflow_requirement("2.21.0")])[0].line == "tensorflow-cpu==2.21.0"
