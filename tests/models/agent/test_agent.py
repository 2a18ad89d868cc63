"""The model agent as a separate process, with real folders and a real S3 server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.home import Home
from cortex.models.agent.listing import Prefix, list_models
from cortex.models.protocol import Fetched, FetchFailed, Watch
from cortex.models.spec import DEFAULT_MODEL, Catalogue, ModelPath, ModelSource, Pin
from cortex.processes.codec import encode
from harness.models.model_agents import POLL_S, AgentClient, RunningAgent, latest, of_dir, of_path, put, read_latest
from harness.servers.buckets import BUCKET
from harness.servers.s3 import SwiftServer
from harness.servers.slow_proxy import SlowProxy
from harness.wait import PATIENCE_S, wait_until

pytestmark = pytest.mark.processes

# Catalogue updates.


def test_a_watcher_receives_the_models_with_downloaded_files(agent: RunningAgent, models: Path) -> None:
    with AgentClient(agent.start().socket).watch(of_dir(models)) as client:
        wait_until(client.confirmed)
        assert latest(client.confirmed()) == {"iris": "1"}
        assert read_latest(client, "iris") == b"one"
        assert not (client.candidate() or client.error())


def test_a_pinned_version_outlives_its_deletion_and_a_restart_of_the_agent(agent: RunningAgent, tmp_path: Path) -> None:
    folder = tmp_path / "iris"
    put(folder / "1" / "model.pkl", b"one")
    with AgentClient(agent.start().socket).watch(of_path(folder)) as client:
        wait_until(client.confirmed)
        confirmed = client.confirmed()
        assert confirmed is not None
        version = confirmed.models[0].latest
        source = of_path(folder, pins=(Pin(DEFAULT_MODEL, "1", version.digest, version.size_bytes, 0.0),))
        put(folder / "2" / "model.pkl", b"two")
        with AgentClient(agent.socket).watch(source) as pinned:
            wait_until(lambda: latest(client.confirmed()) == {DEFAULT_MODEL: "2"})
            (folder / "1" / "model.pkl").unlink()
            wait_until(lambda: _versions(client) == ["2"] and _versions(pinned) == ["1", "2"])
            assert latest(pinned.confirmed()) == {DEFAULT_MODEL: "1"}
            assert read_latest(pinned) == b"one"
    agent.kill()
    with AgentClient(agent.start().socket).watch(source) as pinned:
        wait_until(pinned.confirmed)
        assert read_latest(pinned) == b"one"


def test_a_version_that_was_pinned_elsewhere_is_served_although_this_machine_has_not_listed_it_yet(
    agent: RunningAgent, tmp_path: Path
) -> None:
    folder = tmp_path / "iris"
    put(folder / "1" / "model.pkl", b"one")
    source = of_path(folder, poll_interval_s=3600.0)
    with AgentClient(agent.start().socket).watch(source) as client:
        wait_until(client.confirmed)
        put(folder / "2" / "model.pkl", b"two")
        digest = asyncio.run(list_models(Prefix(str(folder)), {})).models[""].versions["2"].digest
        pin = Pin(DEFAULT_MODEL, "2", digest, 3, 0.0)
        with AgentClient(agent.socket).watch(replace(source, pins=(pin,))) as pinned:
            wait_until(pinned.confirmed)
            assert latest(pinned.confirmed()) == {DEFAULT_MODEL: "2"}
            assert len(pinned.heard) == 1  # no other version was published before
            assert read_latest(pinned) == b"two"
        gone = replace(source, pins=(replace(pin, number="3", digest="gone"),))
        with AgentClient(agent.socket).watch(gone) as other:
            wait_until(other.confirmed)
            confirmed = other.confirmed()
            assert confirmed is not None
            assert [each.version for each in confirmed.problems] == ["3"]


def _versions(client: AgentClient) -> list[str]:
    confirmed = client.confirmed()
    return [version.number for _, version in confirmed.versions()] if confirmed else []


def test_a_single_onnx_file_is_stored_in_a_folder_under_its_name(agent: RunningAgent, tmp_path: Path) -> None:
    put(tmp_path / "model.onnx", b"onnx")
    source = ModelSource(
        "onnx", paths=(ModelPath(DEFAULT_MODEL, str(tmp_path / "model.onnx")),), poll_interval_s=POLL_S
    )
    with AgentClient(agent.start().socket).watch(source) as client:
        wait_until(client.confirmed)
        assert read_latest(client, name="model.onnx") == b"onnx"


def test_in_place_changes_removals_and_new_models_are_detected(agent: RunningAgent, models: Path) -> None:
    with AgentClient(agent.start().socket).watch(of_dir(models)) as client:
        wait_until(client.confirmed)
        put(models / "iris" / "1" / "model.pkl", b"uno")
        wait_until(lambda: read_latest(client, "iris") == b"uno")
        put(models / "mnist" / "model.pkl", b"digits")
        wait_until(lambda: latest(client.confirmed()) == {"iris": "1", "mnist": "1"})
        (models / "iris" / "1" / "model.pkl").unlink()
        (models / "iris" / "1").rmdir()
        wait_until(lambda: latest(client.confirmed()) == {"mnist": "1"})


def test_an_interrupted_upload_changes_nothing(agent: RunningAgent, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    for name in ("saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"):
        put(folder / "1" / name, b"one")
    path = (ModelPath(DEFAULT_MODEL, str(folder)),)
    with AgentClient(agent.start().socket) as client:
        client.watch(ModelSource("tensorflow", paths=path, poll_interval_s=POLL_S))
        wait_until(client.confirmed)
        put(folder / "2" / "saved_model.pb", b"two")
        put(folder / "2" / "variables" / "variables.index", b"two")
        wait_until(lambda: (client.confirmed() or Catalogue(())).problems)
        catalogue = client.confirmed()
        assert catalogue is not None
        assert [version.number for _, version in catalogue.versions()] == ["1"]
        assert "variables.data-00000-of" in catalogue.problems[0].message
        put(folder / "2" / "variables" / "variables.data-00000-of-00001", b"two")
        wait_until(lambda: latest(client.confirmed()) == {DEFAULT_MODEL: "2"})


def test_a_source_that_is_not_live_is_listed_until_confirmed_and_never_again(agent: RunningAgent, models: Path) -> None:
    with AgentClient(agent.start().socket) as client, AgentClient(agent.socket) as live:
        client.watch(of_dir(models, is_live=False))
        wait_until(client.confirmed)
        put(models / "iris" / "2" / "model.pkl", b"two")
        live.watch(of_path(models / "iris"))  # another prefix: it does not list for the first
        wait_until(live.confirmed)
        put(models / "iris" / "3" / "model.pkl", b"three")
        wait_until(lambda: latest(live.confirmed()) == {DEFAULT_MODEL: "3"})
        assert latest(client.confirmed()) == {"iris": "1"}


def test_with_caching_nothing_is_downloaded_until_it_is_fetched(agent: RunningAgent, models: Path) -> None:
    source = of_dir(models, cache_size=1, disk_cache_size=1)
    with AgentClient(agent.start().socket).watch(source) as client:
        catalogue = wait_until(client.confirmed)
        version = catalogue.by_name["iris"].latest
        assert version.path is None
        assert agent.contents() == []
        client.fetch(source, "iris", "1", version.digest)
        answer = client.answer()
        assert isinstance(answer, Fetched)
        assert (Path(answer.path) / "model.pkl").read_bytes() == b"one"


def test_unneeded_contents_are_removed_from_disk(agent: RunningAgent, models: Path) -> None:
    agent.limits = {
        "content_grace_s": 0.2,
        "first_grace_s": 0,
        "reconnect_s": 0,
        "housekeeping_s": 0.1,
        "linger_s": 0.1,
    }
    with AgentClient(agent.start().socket).watch(of_dir(models)) as client:
        first = wait_until(client.confirmed).by_name["iris"].latest
        client.use([first.digest])
        put(models / "iris" / "2" / "model.pkl", b"two")
        wait_until(lambda: latest(client.confirmed()) == {"iris": "2"})
        second = wait_until(client.confirmed).by_name["iris"].latest
        assert agent.contents() == sorted([first.digest, second.digest])
        client.use([second.digest])
        wait_until(lambda: agent.contents() == [second.digest])
    wait_until(lambda: agent.contents() == [])


# Fetches.


def test_fetching_a_removed_version_fails(agent: RunningAgent, models: Path) -> None:
    source = of_dir(models)
    with AgentClient(agent.start().socket) as client:
        client.fetch(source, "iris", "1", "0" * 32)
        answer = client.answer()
        assert isinstance(answer, FetchFailed)
        assert "changed or removed" in answer.message


# What goes wrong.


def test_clients_that_send_garbage_or_never_read_do_not_affect_others(agent: RunningAgent, models: Path) -> None:
    agent.start()
    for nonsense in (b"\x00\xff garbage\n", b"{}\n", b'{"op":"using","digests":5}\n', b"x" * 9_000_000):
        with AgentClient(agent.socket) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.say_bytes(nonsense)
            wait_until(lambda client=client: client.listen() or client.is_lost)  # type: ignore[misc]
    with contextlib.ExitStack() as stack:
        stack.enter_context(AgentClient(agent.socket)).watch(of_dir(models))  # it never reads
        client = stack.enter_context(AgentClient(agent.socket)).watch(of_dir(models))
        wait_until(client.confirmed)
    assert agent.answers()


def test_a_client_that_does_not_read_is_not_read_from(agent: RunningAgent, models: Path) -> None:
    source = of_dir(models)
    agent.start()
    before = agent.pss_bytes()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(agent.socket)
        client.settimeout(1)
        line = json.dumps({"op": "fetch", "id": 1, "api": "a", "source": encode(source), "model": "iris"})
        line = line[:-1] + ', "version": "1", "digest": "00"}\n'
        with contextlib.suppress(TimeoutError):
            for _ in range(200_000):
                client.sendall(line.encode())
        assert agent.pss_bytes() - before < 60_000_000
        with AgentClient(agent.socket).watch(source) as other:
            wait_until(other.confirmed)


def test_a_thousand_watches_of_one_prefix_share_one_poller(agent: RunningAgent, models: Path) -> None:
    agent.start()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(AgentClient(agent.socket)) for _ in range(1000)]
        for number, client in enumerate(clients):
            client.say(Watch(f"api-{number % 50}", of_dir(models)))
        for client in clients:
            wait_until(client.confirmed, 30)
        put(models / "iris" / "2" / "model.pkl", b"two")
        for client in clients:
            wait_until(lambda client=client: latest(client.confirmed()) == {"iris": "2"}, 30)  # type: ignore[misc]
    assert agent.log().count("model downloaded") == 2


def test_a_listing_that_hangs_does_not_block_other_prefixes(
    agent: RunningAgent, swift: SwiftServer, models: Path
) -> None:
    swift.put(BUCKET, "endless/1/model.pkl", b"one")
    with SlowProxy(swift.url) as proxy:
        agent.environ = {**swift.environ, "AWS_ENDPOINT_URL_S3": proxy.url}
        proxy.hold(f"/{BUCKET}", after_bytes=10)
        agent.start()
        with AgentClient(agent.socket) as patient, AgentClient(agent.socket) as other:
            patient.watch(of_path(f"s3://{BUCKET}/endless"))
            wait_until(proxy.held.is_set)
            wait_until(other.watch(of_dir(models)).confirmed)
            put(models / "iris" / "2" / "model.pkl", b"two")
            wait_until(lambda: latest(other.confirmed()) == {"iris": "2"})
            assert patient.news() is None
            proxy.hold(None)
            wait_until(lambda: agent.log().count("model downloaded") == 3, 30)


# The process.


def test_only_one_agent_runs_per_home(agent: RunningAgent, home: Home) -> None:
    agent.start()
    second = RunningAgent(home)
    second.start()  # its socket is the first one's
    try:
        assert second.process is not None
        assert second.process.wait(PATIENCE_S) == 3
        assert agent.answers()
    finally:
        second.stop()


def test_sigterm_ends_the_agent_during_a_download(agent: RunningAgent, swift: SwiftServer) -> None:
    swift.put(BUCKET, "ending/1/model.pkl", os.urandom(2_000_000))
    with SlowProxy(swift.url) as proxy:
        agent.environ = {**swift.environ, "AWS_ENDPOINT_URL_S3": proxy.url}
        proxy.hold("model.pkl", after_bytes=1_000_000)
        with AgentClient(agent.start().socket).watch(of_path(f"s3://{BUCKET}/ending")):
            wait_until(proxy.held.is_set, 30)
            assert agent.process is not None
            agent.process.send_signal(signal.SIGTERM)
            assert agent.process.wait(PATIENCE_S) == 0  # the download is held for ever


def test_an_agent_without_clients_ends(agent: RunningAgent, models: Path) -> None:
    agent.limits = {"idle_s": 0.3, "reconnect_s": 0, "housekeeping_s": 0.1, "linger_s": 0.1}
    with AgentClient(agent.start().socket).watch(of_dir(models)) as client:
        wait_until(client.confirmed)
    assert agent.process is not None
    assert agent.process.wait(PATIENCE_S) == 0
    assert not Path(agent.socket).exists()
    assert agent.contents() == []


def test_contents_of_a_deployed_api_stay_while_it_has_no_replicas(agent: RunningAgent, models: Path) -> None:
    agent.limits = {"first_grace_s": 0, "reconnect_s": 0, "housekeeping_s": 0.1, "linger_s": 0.1, "content_grace_s": 0}
    agent.home.create()
    agent.home.apis_with_models_file.write_text('["iris", "other"]')
    with AgentClient(agent.start().socket) as operator:
        with AgentClient(agent.socket).watch(of_dir(models)) as client:
            digest = wait_until(client.confirmed).by_name["iris"].latest.digest
        put(models.parent / "others" / "mnist" / "1" / "model.pkl", b"other")
        with AgentClient(agent.socket).watch(of_dir(models.parent / "others"), "deleted") as client:
            wait_until(client.confirmed)
            assert len(agent.contents()) == 2
        wait_until(lambda: agent.contents() == [digest])
        shutil.rmtree(models)
        models.mkdir()
        with AgentClient(agent.socket).watch(of_dir(models)) as client:
            assert latest(wait_until(client.confirmed)) == {"iris": "1"}
            assert read_latest(client, "iris") == b"one"
        agent.home.apis_with_models_file.write_text("[]")
        wait_until(lambda: agent.contents() == [])
        assert operator.is_lost is False
