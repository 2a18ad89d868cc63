from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.config import schema
from cortex.config.schema import Api
from cortex.config.validate import check_file
from cortex.models.source import model_source
from cortex.models.spec import DEFAULT_MODEL, ModelPath, ModelSource, Pin
from cortex.processes.codec import decode, encode
from cortex.projects.project import ProjectFiles

PROJECT = Path("/home/projects/1")


def api_of(type_: str = "python", models: dict[str, Any] | None = None, **handler: Any) -> Api:
    compute = handler.pop("compute", {})
    section = {"interface": "handler", "type": type_, "path": "handler.py", "models": models, **handler}
    return Api.model_validate({"name": "iris", "handler": section, "compute": compute})


def source_of(*args: Any, **more: Any) -> ModelSource:
    found = model_source(api_of(*args, **more), PROJECT)
    assert found is not None
    return found


def test_an_api_without_models_has_no_source() -> None:
    assert model_source(api_of(), PROJECT) is None
    assert model_source(api_of(model="s3://b/m"), PROJECT) is None


def test_the_one_model_of_path_has_the_default_name() -> None:
    assert source_of("onnx", {"path": "s3://b/m/"}) == ModelSource("onnx", (ModelPath(DEFAULT_MODEL, "s3://b/m"),))
    assert schema.DEFAULT_MODEL == DEFAULT_MODEL


@pytest.mark.parametrize(
    ("written", "location"),
    [
        ("s3://b/m//", "s3://b/m"),
        ("gs://b", "gs://b"),
        ("s3://b/odd//key/ with space", "s3://b/odd//key/ with space"),
        ("/srv/models/", "/srv/models"),
        ("models/iris", "/home/projects/1/models/iris"),
        ("./models/", "/home/projects/1/models"),
        (".", "/home/projects/1"),
    ],
)
def test_locations_are_normalized(written: str, location: str) -> None:
    assert source_of(models={"dir": written}).dir == location


def test_a_relative_path_is_unchanged_without_a_project() -> None:
    found = model_source(api_of(models={"path": "./models/iris/"}), None)
    assert found and found.paths[0].url == "models/iris"


def test_the_most_specific_signature_key_wins() -> None:
    paths = [{"name": "a", "path": "s3://b/a", "signature_key": "own"}, {"name": "b", "path": "s3://b/b"}]
    keys = [path.signature_key for path in source_of("tensorflow", {"paths": paths}).paths]
    assert keys == ["own", None]
    keys = [path.signature_key for path in source_of("tensorflow", {"paths": paths}, signature_key="top").paths]
    assert keys == ["own", "top"]
    models = {"paths": paths, "signature_key": "models"}
    keys = [path.signature_key for path in source_of("tensorflow", models, signature_key="top").paths]
    assert keys == ["own", "models"]
    assert source_of("tensorflow", {"dir": "s3://b"}, signature_key="top").signature_key == "top"
    assert source_of("tensorflow", {"path": "s3://b"}, signature_key="top").paths[0].signature_key == "top"


@pytest.mark.parametrize(
    ("type_", "inf", "layout"),
    [
        ("python", 0, "python"),
        ("python", 1, "python"),
        ("tensorflow", 0, "tensorflow"),
        ("tensorflow", 1, "neuron"),
        ("onnx", 0, "onnx"),
    ],
)
def test_the_layout_follows_from_the_type_and_the_device(type_: str, inf: int, layout: str) -> None:
    assert source_of(type_, {"dir": "s3://b"}, compute={"inf": inf}).layout == layout


def test_sources_are_live_except_with_several_processes_on_inferentia() -> None:
    def is_live(inf: int, processes: int, kind: str = "RealtimeAPI") -> bool:
        api = api_of("tensorflow", {"dir": "s3://b"}, processes_per_replica=processes, compute={"inf": inf})
        found = model_source(api.model_copy(update={"kind": kind}), PROJECT)
        return found is not None and found.is_live

    assert (is_live(0, 4), is_live(1, 1), is_live(1, 2)) == (True, True, False)
    assert is_live(0, 1, "BatchAPI") is False


def test_limits_and_the_interval_are_copied() -> None:
    models = {"dir": "s3://b", "cache_size": 2, "disk_cache_size": 3, "cache_memory": "1Ki", "poll_interval_s": 1}
    found = source_of(models=models)
    assert (found.cache_size, found.disk_cache_size, found.cache_memory_bytes) == (2, 3, 1024)
    assert (found.poll_interval_s, found.is_cached) == (1.0, True)


SAME = {
    "0.12": "- kind: deployment\n  name: d\n- kind: api\n  name: a\n  predictor:\n    {code}\n"
    "    model: {url}\n    signature_key: {key}\n",
    "0.17": "- name: a\n  predictor:\n    {code}\n    model: {url}\n    signature_key: {key}\n",
    "0.18": "- name: a\n  kind: SyncAPI\n  predictor:\n    {code}\n    model_path: {url}\n    signature_key: {key}\n",
    "0.23": "- name: a\n  kind: RealtimeAPI\n  predictor:\n    {code}\n    model_path: {url}\n"
    "    signature_key: {key}\n",
    "0.25": "- name: a\n  kind: RealtimeAPI\n  predictor:\n    {code}\n    models:\n      path: {url}\n"
    "      signature_key: {key}\n",
    "0.34": "- name: a\n  kind: RealtimeAPI\n  handler:\n    {code}\n    models:\n      path: {url}\n"
    "      signature_key: {key}\n",
}
KEYS = st.from_regex(r"k[a-z0-9/-]{0,20}", fullmatch=True)


@given(KEYS, KEYS, st.sampled_from(["s3", "gs"]))
def test_old_forms_of_the_configuration_give_the_same_source(
    tmp_path_factory: pytest.TempPathFactory, path: str, key: str, store: str
) -> None:
    folder = tmp_path_factory.mktemp("forms")
    (folder / "predictor.py").touch()
    (folder / "cortex.yaml").touch()
    found = set()
    for text in SAME.values():
        code = "type: tensorflow\n    path: predictor.py"
        (folder / "cortex.yaml").write_text(text.format(code=code, url=f"{store}://b/{path}", key=key))
        (api,) = check_file(folder / "cortex.yaml", "cortex.yaml", ProjectFiles.scan(folder, "cortex.yaml")).apis
        found.add(model_source(api, PROJECT))
    url = f"{store}://b/{path}".rstrip("/")
    assert found == {
        ModelSource("tensorflow", (ModelPath(DEFAULT_MODEL, url, key),), signature_key=key, poll_interval_s=10.0)
    }


def test_pins_are_part_of_the_source_and_only_then_of_its_data() -> None:
    pin = {"model": DEFAULT_MODEL, "number": "3", "digest": "d", "size_bytes": 5, "modified_at": 1.5}
    pinned = source_of("python", {"path": "s3://b/m", "canary": True, "pinned": [pin]})
    assert pinned.pins == (Pin(**pin),)
    assert decode(ModelSource, json.loads(json.dumps(encode(pinned)))) == pinned
    assert "pins" not in encode(source_of("python", {"path": "s3://b/m"}))
