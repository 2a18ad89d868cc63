"""Packages that older documents call pre-installed can be imported, or the documentation says what to use instead."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
#: Package of the lists of all older versions → module.
PACKAGES = {
    "boto3": "boto3",
    "cloudpickle": "cloudpickle",
    "Cython": "Cython",
    "dill": "dill",
    "fastapi": "fastapi",
    "joblib": "joblib",
    "Keras": "keras",
    "msgpack": "msgpack",
    "neuron-cc": "neuroncc",
    "nltk": "nltk",
    "np-utils": "np_utils",
    "numpy": "numpy",
    "onnxruntime": "onnxruntime",
    "opencv-python": "cv2",
    "pandas": "pandas",
    "Pillow": "PIL",
    "pyyaml": "yaml",
    "requests": "requests",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
    "scipy": "scipy",
    "six": "six",
    "statsmodels": "statsmodels",
    "sympy": "sympy",
    "tensor2tensor": "tensor2tensor",
    "tensorflow": "tensorflow",
    "tensorflow-hub": "tensorflow_hub",
    "tensorflow-neuron": "tensorflow_neuron",
    "tensorflow-serving-api": "tensorflow_serving.apis",
    "torch": "torch",
    "torch-neuron": "torch_neuron",
    "torchvision": "torchvision",
    "xgboost": "xgboost",
}
#: The default builds for Linux need gigabytes of CUDA libraries. So only their place in an extra is tested.
TOO_LARGE = {"torch", "torchvision"}


def documented_as_absent() -> set[str]:
    page = (ROOT / "docs/howto/project-files.md").read_text()
    section = page.partition("in no extra:")[2]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall("`(.+?)`", row)}


def installable() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [
        project["dependencies"],
        *(extras[name] for name in ("predictors", "torch", "tensorflow", "xgboost", "onnx")),
    ]
    names = (re.split(r"[\[<>=!~;]", requirement)[0].lower() for every in lists for requirement in every)
    return {name.strip().replace("-headless", "") for name in names}


def test_each_package_of_the_old_lists_is_in_an_extra_or_documented_as_absent() -> None:
    absent = documented_as_absent()
    assert {name for name in PACKAGES if name.lower() not in installable()} == absent


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_each_package_of_the_old_lists_imports_after_the_documented_installation(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    extras = f"{ROOT}[predictors,tensorflow,xgboost,onnx]"
    subprocess.run([python, "-m", "pip", "install", "--quiet", extras], check=True)
    absent = documented_as_absent() | TOO_LARGE
    modules = [module for package, module in PACKAGES.items() if package not in absent]
    failed = {}
    for module in modules:
        imported = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
        if imported.returncode:
            failed[module] = imported.stderr[-400:]
    assert not failed
