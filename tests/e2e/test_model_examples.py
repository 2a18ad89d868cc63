"""The examples whose models cortex loads: create each model, then deploy the example as its README describes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.installations.example_cases import MODEL_EXAMPLES, ModelExample, near, with_what_is_installed
from harness.installations.installation import Installation, installation
from harness.servers.buckets import Bucket, RemoteBucket, variables
from harness.servers.s3 import SwiftServer
from harness.wait import PATIENCE_S, SLACK, wait_until

REGRESSION = next(example for example in MODEL_EXAMPLES if example.name == "sklearn-live-reload")
#: What REGRESSION answers once its model is made again, of more patients.
NEWER = {"progression": 192.7, "patients": 200}
TENSORFLOW = next(example for example in MODEL_EXAMPLES if example.name == "tensorflow-iris")


@pytest.fixture(scope="module")
def bucket(swift: SwiftServer) -> Bucket:
    return RemoteBucket("s3://models", swift)


@pytest.fixture(scope="module")
def cortex(bucket: Bucket) -> Iterator[Installation]:
    with installation(variables([bucket])) as made:
        yield made


def make_model(project: Path, cortex: Installation, *destination: str) -> None:
    command = [sys.executable, "make_model.py", *destination]
    done = subprocess.run(
        command, cwd=project, env=cortex.environ, capture_output=True, text=True, timeout=PATIENCE_S * SLACK
    )
    assert done.returncode == 0, done.stderr


def copied(example: ModelExample, folder: Path, models: str | None = None) -> Path:
    """Copy a project as in a clone; `models` replaces the location of its models."""
    project = folder / example.name
    shutil.copytree(example.folder, project, ignore=shutil.ignore_patterns("__pycache__", "models"))
    if models is not None:
        lines = (project / "cortex.yaml").read_text().splitlines()
        moved = [f"{line.partition(': ')[0]}: {models}" if is_models(line) else line for line in lines]
        assert moved != lines
        (project / "cortex.yaml").write_text("\n".join(moved) + "\n")
    return project


def is_models(line: str) -> bool:
    """Return whether a line contains the location of the models, with the alternatives in its comment."""
    return line.strip().startswith(("path:", "dir:")) and "s3://" in line


def check_answers(cortex: Installation, example: ModelExample) -> None:
    for query, answer in example.answers.items():
        reply = cortex.post(f"/{example.name}{query}", example.sample)
        assert (reply.status, reply.body and reply.json) == (200, near(answer)), query


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(each, marks=[pytest.mark.long] if each is TENSORFLOW else [])
        for each in MODEL_EXAMPLES
        if each is not REGRESSION
    ],
    ids=lambda example: example.name,
)
def test_example_is_deployed_from_a_clone_once_its_model_is_made(
    cortex: Installation, example: ModelExample, tmp_path: Path
) -> None:
    project = copied(example, tmp_path)
    if example is TENSORFLOW:
        with_what_is_installed(project)
    make_model(project, cortex)
    cortex.cortex("deploy", project, timeout_s=110)
    check_answers(cortex, example)
    cortex.cortex("delete", example.name, "-f")


@pytest.mark.long
@pytest.mark.parametrize(
    "example", [each for each in MODEL_EXAMPLES if each is not TENSORFLOW], ids=lambda example: example.name
)
def test_example_is_deployed_from_an_s3_endpoint(
    cortex: Installation, bucket: Bucket, example: ModelExample, tmp_path: Path
) -> None:
    models = f"{bucket.url}/{example.name}"
    project = copied(example, tmp_path, models)
    if example is REGRESSION:
        with_what_is_installed(project)
    make_model(project, cortex, models)
    cortex.cortex("deploy", project)
    check_answers(cortex, example)
    if example is REGRESSION:
        make_model(project, cortex, models)
        wait_until(lambda: cortex.post(f"/{example.name}", example.sample).json == near(NEWER))
    cortex.cortex("delete", example.name, "-f")


@pytest.mark.long
def test_published_regression_is_served_from_a_folder_without_a_deploy(cortex: Installation, tmp_path: Path) -> None:
    project = with_what_is_installed(copied(REGRESSION, tmp_path, models=str(tmp_path / "models")))
    make_model(project, cortex, str(tmp_path / "models"))
    cortex.cortex("deploy", project)
    check_answers(cortex, REGRESSION)
    make_model(project, cortex, str(tmp_path / "models"))
    wait_until(lambda: cortex.post(f"/{REGRESSION.name}", REGRESSION.sample).json == near(NEWER))
    shutil.rmtree(tmp_path / "models" / "2")
    wait_until(lambda: cortex.post(f"/{REGRESSION.name}", REGRESSION.sample).json == near(REGRESSION.answers[""]), 6)
    cortex.cortex("delete", REGRESSION.name, "-f")
