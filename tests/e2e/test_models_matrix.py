"""Every kind of model, in every form and layout, from every storage: deployed and called.

Some cells share a deploy: `paths` takes models of all storages, and a `dir` ones of both layouts. Few run at once,
since each process with TensorFlow takes seconds of CPU to start and half a gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.installations.installation import Installation, installation, write_project
from harness.models.model_makers import MAKERS
from harness.servers.buckets import Bucket, all_kinds, variables
from harness.servers.s3 import SwiftServer

#: In the order of text 10 comes before 9.
VERSIONS = (2, 9, 10)
LATEST = 10
UNVERSIONED = 5
LAYOUTS = ("versioned", "single")

PREDICTORS = {
    "python": """
        import json, pathlib

        class PythonPredictor:
            def __init__(self, config, python_client):
                self.client = python_client

            def load_model(self, model_path):
                files = [json.loads(path.read_text()) for path in pathlib.Path(model_path).glob("*.json")]
                assert len(files) == 2 and files[0] == files[1]
                return files[0]["number"]

            def run(self, payload, *which):
                return [value + self.client.get_model(*which) for value in payload]
    """,
    "onnx": """
        class ONNXPredictor:
            def __init__(self, config, onnx_client):
                self.client = onnx_client

            def run(self, payload, *which):
                return self.client.predict(payload, *which)[0]
    """,
    "tensorflow": """
        class TensorFlowPredictor:
            def __init__(self, config, tensorflow_client):
                self.client = tensorflow_client

            def run(self, payload, *which):
                return self.client.predict({"x": payload}, *which)["y"]
    """,
}
PREDICT = """
            def predict(self, payload, query_params):
                which = [query_params[name] for name in ("model", "version") if name in query_params]
                try:
                    return self.run(payload, *which)
                except Exception as error:
                    return {"error": str(error)}
"""


@dataclass(frozen=True)
class Cell:
    """A model in one form, layout and storage, and the path of its endpoint."""

    api: str
    model: str | None  #: what it is asked for by; None: it is the API's only one
    is_versioned: bool


@pytest.fixture(scope="module")
def buckets(swift: SwiftServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bucket]]:
    with all_kinds(tmp_path_factory.mktemp("buckets"), swift) as made:
        yield made


@pytest.fixture(scope="module")
def cortex(buckets: dict[str, Bucket]) -> Iterator[Installation]:
    with installation(variables(buckets.values())) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(
            kind, place, marks=[] if (kind, place) in (("python", "s3"), ("onnx", "local")) else [pytest.mark.long]
        )
        for kind in PREDICTORS
        for place in ("s3", "gs", "local")
    ],
)
def test_path_and_dir_serve_both_layouts(
    kind: str, place: str, cortex: Installation, buckets: dict[str, Bucket], tmp_path: Path
) -> None:
    url = put_models(buckets[place], kind)
    name = f"{kind}-{place}"
    apis = [api(kind, f"{name}-dir", {"dir": url})]
    cells = [Cell(f"{name}-dir", layout, layout == "versioned") for layout in LAYOUTS]
    for layout in LAYOUTS:
        apis.append(api(kind, f"{name}-{layout}", {"path": f"{url}/{layout}"}))
        cells.append(Cell(f"{name}-{layout}", None, layout == "versioned"))
    check(cortex, kind, apis, cells, tmp_path)


@pytest.mark.parametrize("kind", ["python", "onnx", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_paths_serve_both_layouts_of_all_storages(
    kind: str, cortex: Installation, buckets: dict[str, Bucket], tmp_path: Path
) -> None:
    paths = [
        {"name": f"{layout}-{place}", "path": f"{put_models(bucket, kind)}/{layout}/"}
        for place, bucket in buckets.items()
        for layout in LAYOUTS
    ]
    cells = [Cell(f"{kind}-paths", path["name"], path["name"].startswith("versioned")) for path in paths]
    check(cortex, kind, [api(kind, f"{kind}-paths", {"paths": paths})], cells, tmp_path)


def check(cortex: Installation, kind: str, apis: list[dict[str, Any]], cells: list[Cell], folder: Path) -> None:
    """Deploy the APIs at once, call each cell in every way, and delete them."""
    project = write_project(folder, PREDICTORS[kind] + PREDICT, "")
    (project / "cortex.yaml").write_text(yaml.safe_dump(apis))
    cortex.cortex("deploy", project, timeout_s=100)
    wrong = [mistake for cell in cells for mistake in mistakes(cortex, cell)]
    assert wrong == [], "\n".join(wrong)
    for each in apis:
        cortex.cortex("delete", each["name"], "-f")


def put_models(bucket: Bucket, kind: str) -> str:
    """Put both layouts into a folder, and return its URL."""
    make = MAKERS[kind]
    models = {f"versioned/{number}": make(number) for number in VERSIONS} | {"single": make(UNVERSIONED)}
    for folder, files in models.items():
        for name, data in files.items():
            bucket.put(f"{kind}/{folder}/{name}", data)
    return f"{bucket.url}/{kind}"


def api(kind: str, name: str, models: dict[str, Any]) -> dict[str, Any]:
    field = "multi_model_reloading" if kind == "python" else "models"
    predictor = {"type": kind, "path": "handler.py", field: {**models, "poll_interval": "1s"}}
    return {"name": name, "kind": "RealtimeAPI", "predictor": predictor}


def mistakes(cortex: Installation, cell: Cell) -> Iterator[str]:
    """Call it in every way; yield the calls with a wrong response."""
    name = cell.model or "ignored"
    latest = LATEST if cell.is_versioned else UNVERSIONED
    numbers = {str(number): number for number in VERSIONS} if cell.is_versioned else {"1": UNVERSIONED}
    for version, number in {**numbers, "latest": latest}.items():
        yield from unless_added(cortex, f"/{cell.api}?model={name}&version={version}", number)
    yield from unless_added(cortex, f"/{cell.api}?model={name}", latest)
    yield from unless_refused(cortex, f"/{cell.api}?model={name}&version=77", "of version 77 wasn't found")
    must_be = "model_version must be either a parse-able numeric value or 'latest'"
    yield from unless_refused(cortex, f"/{cell.api}?model={name}&version=newest", must_be)
    if cell.model is None:
        yield from unless_added(cortex, f"/{cell.api}", latest)
    else:
        yield from unless_refused(cortex, f"/{cell.api}", "model_name was not specified")
        no_such = "'nobody' model wasn't found in the list of available models"
        yield from unless_refused(cortex, f"/{cell.api}?model=nobody", no_such)


def unless_added(cortex: Installation, path: str, number: int) -> Iterator[str]:
    reply = cortex.post(path, [1.0, 2.5])
    if reply.status != 200 or reply.json != [1.0 + number, 2.5 + number]:
        yield f"{path} should add {number}: {reply.status} {reply.body.decode()}"


def unless_refused(cortex: Installation, path: str, words: str) -> Iterator[str]:
    reply = cortex.post(path, [1.0])
    if reply.status != 200 or not isinstance(reply.json, dict) or words not in reply.json["error"]:
        yield f"{path} should say {words!r}: {reply.status} {reply.body.decode()}"
