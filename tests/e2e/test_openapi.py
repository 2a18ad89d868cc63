"""OpenAPI documents of live APIs: clients that are generated from them work, whatever the kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from harness.documents.openapi_documents import openapi_problems
from harness.installations.installation import Installation, write_project

CONFIG = """
    - name: iris
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      readiness: sample.json
    - name: later
      kind: AsyncAPI
      handler: {type: python, path: handler.py}
      networking: {auth: api_key}
    - name: many
      kind: BatchAPI
      handler: {type: python, path: handler.py}
    - name: mix
      kind: TrafficSplitter
      apis: [{name: iris, weight: 100}]
"""
SOURCE = '''
    from pydantic import BaseModel, Field
    from starlette.exceptions import HTTPException


    class Iris(BaseModel):
        sepal: float = Field(gt=0)
        like: "Iris | None" = None


    class Species(BaseModel):
        name: str


    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload: Iris) -> Species:
            """Classify an iris."""
            if payload.sepal > 100:
                raise HTTPException(422, "no iris is that long")
            return Species(name="setosa" if payload.sepal < 5.5 else "virginica")

        def handle_async(self, payload: Iris) -> Species:
            return self.handle_post(payload)

        def handle_batch(self, payload: list[Iris]):
            return len(payload)
'''


@pytest.fixture(scope="module", autouse=True)
def _deployed(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_project(tmp_path_factory.mktemp("project"), SOURCE, CONFIG)
    (folder / "sample.json").write_text('{"sepal": 5.1}')
    cortex.cortex("deploy", folder)


def document(cortex: Installation, path: str) -> dict[str, Any]:
    answer = cortex.post(f"{path}/openapi.json", method="GET")
    assert answer.status == 200
    found = json.loads(answer.body)
    assert openapi_problems(found) == []
    assert isinstance(found, dict)
    return found


def generate(text: dict[str, Any], folder: Path, package: str) -> Any:
    """Return the package of a client that is generated from a document."""
    (folder / "document.json").write_text(json.dumps(text))
    (folder / "config.yaml").write_text("post_hooks: []\n")
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none"]
    options = ["--path", "document.json", "--config", "config.yaml", "--output-path", package, "--overwrite"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return import_module(package)


def test_a_generated_client_calls_a_typed_api(
    cortex: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = generate(document(cortex, "/iris"), tmp_path, "iris_client")
    client = package.Client(base_url=cortex.url(""))
    post = import_module("iris_client.api.iris.iris_handle_post")
    models = import_module("iris_client.models")
    species = post.sync(client=client, body=models.Iris(sepal=6.0, like=models.Iris(sepal=1.0)))
    assert species == models.Species(name="virginica")
    refused = post.sync(client=client, body=models.Iris(sepal=-1.0))
    assert isinstance(refused, models.ValidationErrorResponse)
    assert refused.detail[0].loc == ["body", "sepal"]
    refused = post.sync(client=client, body=models.Iris(sepal=101.0))
    assert isinstance(refused, models.ErrorResponse)
    assert refused.error == refused.detail == "no iris is that long"


def test_a_generated_client_sends_workloads_with_a_key(
    cortex: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = generate(document(cortex, "/later"), tmp_path, "later_client")
    send, get = (import_module(f"later_client.api.later.later_{name}_workload") for name in ("send", "get"))
    models = import_module("later_client.models")
    stranger = package.AuthenticatedClient(base_url=cortex.url(""), token="unknown")
    assert isinstance(send.sync(client=stranger, body=models.Iris(sepal=1.0)), models.JobErrorResponse)
    key = json.loads(cortex.cortex("keys", "create", "client", "--api", "later", "-o", "json").stdout)["key"]
    client = package.AuthenticatedClient(base_url=cortex.url(""), token=key)
    accepted = send.sync(client=client, body=models.Iris(sepal=1.0))
    workload = get.sync(accepted.id, client=client, wait=30)
    assert workload.result == models.Species(name="setosa")


def test_a_generated_client_submits_a_job_and_its_items_are_known_afterwards(
    cortex: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = document(cortex, "/many")
    assert "not known" in before["info"]["description"]
    package = generate(before, tmp_path, "many_client")
    client = package.Client(base_url=cortex.url(""))
    submit, get = (import_module(f"many_client.api.many.many_{name}_job") for name in ("submit", "get"))
    models = import_module("many_client.models")
    items = models.ManyItems(items=[{"sepal": 1}, {"sepal": 2}])
    job = submit.sync(client=client, body=models.ManySubmission(workers=1, item_list=items))
    cortex.client.wait_job("many", job.job_id)
    assert get.sync(job.job_id, client=client).job_status.status == "succeeded"
    schemas = document(cortex, "/many")["components"]["schemas"]
    assert schemas["ManyItems"]["properties"]["items"]["items"] == {"$ref": "#/components/schemas/Iris"}


def test_documents_outlive_the_operator_and_can_be_turned_off(cortex: Installation, tmp_path: Path) -> None:
    made = document(cortex, "/iris")
    assert (
        document(cortex, "/mix")["paths"]["/mix"]["post"]["requestBody"]
        == made["paths"]["/iris"]["post"]["requestBody"]
    )
    os.kill(cortex.status()["operator"]["pid"], signal.SIGKILL)
    cortex.up()
    assert document(cortex, "/iris") == made
    assert cortex.get("iris")["docs"] == cortex.url("/iris/docs")
    assert f"docs:     {cortex.url('/iris/docs')}" in cortex.cortex("get", "iris").stdout.splitlines()
    changed = tmp_path / "cortex.yaml"
    changed.write_text(json.dumps([{"name": "mix", "kind": "TrafficSplitter", "networking": {"docs": False},
                                    "apis": [{"name": "iris", "weight": 100}]}]))  # fmt: skip
    cortex.cortex("patch", changed)
    assert cortex.post("/mix/docs", method="GET").status == cortex.post("/mix/openapi.json", method="GET").status == 404
    assert cortex.get("mix")["docs"] is None
    assert cortex.post("/mix", {"sepal": 1}).status == 200
