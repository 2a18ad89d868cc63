"""The APIs that get requests to all paths below their endpoints: by reported signatures, before that by source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cortex.gateway.protocols import Protocol
from cortex.home import Home
from cortex.operator.deploy.projects import ProjectFolders
from cortex.operator.replicas.routing import routes_of
from cortex.operator.replicas.signatures import RoutedApis, Signatures
from cortex.payloads.signature import ApiSignature, BodySignature, MethodSignature, RouteSignature
from cortex.state.database import open_sqlite
from cortex.state.queries.apis import ApiChange, ApiRecord, ApiStore
from cortex.state.queries.signatures import SignatureStore
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaStatus
from harness.replicas.fleet import api, deployed, record

ROUTE = "import cortex\nclass Base:\n  @cortex.route('GET', '/a')\n  def a(self): ...\n"
POST = MethodSignature("POST", "handle_post", BodySignature(), BodySignature())
ROUTED = ApiSignature((), (), (RouteSignature("/a", (), POST),))


class World:
    """The databases and projects of an operator."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.database = open_sqlite(home.database_file)

    def deployed(self, text: str, **spec: Any) -> ApiRecord:
        made = record(deployed(spec=api(**spec)))
        folder = ProjectFolders(self.home).path(made.target.project_hash)
        folder.mkdir(parents=True)
        (folder / "handler.py").write_text(text)
        ApiStore(self.database).write([ApiChange(made.target, "nonce", "spec")])
        return made

    def operator(self) -> tuple[Signatures, RoutedApis]:
        signatures = Signatures(SignatureStore(self.database), Logger("test"))
        return signatures, RoutedApis(signatures, ProjectFolders(self.home))


@pytest.fixture
def world(home: Home) -> Iterator[World]:
    made = World(home)
    yield made
    made.database.dispose()


def status(made: ApiRecord, signature: ApiSignature) -> ReplicaStatus:
    text = signature.to_json().decode()
    return ReplicaStatus("a", made.name, made.target.hash, 1, 0.0, (), signature=text)


def test_the_source_decides_until_a_process_has_loaded_it(world: World) -> None:
    made = world.deployed(f"{ROUTE}class Handler(Base): ...")
    signatures, routed = world.operator()
    assert routed.names([made]) == {made.name}
    (backend,) = routes_of([made], [], {}, routed=routed.names([made])).backends
    assert (backend.subpaths, backend.replica_protocol) == (("/v2", "/"), Protocol.ROUTES)
    signatures.record([status(made, ApiSignature((POST,)))])  # a metaclass removed it, say
    assert routed.names([made]) == frozenset()


@pytest.mark.parametrize("text", [f"{ROUTE}class Handler: ...", "def broken(", "from other import Handler"])
def test_routes_that_the_source_does_not_show_are_known_from_the_first_process(world: World, text: str) -> None:
    made = world.deployed(text)
    signatures, routed = world.operator()
    assert routed.names([made]) == frozenset()
    signatures.record([status(made, ROUTED)])
    assert routed.names([made]) == {made.name}
    assert world.operator()[1].names([made]) == {made.name}  # the next operator, without a replica


def test_other_kinds_have_no_routes(world: World) -> None:
    made = world.deployed(f"{ROUTE}class Handler(Base): ...", kind="AsyncAPI")
    assert world.operator()[1].names([made]) == frozenset()
