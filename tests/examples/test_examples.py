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

from example_cases import EXAMPLES, EXAMPLES_DIR, MODEL_EXAMPLES, Example, ModelExample

MEBIBYTE = 1024 * 1024

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def test_every_folder_has_a_case() -> None:
    folders = {path.parent.name for path in EXAMPLES_DIR.glob("*/cortex.yaml")}
    assert folders == {example.name for example in [*EXAMPLES, *MODEL_EXAMPLES]}


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


@each_example
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
