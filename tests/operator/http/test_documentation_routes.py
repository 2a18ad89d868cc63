"""Documentation below the endpoints of APIs: documents, the page, and every file that it names."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from cortex.config.schema import Api
from cortex.gateway.maps import DOCS_ASSETS
from cortex.home import Home
from cortex.operator.deploy.projects import ProjectFolders
from cortex.operator.documentation import Documentation
from cortex.operator.http.documentation_page import asset_names
from cortex.operator.http.documentation_routes import DocumentationRoutes
from cortex.operator.replicas.signatures import Signatures
from cortex.payloads.signature import ApiSignature, BodySignature, MethodSignature, ModelSignature, TensorSignature
from cortex.state.database import open_sqlite
from cortex.state.queries.apis import ApiChange, ApiStore
from cortex.state.queries.signatures import SignatureStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaStatus
from harness.connections import UnixConnection
from harness.documents.openapi_documents import openapi_problems
from harness.jobs.jobs_server import serve_app

HANDLER = {"interface": "handler", "type": "python", "path": "handler.py"}
SOURCE = "class Handler:\n    def __init__(self, config): ...\n    def handle_get(self): ...\n"
APIS = [
    {"name": "iris", "handler": HANDLER, "readiness": "samples/one.json"},
    {"name": "locked", "handler": HANDLER, "networking": {"auth": "api_key", "endpoint": "/a/locked"}},
    {"name": "hidden", "handler": HANDLER, "networking": {"docs": False}},
    {"name": "model", "handler": {"interface": "handler", "type": "onnx", "models": {"path": "iris.onnx"}}},
    {"name": "sum", "kind": "BatchAPI", "handler": HANDLER},
    {"name": "mix", "kind": "TrafficSplitter", "apis": [
        {"name": "iris", "weight": 100},
        {"name": "locked", "weight": 5, "shadow": True},
    ]},
    {"name": "site", "handler": {"type": "asgi", "path": "site.py", "interface": "handler"}},
    {"name": "half", "kind": "TrafficSplitter", "apis": [
        {"name": "iris", "weight": 50},
        {"name": "site", "weight": 50},
    ]},
]  # fmt: skip


class Scene:
    """Deployed APIs, and the routes of their documentation on a socket."""

    def __init__(self, home: Home) -> None:
        self.database = open_sqlite(home.database_file)
        self.apis = ApiStore(self.database)
        self.signatures = Signatures(SignatureStore(self.database), Logger("test"))
        projects = ProjectFolders(home)
        self.folder = projects.path("project")
        (self.folder / "samples").mkdir(parents=True)
        (self.folder / "samples" / "one.json").write_text('{"sepal": 1.5}')
        (self.folder / "handler.py").write_text(SOURCE)
        self.deploy("r1")
        self.documentation = Documentation(self.apis, self.signatures, projects)
        self.app = DocumentationRoutes(self.documentation, Logger("test"))

    def deploy(self, revision: str) -> None:
        specs = [Api.model_validate({"handler": HANDLER, **each}) for each in APIS]
        self.apis.write([ApiChange(Revision(revision, spec, "project"), "nonce", "spec") for spec in specs])

    def report(self, api: str, *methods: MethodSignature, revision: str = "r1") -> None:
        """Let a replica report its signature."""
        text = ApiSignature(methods).to_json().decode()
        self.signatures.record([ReplicaStatus(f"{api}-{revision}", api, revision, 1, 0.0, (), signature=text)])


@pytest.fixture
def scene(home: Home) -> Iterator[Scene]:
    made = Scene(home)
    yield made
    made.database.dispose()


def get(scene: Scene, path: str, api: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    with serve_app(scene.app) as socket:
        connection = UnixConnection(str(socket))
        connection.request(method, path, headers={"x-cortex-docs": api, **headers})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def document(scene: Scene, api: str, path: str) -> dict[str, object]:
    status, _, body = get(scene, f"{path}/openapi.json", api)
    assert status == 200
    return json.loads(body)


def test_each_kind_has_a_valid_document(scene: Scene) -> None:
    for key, path in (("api:iris", "/iris"), ("api:locked", "/a/locked"), ("jobs:sum", "/sum"), ("mix", "/mix")):
        made = document(scene, key, path)
        assert openapi_problems(made) == []
        assert path in made["paths"]


def test_no_page_is_announced_where_code_of_the_user_answers_its_path(scene: Scene) -> None:
    documented = {each.name for each in scene.apis.records() if scene.documentation.has_page(each)}
    assert documented == {"iris", "locked", "model", "sum", "mix"}


def test_the_sample_of_the_readiness_check_is_the_example(scene: Scene) -> None:
    scene.report("iris", MethodSignature("POST", "handle_post", BodySignature(), BodySignature()))
    for key, path in (("api:iris", "/iris"), ("mix", "/mix")):
        content = document(scene, key, path)["paths"][path]["post"]["requestBody"]["content"]
        (example,) = content["application/json"]["examples"].values()
        assert example == {"summary": "samples/one.json of the project", "value": {"sepal": 1.5}}


def test_an_api_without_code_has_a_row_of_zeros_as_its_example(scene: Scene) -> None:
    inputs = (TensorSignature("x", "FP32", (-1, 2)),)
    post = MethodSignature("POST", "handle_post", BodySignature(), BodySignature())
    signature = ApiSignature((post,), (ModelSignature("model", "onnxruntime_onnx", inputs, ()),))
    text = signature.to_json().decode()
    scene.signatures.record([ReplicaStatus("m", "model", "r1", 1, 0.0, (), signature=text)])
    content = document(scene, "api:model", "/model")["paths"]["/model"]["post"]["requestBody"]["content"]
    assert content["application/json"]["examples"]["sample"]["value"] == {"instances": [[0, 0]]}


@pytest.mark.parametrize("text", ["", "{", "NaN", f'"{"x" * 70_000}"', "[" * 10_000])
def test_an_unreadable_sample_is_no_example(scene: Scene, text: str) -> None:
    (scene.folder / "samples" / "one.json").write_text(text)
    assert "examples" not in json.dumps(document(scene, "api:iris", "/iris")["paths"])


def test_a_shadow_does_not_show_its_methods_but_its_key(scene: Scene) -> None:
    scene.report("locked", MethodSignature("PUT", "handle_put", None, BodySignature()))
    made = document(scene, "mix", "/mix")
    assert "put" not in made["paths"]["/mix"]
    assert made["paths"]["/mix"]["get"]["security"]


def test_the_document_describes_the_revision_that_serves(scene: Scene) -> None:
    methods = [MethodSignature(verb, verb.lower(), None, BodySignature()) for verb in ("PUT", "DELETE")]
    scene.report("iris", methods[0])
    first = scene.apis.get("iris")
    assert first is not None
    scene.apis.mark_serving("iris", first.target)
    scene.deploy("r2")
    scene.report("iris", methods[1], revision="r2")
    assert set(document(scene, "api:iris", "/iris")["paths"]["/iris"]) == {"put"}
    second = scene.apis.get("iris")
    assert second is not None
    scene.apis.mark_serving("iris", second.target)
    assert set(document(scene, "api:iris", "/iris")["paths"]["/iris"]) == {"delete"}


def test_until_the_signature_is_known_the_verb_is_that_of_the_source(scene: Scene) -> None:
    made = document(scene, "api:iris", "/iris")
    assert set(made["paths"]["/iris"]) == {"get"}
    assert "not known" in made["info"]["description"]


def test_an_api_without_documentation_is_not_found(scene: Scene) -> None:
    for api in ("api:hidden", "api:deleted"):
        status, _, body = get(scene, "/hidden/docs", api, **{"x-cortex-request-id": "17"})
        assert (status, json.loads(body)["request_id"]) == (404, "17")
    assert get(scene, "/iris/docs", "api:iris", "POST")[0] == 405
    assert get(scene, "/iris/docs/../../secret", "api:iris")[0] == 404
    assert get(scene, "/iris/docs/docs.py", "api:iris")[0] == 404


class _References(HTMLParser):
    """The URLs that a page names, and whether it has scripts or styles of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.urls += [str(found[name]) for name in ("src", "href", "data-document") if name in found]
        self.inline += [name for name in found if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in found):
            self.inline.append(tag)


