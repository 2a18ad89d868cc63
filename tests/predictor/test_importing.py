from __future__ import annotations

import pytest

from cortex.predictor.importing import suggest_import, suggest_requirement


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("yaml", "add PyYAML to requirements.txt"),
        ("yaml.nodes", "add PyYAML to requirements.txt"),
        ("transformers", "add transformers to requirements.txt"),
        ("sentence_transformers", "add sentence-transformers to requirements.txt"),
        ("google.cloud.storage", "add google-cloud-storage to requirements.txt"),
        ("google.protobuf.message", "add protobuf to requirements.txt"),
        ("cv2", "add opencv-python-headless to requirements.txt, or install cortex-serving[predictors] for all APIs"),
        ("sklearn.svm", "add scikit-learn to requirements.txt, or install cortex-serving[predictors] for all APIs"),
        ("PIL", "add Pillow to requirements.txt, or install cortex-serving[predictors] for all APIs"),
        ("torch", "add torch to requirements.txt, or install cortex-serving[torch] for all APIs"),
        ("torchvision", "add torchvision to requirements.txt, or install cortex-serving[torch] for all APIs"),
        ("tensorflow", "add tensorflow-cpu to requirements.txt, or install cortex-serving[tensorflow] for all APIs"),
        (
            "tensorflow_hub",
            "add tensorflow-hub to requirements.txt, or install cortex-serving[tensorflow] for all APIs",
        ),
        (
            "tensorflow_serving.apis",
            "add tensorflow-serving-api to requirements.txt, or install cortex-serving[tensorflow] for all APIs",
        ),
        ("pkg_resources", "add setuptools<81 to requirements.txt"),
        ("np_utils", "add np-utils to requirements.txt, or install cortex-serving[predictors] for all APIs"),
        ("xgboost", "add xgboost to requirements.txt, or install cortex-serving[xgboost] for all APIs"),
        ("onnxruntime", "add onnxruntime to requirements.txt, or install cortex-serving[onnx] for all APIs"),
    ],
)
def test_suggests_the_package_of_a_module(module: str, hint: str) -> None:
    assert suggest_requirement(module) == hint


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("helper", "add helper to requirements.txt, or helper.py to the project"),
        ("my_lib.text", "add my-lib to requirements.txt, or my_lib/text.py to the project"),
        ("yaml", "add PyYAML to requirements.txt"),
        ("torch", "add torch to requirements.txt, or install cortex-serving[torch] for all APIs"),
    ],
)
def test_a_missing_module_that_is_no_known_package_may_be_a_file_of_the_project(module: str, hint: str) -> None:
    assert suggest_import(module) == hint
