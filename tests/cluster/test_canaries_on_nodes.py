"""Comparison of two revisions whose replicas run on nodes: their answers and their counts reach the operator."""

from __future__ import annotations

import asyncio
import http.client
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.test_cluster_engine import cluster, ready, stop, until
from cortex.cluster.credentials import derive_key
from cortex.config.schema import Api
from cortex.engine.environment import Prepared
from cortex.home import Home
from cortex.operator.canary.disagreement import PairedPredictions
from cortex.operator.canary.judge import RevisionNumbers
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.revisions.replica_specs import replica_spec
from cortex.projects.project import ProjectFiles, content_hash
from cortex.state.database import open_state
from cortex.state.queries.metrics import MetricStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.monitoring.answers import ANSWERS_FOLDER
from cortex.worker.monitoring.metrics import merge_series, read_folder
from cortex.worker.monitoring.tracker import PREDICTIONS_FOLDER, PredictionKind, read_predictions
from cortex.worker.spec import ReplicaSpec
from harness.cluster.local_nodes import SECRET, LocalNode, local_nodes

pytestmark = pytest.mark.processes

SOURCE = """
class Handler:
    def __init__(self, config):
        self.different = config["different"]

    def handle_post(self, payload):
        return {"label": "dog" if payload % 10 < self.different else "cat"}
"""
OLD, NEW = "a" * 16, "b" * 16


@pytest.fixture
def nodes() -> Iterator[list[LocalNode]]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 2) as made:
        yield made


def spec_of(home: Home, revision: str, different: int, tracker: dict[str, str] | None) -> ReplicaSpec:
    """Return the spec of a replica of one revision, which differs for so many of ten requests."""
    project = home.projects_dir / "new"
    project.mkdir(parents=True, exist_ok=True)
    (project / "handler.py").write_text(SOURCE)
    found = content_hash(ProjectFiles(project, ("handler.py",)))
    if not (home.projects_dir / found).exists():
        project.rename(home.projects_dir / found)
    config = {"different": different}
    handler: dict[str, Any] = {"interface": "handler", "type": "python", "path": "handler.py", "config": config}
    api = Api.model_validate({"name": "iris", "kind": "RealtimeAPI", "handler": handler, "tracker": tracker})
    return replica_spec(home, Revision(revision, api, found), Prepared("", {}))


def send(socket: str, numbers: Iterable[int], compared: str) -> None:
    """Send requests as the gateway does while a canary gets copies."""
    host, _, port = socket.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for number in numbers:
        headers = {
            "content-type": "application/json",
            "x-cortex-gateway": derive_key(SECRET, "gateway"),
            "x-cortex-request-id": f"1753000000000-{number}",
            "x-cortex-compared": compared,
        }
        connection.request("POST", "/", json.dumps(number), headers)
        response = connection.getresponse()
        assert (response.status, "label" in json.loads(response.read())) == (200, True)
    connection.close()


@pytest.mark.parametrize(
    ("tracker", "folder", "kind"),
    [
        ({"model_type": "classification", "key": "label"}, PREDICTIONS_FOLDER, PredictionKind.CLASS),
        (None, ANSWERS_FOLDER, PredictionKind.ANSWER),
    ],
)
async def test_answers_of_replicas_on_nodes_are_paired_and_copies_count_apart(
    home: Home,
    nodes: list[LocalNode],
    tmp_path: Path,
    tracker: dict[str, str] | None,
    folder: str,
    kind: PredictionKind,
) -> None:
    state = open_state(tmp_path / "state.db", None)
    totals = MetricTotals(home.metrics_dir, MetricStore(state), Logger("test"), lambda name, ended: None)
    subject, pairs, different = PairedPredictions(kind), 0, 0
    async with cluster(home, nodes) as made:
        specs = [spec_of(home, OLD, 0, tracker), spec_of(home, NEW, 2, tracker)]
        sockets = [(await ready(made, spec)).processes[0].socket for spec in specs]

        async def both(numbers: range) -> None:
            for socket, compared in zip(sockets, ("original", "copy"), strict=True):
                await asyncio.to_thread(send, socket, numbers, compared)

        def requests(revision: str) -> int:
            series = merge_series(totals.of_revision("iris", revision).values())
            return RevisionNumbers.of(series).requests

        def have_paired() -> bool:
            nonlocal pairs, different
            more, differing = subject.read(*(totals.ring_files("iris", each, folder) for each in (OLD, NEW)))
            pairs, different = pairs + more, different + differing
            return pairs >= 20

        def stored(revision: str) -> int:
            return sum(read_predictions(path, kind, 0)[0] for path in totals.ring_files("iris", revision, folder))

        await both(range(1))
        await until(lambda: (stored(OLD), stored(NEW)) == (1, 1))
        assert not have_paired()  # what is there before the comparison begins does not count
        await both(range(10, 30))
        await until(have_paired)
        assert (pairs, different) == (20, 4)
        await until(lambda: (requests(OLD), requests(NEW)) == (21, 21))
        of_api = merge_series(read_folder(home.metrics_dir / spec.id) for spec in specs)
        assert RevisionNumbers.of(of_api).requests == 21
        assert sum(RevisionNumbers.of(of_api).classes.values()) == (21 if tracker else 0)
        await stop(made, *(spec.id for spec in specs))
    state.dispose()
