"""Tests of requests over Unix sockets, repeated over TCP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_app_streams as app_streams
import test_hostile_code as hostile_code

from harness.replicas import replicas

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "test",
    [
        app_streams.test_a_generator_is_streamed_while_it_runs,
        app_streams.test_large_responses_are_complete,
        hostile_code.test_disconnects_during_a_call_leave_no_connections,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_over_tcp(test: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replicas.DEFAULTS, "listen_host", "127.0.0.1")
    monkeypatch.setitem(replicas.DEFAULTS, "gateway_secret", "5ec2e7")
    test()
