"""The `api_spec` of user code: what the user wrote, with defaults, in the keys of the file's own generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cortex.config.api_spec import api_spec
from cortex.config.schema import Api
from harness.config_files import examine_text

CONFIGS = Path(__file__).parent.parent / "fixtures" / "configs"

V18_BATCH = """
- name: iris
  kind: BatchAPI
  predictor:
    type: onnx
    path: predictor.py
    image: my/image:1
    models:
    - name: small
      model_path: s3://bucket/small
    config: {bucket: mine}
    env: {STAGE: prod}
  compute: {mem: 1Gi}
"""


def read(tmp_path: Path, text: str) -> Api:
    found = examine_text(tmp_path, text)
    assert found.problems == ()
    return found.apis[0]


def test_a_batch_api_of_0_18_keeps_its_keys_and_gets_the_defaults_of_its_generation(tmp_path: Path) -> None:
    assert api_spec(read(tmp_path, V18_BATCH)) == {
        "name": "iris",
        "kind": "BatchAPI",
        "predictor": {
            "type": "onnx",
            "path": "predictor.py",
            "python_path": None,
            "image": "my/image:1",
            "models": [{"name": "small", "model_path": "s3://bucket/small"}],
            "config": {"bucket": "mine"},
            "env": {"STAGE": "prod"},
            "signature_key": None,
            "tensorflow_serving": None,
            "processes_per_replica": 1,
            "threads_per_process": 1,
            "log_level": "info",
            "dependencies": {"pip": "requirements.txt", "conda": "conda-packages.txt", "shell": "dependencies.sh"},
        },
        "networking": {
            "endpoint": "/iris",
            "max_body_size": 10 * 1024**2,
            "max_batch_size": 256_000,
            "max_stored_size": 10 * 1024**3,
            "local_paths": None,
            "buckets": None,
            "webhook_hosts": None,
            "access_log": False,
            "auth": "none",
            "docs": True,
        },
        "compute": {"cpu": 0.2, "mem": "1Gi", "gpu": 0, "inf": 0, "mem_limit": None},
    }


@pytest.mark.parametrize("file", sorted(path.name for path in CONFIGS.iterdir()))
def test_everything_that_the_user_wrote_is_in_it_unchanged(tmp_path: Path, file: str) -> None:
    text = (CONFIGS / file).read_text()
    found = examine_text(tmp_path, text)
    assert found.problems == ()
    entries = [entry for entry in yaml.safe_load(text) if entry.get("kind") != "deployment"]
    for api, entry in zip(found.apis, entries, strict=True):
        assert changed(api_spec(api), entry) == []


def changed(shown: Any, written: Any, place: str = "") -> list[str]:
    """List the keys of a file that an `api_spec` lacks, or has with another value than a default for null."""
    if isinstance(written, dict) and isinstance(shown, dict):
        pairs = ((f"{place}.{key}", shown.get(key, ...), value) for key, value in written.items())
        return [lost for name, one, value in pairs for lost in changed(one, value, name)]
    return [place] if shown is ... or (written is not None and shown != written) else []


def test_keys_and_values_are_those_of_the_users_file(tmp_path: Path) -> None:
    spec = api_spec(
        read(
            tmp_path,
            "- name: iris\n"
            "  predictor: {type: onnx, path: predictor.py, model: s3://bucket/m}\n"
            "  tracker: {model_type: classification}\n"
            "  autoscaling: {window: 60s, workers_per_replica: 2, init_replicas: null}\n",
        )
    )
    assert spec["kind"] == "RealtimeAPI"
    assert spec["predictor"]["model"] == "s3://bucket/m" and "models" not in spec["predictor"]
    assert spec["predictor"]["threads_per_process"] == 1 and "processes_per_replica" not in spec["predictor"]
    assert spec["autoscaling"]["window"] == "60s" and spec["autoscaling"]["downscale_stabilization_period"] == 300
    assert spec["autoscaling"]["workers_per_replica"] == 2
    assert spec["autoscaling"]["init_replicas"] == 1, "null means the default"
    assert spec["tracker"]["window"] == 1000 and "monitoring" not in spec


def test_the_config_of_a_job_replaces_that_of_the_file(tmp_path: Path) -> None:
    api = read(tmp_path, V18_BATCH)
    assert api_spec(api, {"bucket": "other"})["predictor"]["config"] == {"bucket": "other"}
    assert api_spec(api)["predictor"]["config"] == {"bucket": "mine"}


def test_configuration_and_variables_are_stored_once(tmp_path: Path) -> None:
    api = read(tmp_path, V18_BATCH)
    assert api.as_written is not None and api.as_written["predictor"].keys().isdisjoint({"config", "env"})


def test_it_survives_storage(tmp_path: Path) -> None:
    api = read(tmp_path, V18_BATCH)
    assert api_spec(Api.read_stored(api.model_dump_json())) == api_spec(api)


def test_an_api_that_an_older_version_stored_has_the_newest_keys_of_its_generation(tmp_path: Path) -> None:
    api = read(tmp_path, V18_BATCH).model_copy(update={"as_written": None})
    spec = api_spec(api)
    assert spec["predictor"]["models"]["paths"] == [
        {"name": "small", "path": "s3://bucket/small", "signature_key": None}
    ]
    assert spec["predictor"]["config"] == {"bucket": "mine"} and spec["networking"]["endpoint"] == "/iris"
