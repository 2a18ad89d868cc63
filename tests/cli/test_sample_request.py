"""The lines after a deploy: a command that works when it is pasted, or what to send."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortex.cli.sample_request import sample_request
from cortex.config.schema import Api

URL = "http://localhost:8888/iris"
POST = "class Handler:\n def handle_post(self, payload): return payload['a'] + payload['b']"
HANDLER = {"interface": "handler", "type": "python", "path": "handler.py"}
JSON = "-H 'content-type: application/json' -d"


def hint(
    folder: Path,
    source: str,
    files: tuple[str, ...] = (),
    describe: Callable[[], dict[str, Any]] | None = None,
    **fields: Any,
) -> list[str]:
    (folder / "handler.py").write_text(source)
    for name in files:
        (folder / name).write_text("{}")
    api = Api.model_validate({"name": "iris", "handler": HANDLER, **fields})
    return sample_request({"spec": api.model_dump(mode="json"), "endpoint": URL}, folder, describe=describe)


def test_the_sample_of_the_project_is_sent(tmp_path: Path) -> None:
    assert hint(tmp_path, POST, ("sample.json",)) == [f"curl {URL} {JSON} @{tmp_path}/sample.json"]


def test_the_readiness_sample_is_sent_since_the_replicas_have_answered_it(tmp_path: Path) -> None:
    found = hint(tmp_path, POST, ("sample.json", "ready.json"), readiness="ready.json")
    assert found == [f"curl {URL} {JSON} @{tmp_path}/ready.json"]


def test_without_a_sample_it_says_what_to_send(tmp_path: Path) -> None:
    assert hint(tmp_path, POST) == [
        "cortex predict iris FILE.json",
        '  FILE.json is a JSON body with "a", "b"; with it as sample.json, the next deploy shows a command for curl',
    ]
    assert hint(tmp_path, "from model import Handler")[0] == "cortex predict iris FILE"


@pytest.mark.parametrize(
    ("method", "command"),
    [
        ("def handle_get(self): ...", f"curl {URL}"),
        ("def handle_post(self): ...", f"curl -X POST {URL}"),
        ("def handle_delete(self, headers): ...", f"curl -X DELETE {URL}"),
        ("def handle_get(self, query_params): return query_params['q']", 'send GET with the query parameter "q"'),
        ("def handle_put(self, payload): return payload['a']", 'send PUT with a JSON body with "a"'),
        (
            "def handle_post(self, payload, query_params): return payload['a'], query_params['q']",
            'send POST with a JSON body with "a" and the query parameter "q"',
        ),
    ],
)
def test_the_signature_decides_what_is_sent(tmp_path: Path, method: str, command: str) -> None:
    assert hint(tmp_path, f"class Handler:\n {method}") == [command]


def test_a_payload_of_an_annotated_type_is_an_example_of_it(tmp_path: Path) -> None:
    def document() -> dict[str, Any]:
        schema = {"type": "object", "properties": {"age": {"type": "integer"}, "nick": {"type": "string"}}}
        reference = {"application/json": {"schema": {"$ref": "#/components/schemas/Person"}}}
        return {
            "paths": {"/iris": {"put": {"requestBody": {"content": reference}}}},
            "components": {"schemas": {"Person": {**schema, "required": ["age"]}}},
        }

    put = "class Handler:\n def handle_put(self, payload: Person): ..."
    assert hint(tmp_path, put, describe=document) == [f"curl -X PUT {URL} {JSON} '{{\"age\": 1}}'"]
    assert hint(tmp_path, POST, describe=dict) == hint(tmp_path, POST), "a document without the method"
    assert hint(tmp_path, put, ("sample.json",), describe=document)[0].endswith("@" + str(tmp_path / "sample.json"))


def test_a_payload_with_a_pattern_that_no_example_matches_is_a_file(tmp_path: Path) -> None:
    def document() -> dict[str, Any]:
        schema = {"type": "string", "pattern": "^[0-9]+$"}
        content = {"application/json": {"schema": schema}}
        return {"paths": {"/iris": {"post": {"requestBody": {"content": content}}}}}

    assert hint(tmp_path, POST, describe=document) == hint(tmp_path, POST)


def test_curl_trusts_the_certificates_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("class Handler:\n def handle_get(self): ...")
    api = Api.model_validate({"name": "iris", "handler": HANDLER}).model_dump(mode="json")
    found = sample_request({"spec": api, "endpoint": "https://host/iris"}, tmp_path, "/etc/my ca.pem")
    assert found == ["curl --cacert '/etc/my ca.pem' https://host/iris"]


def test_a_key_is_sent_if_the_api_requires_one(tmp_path: Path) -> None:
    found = hint(tmp_path, "class Handler:\n def handle_get(self): ...", networking={"auth": "api_key"})
    assert found == [f'curl {URL} -H "X-API-Key: $CORTEX_API_KEY"']


def test_routes_are_listed_and_the_sample_is_sent_only_if_a_method_answers_it(tmp_path: Path) -> None:
    route = "import cortex\nclass Handler:\n @cortex.route('GET', '/items/{id}')\n def item(self, id): ...\n"
    assert hint(tmp_path, route, ("sample.json",)) == [f"GET {URL}/items/{{id}}"]
    both = hint(tmp_path, f"{route} def handle_post(self): ...")
    assert both == [f"curl -X POST {URL}", f"GET {URL}/items/{{id}}"]
    many = "".join(f" @cortex.route('GET', '/{n}')\n def a{n}(self): ...\n" for n in range(12))
    assert hint(tmp_path, f"import cortex\nclass Handler:\n{many}")[9:] == [f"GET {URL}/9", "and 2 more routes"]


def test_a_class_that_answers_only_the_open_inference_protocol_is_called_by_it(tmp_path: Path) -> None:
    tensors = "class Handler:\n def handle_v2(self, inputs): ..."
    assert hint(tmp_path, tensors, ("sample.json",)) == [f"POST {URL}/v2/models/iris/infer"]
    assert hint(tmp_path, f"{tensors}\n def handle_get(self): ...") == [f"curl {URL}"]


@pytest.mark.parametrize(
    "handler",
    [
        {"interface": "handler", "type": "asgi", "path": "handler.py", "app": "app"},
        {"interface": "handler", "type": "wsgi", "path": "handler.py", "app": "app"},
        {"interface": "handler", "type": "command", "path": None, "command": ["server"]},
    ],
)
def test_the_root_of_an_application_and_of_a_command_is_requested(tmp_path: Path, handler: dict[str, Any]) -> None:
    assert hint(tmp_path, POST, ("sample.json",), handler=handler) == [f"curl {URL}/"]


def test_a_path_of_an_application_is_requested(tmp_path: Path) -> None:
    handler = {"interface": "handler", "type": "asgi", "path": "handler.py", "app": "app"}
    code = "@app.get('/models')\ndef models(): ..."
    assert hint(tmp_path, code, handler=handler) == [f"curl {URL}/models"]
    assert hint(tmp_path, code.replace("get", "post"), handler=handler) == [f"curl -X POST {URL}/models"]


def test_a_call_of_a_grpc_api_names_a_method(tmp_path: Path) -> None:
    found = hint(tmp_path, POST, ("sample.json",), handler={**HANDLER, "protobuf_path": "iris.proto"})
    assert found[0] == "cortex predict iris FILE.json --method METHOD"
