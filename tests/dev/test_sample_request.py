"""The commands for curl that `cortex dev` prints work when they are pasted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import cortex.testing
from cortex.dev.local.jobs import AsyncApi
from cortex.dev.local.project import LocalProject
from cortex.dev.sample_request import curl_command, sample_body
from cortex.payloads.signature import ApiSignature

URL = "http://127.0.0.1:8888/api"
JSON = "-H 'content-type: application/json'"


def command(folder: Path, code: str, kind: str = "RealtimeAPI", handler: str = "type: python, path: a.py") -> str:
    section = "definition" if kind == "TaskAPI" else "handler"
    (folder / "cortex.yaml").write_text(f"- name: api\n  kind: {kind}\n  {section}: {{{handler}}}\n")
    (folder / "a.py").write_text(code)
    (api,) = LocalProject.read(folder / "cortex.yaml", {}).diagnosis.apis
    return curl_command(api, URL, "", folder)


CLASS = "class Handler:\n    def __init__(self, config): pass\n"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("def handle_post(self, payload): return payload['x']", f"curl {URL} {JSON} -d '{{\"x\": 1}}'"),
        ("def handle_post(self): return 1", f"curl -X POST {URL}"),
        ("def handle_get(self): return 1", f"curl {URL}"),
        ("def handle_get(self, query_params): return query_params['q']", f"curl '{URL}?q=1'"),
        ("def handle_put(self, payload): return 1", f"curl -X PUT {URL} {JSON} -d '{{}}'"),
    ],
)  # fmt: skip
def test_commands_of_methods(tmp_path: Path, method: str, expected: str) -> None:
    assert command(tmp_path, f"{CLASS}    {method}\n") == expected


def test_commands_of_other_kinds(tmp_path: Path) -> None:
    task = command(tmp_path, "class Task:\n    def __call__(self, config): pass\n", "TaskAPI", "path: a.py")
    assert task == f"curl -X POST {URL}"
    batch = command(tmp_path, f"{CLASS}    def handle_batch(self, payload): pass\n", "BatchAPI")
    assert json.loads(shlex.split(batch)[-1])["item_list"]["items"] == [1, 2]
    app = command(tmp_path, "app = None\n", handler="type: asgi, path: a.py, app: app")
    assert app == f"curl {URL}/"
    code = "app = None\n@app.post('/predict')\ndef predict(): ...\n"
    app = command(tmp_path, code, handler="type: asgi, path: a.py, app: app")
    assert app == f"curl -X POST {URL}/predict"


@pytest.mark.parametrize(("start", "shown"), [("p q", "@sample.json"), (".", "'@p q/sample.json'")])
def test_a_sample_of_the_project_is_sent_from_the_folder_of_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, shown: str
) -> None:
    project = tmp_path / "p q"
    project.mkdir()
    (project / "sample.json").write_text("1")
    monkeypatch.chdir(tmp_path / start)
    assert command(project, f"{CLASS}    def handle_post(self, payload): return 1\n").endswith(f"-d {shown}")


def test_the_payload_is_of_the_type_that_the_method_annotates(tmp_path: Path) -> None:
    code = (
        "from pydantic import BaseModel\n"
        "class Point(BaseModel):\n    x: int\n    name: str = 'p'\n    tags: list[str]\n"
        f"{CLASS}    def handle_post(self, payload: Point): return payload.x\n"
    )
    command(tmp_path, code)
    (api,) = LocalProject.read(tmp_path / "cortex.yaml", {}).diagnosis.apis
    with cortex.testing.load(tmp_path) as loaded:
        signature = loaded._local.predictor.signature
        assert isinstance(signature, ApiSignature)
        words = shlex.split(curl_command(api, URL, signature.to_json().decode(), tmp_path))
        payload = json.loads(words[-1])
        assert payload == {"x": 1, "tags": ["text"]}
        assert loaded.post(payload).json() == 1


def test_the_payload_of_an_async_api_is_of_the_annotated_type(tmp_path: Path) -> None:
    code = f"{CLASS}    def handle_async(self, payload: list[int]): return sum(payload)\n"
    command(tmp_path, code, "AsyncAPI")
    (api,) = LocalProject.read(tmp_path / "cortex.yaml", {}).diagnosis.apis
    with cortex.testing.load(tmp_path) as loaded:
        local = loaded._local
        assert isinstance(local, AsyncApi)
        assert curl_command(api, URL, local.signature.to_json().decode(), tmp_path) == f"curl {URL} {JSON} -d '[1]'"


def test_a_payload_with_a_pattern_that_no_example_matches_is_a_file(tmp_path: Path) -> None:
    model = "from pydantic import BaseModel, Field\nclass Row(BaseModel):\n    x: str = Field(pattern='^[0-9]+$')\n"
    command(tmp_path, f"{model}{CLASS}    def handle_post(self, payload: Row): ...\n")
    (api,) = LocalProject.read(tmp_path / "cortex.yaml", {}).diagnosis.apis
    with cortex.testing.load(tmp_path) as loaded:
        signature = loaded._local.predictor.signature
        assert isinstance(signature, ApiSignature)
        found = curl_command(api, URL, signature.to_json().decode(), tmp_path)
    assert found == f"curl {URL} {JSON} -d @FILE.json"


def test_a_class_with_routes_only_is_called_at_its_first_route(tmp_path: Path) -> None:
    code = (
        "import cortex\nfrom pydantic import BaseModel, Field\n"
        "class Point(BaseModel):\n    x: int | str\n    tags: list[str] = Field(min_length=1)\n"
        f"{CLASS}    @cortex.route('PUT', '/points/{{number}}/{{name}}')\n"
        "    def put(self, number: int, name, payload: Point): return [number, name, payload.x]\n"
    )
    command(tmp_path, code)
    (api,) = LocalProject.read(tmp_path / "cortex.yaml", {}).diagnosis.apis
    with cortex.testing.load(tmp_path) as loaded:
        signature = loaded._local.predictor.signature
        assert isinstance(signature, ApiSignature)
        found = curl_command(api, URL, signature.to_json().decode(), tmp_path)
    assert found == f'curl -X PUT {URL}/points/1/text {JSON} -d \'{{"x": 1, "tags": ["text"]}}\''


def test_a_class_that_answers_only_the_open_inference_protocol_is_called_by_it(tmp_path: Path) -> None:
    command(tmp_path, f"{CLASS}    def handle_v2(self, inputs): return {{'y': inputs['x'] * 2}}\n")
    (api,) = LocalProject.read(tmp_path / "cortex.yaml", {}).diagnosis.apis
    with cortex.testing.load(tmp_path) as loaded:
        signature = loaded._local.predictor.signature
        assert isinstance(signature, ApiSignature)
        _, url, *_, data = shlex.split(curl_command(api, URL, signature.to_json().decode(), tmp_path))
        assert url == f"{URL}/v2/models/api/infer"
        answer = loaded.post("/v2/models/api/infer", json.loads(data)).json()
    assert answer["outputs"][0]["data"] == [2.0]


@pytest.mark.parametrize(
    ("content", "items"), [(b"3", [3]), (b"[1, 2]", [1, 2]), (b'{"item_list": {"items": [5], "batch_size": 1}}', [5])]
)
def test_the_sample_of_a_batch_api_is_an_item_a_list_or_a_submission(
    tmp_path: Path, content: bytes, items: list[int]
) -> None:
    command(tmp_path, f"{CLASS}    def handle_batch(self, payload): pass\n", "BatchAPI")
    (api,) = LocalProject.read(tmp_path / "cortex.yaml", {}).diagnosis.apis
    body, _ = sample_body(api, content, "application/json")
    assert json.loads(body)["item_list"]["items"] == items
