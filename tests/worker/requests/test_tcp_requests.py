"""Tests of requests over Unix sockets, repeated over TCP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_app_streams as app_streams
import test_hostile_code as hostile_code

from harness.replicas import replicas
from harness.replicas.replicas import Replica, running_replica

pytestmark = pytest.mark.processes


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replicas.DEFAULTS, "listen_host", "127.0.0.1")
    monkeypatch.setitem(replicas.DEFAULTS, "gateway_secret", "5ec2e7")


@pytest.mark.parametrize(
    "test",
    [
        app_streams.test_a_generator_is_streamed_while_it_runs,
        app_streams.test_large_responses_are_complete,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_streams_over_tcp(over_tcp: None, test: Callable[[Replica], None]) -> None:
    with running_replica(app_streams.SOURCE) as replica:
        replica.wait_ready()
        test(replica)


def test_disconnects_during_a_call_over_tcp_leave_no_connections(over_tcp: None) -> None:
    hostile_code.test_disconnects_during_a_call_leave_no_connections()