def test_every_file_that_the_page_names_is_served_with_a_strict_policy(scene: Scene) -> None:
    pytest.importorskip("fastapi_offline")
    status, headers, body = get(scene, "/a/locked/docs", "api:locked")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = _References()
    page.feed(body.decode())
    assert page.inline == []
    assert asset_names() == set(DOCS_ASSETS) == {url.removeprefix("docs/") for url in page.urls if "docs/" in url}
    for url in page.urls:
        if url == "data:,":
            continue
        assert not re.match(r"[a-z]+:|/", url)  # relative to the page
        status, found, content = get(scene, f"/a/locked/{url}", "api:locked")
        assert (status, bool(content)) == (200, True)
        for each in (headers, found):
            policy = each["content-security-policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy and "http" not in policy
            assert (each["x-frame-options"], each["x-content-type-options"]) == ("DENY", "nosniff")


def test_files_are_cached_and_compressed(scene: Scene) -> None:
    _, plain, content = get(scene, "/iris/docs/docs.js", "api:iris")
    _, headers, compressed = get(scene, "/iris/docs/docs.js", "api:iris", **{"accept-encoding": "br, gzip"})
    assert (headers["content-encoding"], gzip.decompress(compressed)) == ("gzip", content)
    assert "content-encoding" not in plain
    assert get(scene, "/iris/docs/docs.js", "api:iris", **{"if-none-match": plain["etag"]})[0] == 304


def test_the_page_with_a_slash_redirects_to_the_one_without(scene: Scene) -> None:
    status, headers, _ = get(scene, "/a/locked/docs/", "api:locked")
    assert (status, headers["location"]) == (307, "../docs")
