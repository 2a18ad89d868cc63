from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cortex.errors import ModelError
from cortex.home import Home
from cortex.models import fetcher as fetcher_module
from cortex.models.fetcher import AgentFetcher
from cortex.models.protocol import Fetch, Fetched, Release, read_request, write
from cortex.models.spec import ModelSource, Version
from harness.models.model_agents import AgentClient, RunningAgent
from harness.wait import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def agent(home: Home) -> Iterator[RunningAgent]:
    agent = RunningAgent(home)
    yield agent
    agent.stop()


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    for number in range(5):
        folder = tmp_path / "models" / f"m{number}"
        folder.mkdir(parents=True)
        (folder / "model.pkl").write_bytes(b"%d" % number)
    return ModelSource("python", dir=str(tmp_path / "models"), poll_interval_s=0.5, cache_size=1, disk_cache_size=2)


def versions(agent: RunningAgent, source: ModelSource) -> dict[str, Version]:
    with AgentClient(agent.socket).watch(source) as client:
        return {model.name: model.latest for model in wait_until(client.confirmed).models}


def test_threads_fetch_concurrently_on_one_connection(agent: RunningAgent, source: ModelSource) -> None:
    known = versions(agent.start(), source)
    fetcher = AgentFetcher(agent.socket, "iris", source)

    def fetch(name: str) -> bytes:
        path = fetcher.fetch(name, known[name])
        data = (path / "model.pkl").read_bytes()
        fetcher.release(known[name])
        return data

    with ThreadPoolExecutor(20) as threads:
        names = [f"m{number % 5}" for number in range(200)]
        assert list(threads.map(fetch, names)) == [name[1:].encode() for name in names]
    fetcher.close()


def test_fetching_a_removed_version_is_an_error_with_its_name(agent: RunningAgent, source: ModelSource) -> None:
    agent.start()
    fetcher = AgentFetcher(agent.socket, "iris", source)
    with pytest.raises(ModelError, match="model m1, version 1, can't be fetched: .* changed or removed"):
        fetcher.fetch("m1", Version("1", "00", 1, 0.0))
    fetcher.close()


def test_an_unreachable_agent_is_an_error_with_advice(
    home: Home, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "UNREACHABLE_S", 0.3)
    with pytest.raises(ModelError, match="has not answered at .*; the operator starts it: check .*`cortex status`"):
        AgentFetcher(str(home.model_agent_socket), "iris", source).fetch("m1", Version("1", "00", 1, 0.0))


def test_pending_fetches_and_leases_survive_a_restart_of_the_agent(agent: RunningAgent, source: ModelSource) -> None:
    agent.limits = {"reconnect_s": 5.0}  # the client may be late
    known = versions(agent.start(), source)
    fetcher = AgentFetcher(agent.socket, "iris", source)
    held = fetcher.fetch("m0", known["m0"])
    agent.kill()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(fetcher.fetch, "m1", known["m1"])
        agent.start()
        assert (waiting.result(30) / "model.pkl").read_bytes() == b"1"
    fetcher.release(known["m1"])
    for name in ("m2", "m3", "m4"):  # the limit is two: others go, the one that is held does not
        fetcher.fetch(name, known[name])
        fetcher.release(known[name])
        assert (held / "model.pkl").read_bytes() == b"0"
    fetcher.close()


class ScriptedAgent:
    """Sends scripted answers and records requests."""

    def __init__(self, path: Path) -> None:
        self.heard: list[object] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    request = read_request(line)
                    self.heard.append(request)
                    if isinstance(request, Fetch):
                        connection.sendall(b'{"op": "unheard of"}\nnonsense\n' + write(Fetched(request.id, "/x")))


def test_a_lease_ends_with_its_last_release(tmp_path: Path, source: ModelSource) -> None:
    agent = ScriptedAgent(tmp_path / "s")
    fetcher, version = AgentFetcher(str(tmp_path / "s"), "iris", source), Version("1", "aa", 1, 0.0)
    for _ in range(2):
        assert fetcher.fetch("m", version) == Path("/x")
    fetcher.release(version)
    fetcher.fetch("n", Version("1", "bb", 1, 0.0))
    assert Release("aa") not in agent.heard
    fetcher.release(version)
    fetcher.release(version)
    wait_until(lambda: agent.heard.count(Release("aa")) == 1)
    fetcher.close()
    with pytest.raises(ModelError, match="the process is ending"):
        fetcher.fetch("m", version)
