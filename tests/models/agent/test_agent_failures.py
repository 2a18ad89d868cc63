"""A model agent whose storage is down, whose downloads fail, or that is killed keeps serving confirmed models."""

from __future__ import annotations

import os
import shutil

import pytest

from cortex.models.spec import DEFAULT_MODEL, Catalogue
from harness.models.model_agents import AgentClient, RunningAgent, latest, of_path, read_latest
from harness.servers.buckets import BUCKET
from harness.servers.s3 import SwiftServer
from harness.servers.slow_proxy import SlowProxy
from harness.wait import wait_until

pytestmark = pytest.mark.processes


def test_the_confirmed_catalogue_stays_while_storage_is_down(agent: RunningAgent, swift: SwiftServer) -> None:
    swift.put(BUCKET, "outage/1/model.pkl", b"one")
    agent.environ = swift.environ
    with AgentClient(agent.start().socket).watch(of_path(f"s3://{BUCKET}/outage")) as client:
        wait_until(client.confirmed)
        swift.go_down()
        try:
            error = wait_until(client.error, 30)
            assert "can't be reached" in error
            assert latest(client.confirmed()) == {DEFAULT_MODEL: "1"}
            with AgentClient(agent.socket).watch(of_path(f"s3://{BUCKET}/outage")) as late:
                assert wait_until(late.error)
                assert read_latest(late) == b"one"
        finally:
            swift.come_back()
        swift.put(BUCKET, "outage/2/model.pkl", b"two")
        wait_until(lambda: latest(client.confirmed()) == {DEFAULT_MODEL: "2"}, 60)
        assert client.error() is None


def test_a_restarted_agent_publishes_the_saved_catalogue_while_storage_is_down(
    agent: RunningAgent, swift: SwiftServer
) -> None:
    swift.put(BUCKET, "recalled/1/model.pkl", b"one")
    source = of_path(f"s3://{BUCKET}/recalled")
    agent.environ = swift.environ
    with AgentClient(agent.start().socket).watch(source) as client:
        wait_until(client.confirmed)
    agent.kill()
    swift.go_down()
    try:
        with AgentClient(agent.start().socket).watch(source) as client:
            assert "can't be reached" in wait_until(client.error, 30)
            assert read_latest(client) == b"one"
    finally:
        swift.come_back()


def test_a_restarted_agent_keeps_a_model_that_can_not_be_downloaded(agent: RunningAgent, swift: SwiftServer) -> None:
    swift.put(BUCKET, "lost/1/model.pkl", b"one")
    source = of_path(f"s3://{BUCKET}/lost")
    with SlowProxy(swift.url) as proxy:
        agent.environ = {**swift.environ, "AWS_ENDPOINT_URL_S3": proxy.url}
        with AgentClient(agent.start().socket).watch(source) as client:
            digest = wait_until(client.confirmed).by_name[DEFAULT_MODEL].latest.digest
        agent.kill()
        shutil.rmtree(agent.home.models_dir / "content")
        proxy.refuse("1/model.pkl")
        with AgentClient(agent.start().socket).watch(source) as client:
            wait_until(lambda: (client.confirmed() or Catalogue(())).problems, 60)
            catalogue = wait_until(client.confirmed)
            assert catalogue.by_name[DEFAULT_MODEL].latest.digest == digest
            assert "can't be downloaded" in catalogue.problems[0].message


def test_a_failed_download_keeps_the_previous_version_and_reports_the_reason(
    agent: RunningAgent, swift: SwiftServer
) -> None:
    swift.put(BUCKET, "failing/1/model.pkl", b"one")
    with SlowProxy(swift.url) as proxy:
        agent.environ = {**swift.environ, "AWS_ENDPOINT_URL_S3": proxy.url}
        with AgentClient(agent.start().socket).watch(of_path(f"s3://{BUCKET}/failing")) as client:
            wait_until(client.confirmed)
            proxy.refuse("2/model.pkl")
            swift.put(BUCKET, "failing/2/model.pkl", b"two")
            wait_until(lambda: (client.confirmed() or Catalogue(())).problems, 60)
            catalogue = wait_until(client.confirmed)
            assert latest(catalogue) == {DEFAULT_MODEL: "1"}
            assert "can't be downloaded" in catalogue.problems[0].message
            assert catalogue.problems[0].version == "2"
            proxy.refuse(None)
            wait_until(lambda: latest(client.confirmed()) == {DEFAULT_MODEL: "2"}, 60)
            assert wait_until(client.confirmed).problems == ()
            assert read_latest(client) == b"two"


def test_an_agent_killed_during_a_download_leaves_no_partial_content(agent: RunningAgent, swift: SwiftServer) -> None:
    swift.put(BUCKET, "killed/1/model.pkl", data := os.urandom(2_000_000))
    with SlowProxy(swift.url) as proxy:
        agent.environ = {**swift.environ, "AWS_ENDPOINT_URL_S3": proxy.url}
        proxy.hold("model.pkl", after_bytes=1_000_000)
        client = AgentClient(agent.start().socket).watch(of_path(f"s3://{BUCKET}/killed"))
        wait_until(lambda: proxy.held.is_set() and any(name.startswith(".part-") for name in agent.contents()), 30)
        agent.kill()
        client.close()
        assert [name for name in agent.contents() if not name.startswith(".part-")] == []
        proxy.hold(None)
        with AgentClient(agent.start().socket).watch(of_path(f"s3://{BUCKET}/killed")) as client:
            digest = wait_until(client.confirmed, 30).by_name[DEFAULT_MODEL].latest.digest
            assert agent.contents() == [digest]
            assert read_latest(client) == data
