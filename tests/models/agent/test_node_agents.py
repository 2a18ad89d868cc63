"""Model agents of nodes and of the operator as separate processes, with a real S3 server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cortex.home import Home
from cortex.models.spec import DEFAULT_MODEL, ModelPath, ModelSource
from harness.models.model_agents import AgentClient, RunningAgent
from harness.servers.buckets import BUCKET
from harness.servers.s3 import SwiftServer
from harness.servers.slow_proxy import SlowProxy
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

POLL_S = 0.5
NODES = 4
#: A machine that does other things too may keep who lists from saying so.
PATIENT = {"silence_s": PATIENCE_S}


@dataclass
class Nodes:
    """Agents of nodes whose questions go to the agent of an operator."""

    operator: RunningAgent
    agents: list[RunningAgent]
    clients: list[AgentClient]
    proxy: SlowProxy

    def latest(self) -> set[str | None]:
        """Return each node's latest version of the only model."""
        catalogues = [client.confirmed() for client in self.clients]
        return {each and each.by_name[DEFAULT_MODEL].latest.number for each in catalogues}

    def listings(self, name: str) -> int:
        """Count how often a model was listed, not counting its versions, which are when they are downloaded."""
        return self.proxy.listed.count(f"{name}/")


def source(url: str) -> ModelSource:
    return ModelSource("python", paths=(ModelPath(DEFAULT_MODEL, url),), poll_interval_s=POLL_S)


@contextlib.contextmanager
def nodes(tmp_path: Path, swift: SwiftServer, url: str, has_operator: bool = True) -> Iterator[Nodes]:
    with SlowProxy(swift.url) as proxy, contextlib.ExitStack() as stack:
        environ = {**swift.environ, "AWS_ENDPOINT_URL_S3": proxy.url}
        operator = RunningAgent(Home(tmp_path / "operator"), environ)
        stack.callback(operator.stop)
        if has_operator:
            operator.start()
        made = Nodes(operator, [], [], proxy)
        for number in range(NODES):
            agent = RunningAgent(Home(tmp_path / f"n{number}"), environ, PATIENT, is_node=True)
            agent.home.create()
            agent.home.listings_socket.symlink_to(operator.home.listings_socket)
            stack.callback(agent.stop)
            made.agents.append(agent.start())
            made.clients.append(stack.enter_context(AgentClient(agent.socket)).watch(source(url)))
        yield made


def test_many_nodes_share_one_listing_per_interval(tmp_path: Path, swift: SwiftServer) -> None:
    swift.put(BUCKET, "shared/1/model.pkl", b"one")
    started_at = time.monotonic()
    with nodes(tmp_path, swift, f"s3://{BUCKET}/shared") as made:
        wait_until(lambda: made.latest() == {"1"}, 30)
        for version in ("2", "3", "4"):
            swift.put(BUCKET, f"shared/{version}/model.pkl", version.encode())
            wait_until(lambda version=version: made.latest() == {version}, 30)  # type: ignore[misc]
        wait_until(lambda: made.listings("shared") > 12, 30)
        listings = made.listings("shared")
        intervals = (time.monotonic() - started_at) / POLL_S
        # Each node for itself would take four times as many. At the start, a second follows the first at once.
        assert listings <= intervals + 3
        assert all("listing here" not in agent.log() for agent in made.agents)
        assert all(len(agent.contents()) == 4 for agent in made.agents)


def test_nodes_list_by_themselves_while_the_operator_is_unreachable(tmp_path: Path, swift: SwiftServer) -> None:
    swift.put(BUCKET, "away/1/model.pkl", b"one")
    with nodes(tmp_path, swift, f"s3://{BUCKET}/away", has_operator=False) as made:
        wait_until(lambda: made.latest() == {"1"}, 30)
        made.operator.start()
        wait_until(lambda: all("lists models for this node again" in agent.log() for agent in made.agents), 30)
        swift.put(BUCKET, "away/2/model.pkl", b"two")
        wait_until(lambda: made.latest() == {"2"}, 30)
        made.operator.kill()
        swift.put(BUCKET, "away/3/model.pkl", b"three")
        wait_until(lambda: made.latest() == {"3"}, 30)


def test_nodes_receive_the_reason_why_a_store_can_not_be_listed(tmp_path: Path, swift: SwiftServer) -> None:
    swift.put(BUCKET, "outage/1/model.pkl", b"one")
    with nodes(tmp_path, swift, f"s3://{BUCKET}/outage") as made:
        wait_until(lambda: made.latest() == {"1"}, 30)
        made.proxy.refuse(f"/{BUCKET}")
        wait_until(lambda: all(client.error() for client in made.clients), 30)
        assert made.latest() == {"1"}
        made.proxy.refuse(None)
        wait_until(lambda: not any(client.error() for client in made.clients), 60)
        swift.put(BUCKET, "outage/2/model.pkl", b"two")
        wait_until(lambda: made.latest() == {"2"}, 60)


def test_local_paths_are_listed_by_each_node(tmp_path: Path, swift: SwiftServer) -> None:
    folder = tmp_path / "volume"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.pkl").write_bytes(b"one")
    with nodes(tmp_path, swift, str(folder)) as made:
        wait_until(lambda: made.latest() == {"1"}, 30)
        made.operator.kill()
        (folder / "2").mkdir()
        (folder / "2" / "model.pkl").write_bytes(b"two")
        wait_until(lambda: made.latest() == {"2"}, 30)
        assert all("listing here" not in agent.log() for agent in made.agents)  # nobody was asked
