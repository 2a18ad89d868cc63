"""Each example is called directly with its sample, and trained again: no server is involved."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from harness.installations.example_cases import (
    APPLICATION_EXAMPLES,
    ASYNC_EXAMPLES,
    BATCH_EXAMPLES,
    COMMAND_EXAMPLES,
    EXAMPLES,
    EXAMPLES_DIR,
    MODEL_EXAMPLES,
    ROUTE_EXAMPLES,
    TASK_EXAMPLES,
    BatchExample,
    Example,
    ModelExample,
)

pytestmark = pytest.mark.processes

MEBIBYTE = 1024 * 1024

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def test_every_folder_has_a_case() -> None:
    folders = {path.parent.name for path in EXAMPLES_DIR.glob("*/cortex.yaml")} - {"kubernetes"}  # a manifest
    named = {example.name for example in [*EXAMPLES, *MODEL_EXAMPLES, *BATCH_EXAMPLES, *ASYNC_EXAMPLES]}
    assert folders == named | TASK_EXAMPLES | COMMAND_EXAMPLES | ROUTE_EXAMPLES | APPLICATION_EXAMPLES


@each_example
def test_folder_is_complete_and_small(example: Example) -> None:
    for name in ("cortex.yaml", "README.md", "train.py", example.artefact, example.sample):
        assert (example.folder / name).is_file(), name
    assert (example.folder / example.artefact).stat().st_size < MEBIBYTE


@each_example
def test_readme_shows_the_right_endpoint_and_answer(example: Example) -> None:
    readme = (example.folder / "README.md").read_text()
    assert f"cortex deploy examples/{example.name}\n" in readme
    assert f"localhost:8888{example.endpoint} " in readme
    answer = example.answer if isinstance(example.answer, str) else json.dumps(example.answer)
    assert answer.strip() in readme


@pytest.mark.parametrize("example", MODEL_EXAMPLES, ids=lambda example: example.name)
def test_example_with_models_is_complete_and_its_readme_right(example: ModelExample) -> None:
    for name in ("cortex.yaml", "make_model.py", "requirements.txt"):
        assert (example.folder / name).is_file(), name
    assert json.loads((example.folder / "sample.json").read_text()) == example.sample
    readme = (example.folder / "README.md").read_text()
    for command in (f"python examples/{example.name}/make_model.py\n", f"cortex deploy examples/{example.name}\n"):
        assert command in readme
    for query, answer in example.answers.items():
        assert f"localhost:8888/{example.name}{query}" in readme
        assert json.dumps(answer) in readme


@each_example
def test_sample_gets_the_expected_answer(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer_of(example, example.folder, monkeypatch) == example.answer


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(each, marks=[] if each.name == "iris-classifier" else pytest.mark.long, id=each.name)
        for each in EXAMPLES
    ],
)
def test_training_again_gives_the_same_answer(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / example.name
    shutil.copytree(example.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / example.artefact).unlink()
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True, capture_output=True)
    assert answer_of(example, folder, monkeypatch) == example.answer


def answer_of(example: Example, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Do by hand what a replica does: load the file in its folder, construct, call once."""
    monkeypatch.chdir(folder)
    api = yaml.safe_load(Path("cortex.yaml").read_text())[-1]
    section = api.get("handler") or api["predictor"]
    module = load(folder / section["path"])
    body = example.sample_bytes
    payload = json.loads(body) if example.content_type == "application/json" else body
    return as_json(call(module, section, payload))


def call(module: ModuleType, section: dict[str, Any], payload: Any) -> Any:
    if hasattr(module, "Handler"):
        return module.Handler(section["config"]).handle_post(payload)
    if hasattr(module, "PythonPredictor"):
        return module.PythonPredictor(section["config"]).predict(payload)
    module.init(section["model"], section["metadata"])
    return module.predict(payload, section["metadata"])


def as_json(result: Any) -> Any:
    """Join a stream; turn numpy scalars into what JSON has."""
    if isinstance(result, AsyncIterator):
        return asyncio.run(joined(result))
    return json.loads(json.dumps(result, default=lambda value: value.item()))


async def joined(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{file.parent.name.replace('-', '_')}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digit_image_refuses_what_is_not_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = EXAMPLES_DIR / "digit-image"
    monkeypatch.chdir(folder)
    handler = load(folder / "handler.py").Handler({"model": "model.npz"})
    for payload in (b"not a picture", {"digit": 7}):
        assert handler.handle_post(payload).status_code == 400


# Batch.


@pytest.mark.parametrize("example", BATCH_EXAMPLES, ids=lambda example: example.name)
def test_batch_example_is_complete_and_its_readme_right(example: BatchExample) -> None:
    readme = (example.folder / "README.md").read_text()
    for command in (
        f"cortex deploy examples/{example.name}\n",
        f"cortex submit {example.name} examples/{example.name}/job.json --watch\n",
        *(f"examples/{example.name}/{name} /tmp/\n" for name in example.copied),
    ):
        assert command in readme
    assert json.dumps(example.shown) in readme
    assert json.loads((example.folder / "job.json").read_text())["workers"] >= 1


@pytest.mark.long
def test_digits_are_read_from_files_again_after_training_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = next(example for example in BATCH_EXAMPLES if example.name == "batch-digit-classifier")
    folder = tmp_path / "project"
    shutil.copytree(example.folder, folder, ignore=shutil.ignore_patterns("__pycache__", "model.npz", "digits"))
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True, capture_output=True)
    monkeypatch.chdir(folder)
    config = {"model": "model.npz", "results": str(tmp_path / "results")}
    handler = load(folder / "handler.py").Handler(config, {"job_id": "7fff"})
    paths = sorted(map(str, (folder / "digits").iterdir()))
    returned = [handler.handle_batch(paths[first : first + 5], f"batch-{first}") for first in range(0, 20, 5)]
    assert [[line["digit"] for line in lines] for lines in returned] == [
        [line["digit"] for line in lines] for lines in example.results
    ]
    handler.handle_batch(paths[:5], "batch-0")
    written = sorted((tmp_path / "results" / "7fff").iterdir())
    assert [path.name for path in written] == ["batch-0.json", "batch-10.json", "batch-15.json", "batch-5.json"]
    assert json.loads(written[0].read_text()) == returned[0]


def test_sum_counts_a_repeated_batch_once_and_needs_no_worker_to_have_seen_all(tmp_path: Path) -> None:
    folder = EXAMPLES_DIR / "batch-sum"
    predictor = load(folder / "predictor.py").PythonPredictor
    job = json.loads((folder / "job.json").read_text())
    items, size = job["item_list"]["items"], job["item_list"]["batch_size"]
    workers = [predictor({"results": str(tmp_path)}, {"job_id": "7fff"}) for _ in range(job["workers"])]
    for number in [*range(10), 3]:
        workers[number % 2].predict(items[number * size : (number + 1) * size], f"batch-{number}")
    workers[0].on_job_complete()
    assert json.loads((tmp_path / "7fff" / "sum.json").read_text()) == {"batches": 10, "sum": 5050}
