"""How long a node may be silent before it counts as lost."""

from __future__ import annotations

import pytest

from cortex.cluster.node_client import MAX_SILENCE_S, Silence

SILENCE_S = 3.0


@pytest.fixture(autouse=True)
def default_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the limit of installations; that of tests is longer."""
    monkeypatch.setattr("cortex.cluster.node_client.SILENCE_S", SILENCE_S)


@pytest.mark.parametrize(
    ("beats", "limit_s"),
    [
        ([1.0] * 30, SILENCE_S),
        ([1.1] * 30, SILENCE_S),
        ([1.0, 2.9, 1.0], 2.9 * 2.5 * 0.95),
        ([2.0] * 10, 5.0),
        ([2.9, *[1.0] * 60], SILENCE_S),
        ([1.0, 9.0], MAX_SILENCE_S),
    ],
)
def test_late_heartbeats_extend_the_limit_for_a_while(beats: list[float], limit_s: float) -> None:
    silence, now = Silence(0.0), 0.0
    for beat in beats:
        now += beat
        silence.hear(now)
    assert silence.limit_s == pytest.approx(limit_s)
    assert silence.duration_s(now + 2) == pytest.approx(2)


def test_the_time_that_a_node_was_away_is_not_a_late_heartbeat() -> None:
    silence = Silence(0.0)
    silence.reset(60.0)
    silence.hear(61.0)
    assert silence.limit_s == SILENCE_S
