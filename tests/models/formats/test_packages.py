"""The packages that models need, beside those that the user's requirements.txt names."""

from __future__ import annotations

import pytest

from cortex.models.formats.detection import Detection
from cortex.models.formats.packages import choose_packages, packages_to_install
from cortex.models.formats.requirements import ModelRequirement, saved_by, saved_by_older

SKLEARN = saved_by("scikit-learn", "1.9.1")
XGBOOST = saved_by_older("xgboost", "3.2.0", "XGBoost")


def found(*requirements: ModelRequirement, name: str = "iris.skops", format_: str = "skops") -> Detection:
    return Detection(format_, f"/models/{name}", "a model", requirements=requirements)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("requirement", "user", "packages"),
    [
        (SKLEARN, "", {"scikit-learn==1.9.1": "==1.9.*"}),
        (SKLEARN, "numpy==2.1.0\n-r more.txt\n", {"scikit-learn==1.9.1": "==1.9.*"}),
        (SKLEARN, "scikit-learn", {"scikit-learn==1.9.1": "==1.9.*"}),
        (SKLEARN, "Scikit_Learn >= 1.5", {"scikit-learn==1.9.1": "==1.9.*"}),
        (SKLEARN, "scikit-learn!=1.9.1", {"scikit-learn==1.9.*": "==1.9.*"}),
        (SKLEARN, "scikit-learn==1.9.0", {}),
        (SKLEARN, "scikit-learn==1.0; python_version < '3'", {"scikit-learn==1.9.1": "==1.9.*"}),
        (XGBOOST, "xgboost==4.0", {}),
        (XGBOOST, "xgboost-cpu", {}),
        (ModelRequirement("onnxruntime", "onnxruntime>=1.18", ">=1.18"), "onnxruntime-gpu==1.25", {}),
        (ModelRequirement("lightgbm", "lightgbm"), "lightgbm==4.6.0", {}),
    ],
)
def test_packages_of_a_model_are_chosen_beside_those_of_the_user(
    requirement: ModelRequirement, user: str, packages: dict[str, str]
) -> None:
    assert choose_packages([found(requirement)], user, is_trusted=False) == (packages, [])


def test_a_line_of_the_user_that_cannot_load_the_model_is_a_conflict() -> None:
    packages, (conflict,) = choose_packages([found(SKLEARN)], "numpy\nscikit-learn==1.5.0\n", is_trusted=False)
    assert packages == {}
    assert conflict.message == "scikit-learn==1.5.0 can't load iris.skops: it was saved by scikit-learn 1.9.1"
    assert conflict.fix == "write scikit-learn==1.9.1"
    assert conflict.written is not None
    assert (conflict.written.line, conflict.written.column) == (2, 1)


def test_models_of_one_api_share_a_version_or_contradict_each_other() -> None:
    older, other = saved_by("scikit-learn", "1.9.0"), saved_by("scikit-learn", "1.8.0")
    assert choose_packages([found(older), found(SKLEARN)], "", is_trusted=False)[0] == {
        "scikit-learn==1.9.1": "==1.9.*"
    }
    packages, (conflict,) = choose_packages([found(other, name="old.skops"), found(SKLEARN)], "", is_trusted=False)
    assert packages == {}
    assert conflict.message == (
        "iris.skops needs scikit-learn==1.9.1 (it was saved by scikit-learn 1.9.1), and "
        "old.skops needs scikit-learn==1.8.0 (it was saved by scikit-learn 1.8.0)"
    )


def test_only_well_known_packages_are_installed_for_mlflow_models_that_nobody_trusts() -> None:
    model = found(SKLEARN, ModelRequirement("evil-package", "evil-package"), format_="mlflow")
    assert list(choose_packages([model], "", is_trusted=False)[0]) == ["scikit-learn==1.9.1"]
    assert list(choose_packages([model], "", is_trusted=True)[0]) == ["scikit-learn==1.9.1", "evil-package"]


def test_packages_are_installed_if_they_are_missing_or_the_user_names_them() -> None:
    packages = {"numpy==2.0.0": ">=1", "no-such-package==1.2": "==1.2.*"}
    assert packages_to_install(packages, "") == ("no-such-package==1.2",)
    assert packages_to_install(packages, "numpy>=2\n") == ("numpy==2.0.0", "no-such-package==1.2")
    assert packages_to_install({}, "numpy>=2\n") == ()


def test_a_pin_of_the_project_below_the_minimum_is_a_conflict_unless_the_model_is_trusted() -> None:
    model = found(ModelRequirement("onnxruntime", "onnxruntime>=1.12", ">=1.12"), name="m.onnx", format_="onnx")
    packages, [conflict] = choose_packages([model], "onnxruntime==1.20.1", False)
    assert packages == {} and conflict.fix == "write onnxruntime>=1.24"
    assert conflict.message == (
        "onnxruntime==1.20.1 can't load m.onnx: only onnxruntime 1.24 and newer is safe with models that nobody trusts"
    )
    assert choose_packages([model], "onnxruntime==1.20.1", True) == ({}, [])
