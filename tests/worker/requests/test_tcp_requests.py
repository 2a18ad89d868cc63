"""Tests of requests over Unix sockets, repeated over TCP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_app_requests as app_requests
import test_app_streams as app_streams
import test_hostile_code as hostile_code

from harness.replicas import replicas

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "test",
    [
        app_requests.test_each_http_method_calls_its_handler_and_others_get_405,
        app_streams.test_a_generator_is_streamed_while_it_runs,
        app_requests.test_accepts_bodies_of_every_framing_and_rejects_too_large_ones,
        app_streams.test_large_responses_are_complete,
        app_streams.test_starlette_responses_are_sent_unchanged,
        hostile_code.test_disconnects_during_a_call_leave_no_connections,
        hostile_code.test_a_worker_that_stops_reading_requests_is_replaced,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_over_tcp(test: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replicas.DEFAULTS, "listen_host", "127.0.0.1")
    monkeypatch.setitem(replicas.DEFAULTS, "gateway_secret", "5ec2e7")
    test()
