"""`cortex simulate`: plot, JSON and rejected arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cortex.cli.commands.projects.simulate import panel, time_axis
from harness.installations.command_line import cortex
from harness.installations.installation import ECHO_SOURCE, write_project

pytestmark = pytest.mark.processes

CONFIG = """
- name: one
  kind: RealtimeAPI
  handler: {type: python, path: handler.py}
- name: two
  kind: RealtimeAPI
  handler: {type: python, path: handler.py}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_project(tmp_path / "project", ECHO_SOURCE, CONFIG)


def test_a_panel_shows_the_highest_of_each_column() -> None:
    lines = panel("load", [0.0, 1.0, 8.0, None, 4.0, 2.0], lambda value: f"{value:g}", width=6, height=2)
    assert lines == [
        "load",
        "        8 │  █",
        "        0 │_▂█ █▄",
    ]
    assert panel("x", [1.0, 8.0, 2.0, 2.0], str, width=2, height=1)[1].endswith("│█▂")
    assert time_axis("1h", 6) == "          └0   1h"


def test_traffic_is_replayed_and_plotted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time_s,requests_per_s\n0,2\n30,20\n60,0\n")
    arguments = ("simulate", folder, "--api", "two", "--trace", tmp_path / "trace.csv")
    shown = cortex(tmp_path, *arguments)
    assert shown.returncode == 0, shown.stderr
    assert "p95 latency" in shown.stdout
    assert "a replica takes 10 s to start" in shown.stdout
    answer = json.loads(cortex(tmp_path, *arguments, "-o", "json").stdout)
    assert (answer["api"], answer["duration_s"], answer["requests"]) == ("two", 60, 660)
    assert len(answer["points"]) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "spike"), "--api is required"),
        (("--api", "three", "--shape", "spike"), "has no API three with replicas; it has one, two"),
        (("--api", "one"), "give one of --trace FILE, --rate NUMBER and --shape"),
        (("--api", "one", "--trace", "missing.csv"), "missing.csv: can't be read: No such file"),
        (("--api", "one", "--shape", "spike", "--duration", "soon"), "invalid duration"),
    ],
)
def test_simulate_rejects_invalid_arguments(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    shown = cortex(tmp_path, "simulate", folder, *arguments)
    assert shown.returncode != 0
    assert message in shown.stderr


def test_the_simulation_of_canaries_has_moved(tmp_path: Path) -> None:
    for arguments in (("--canary",), ("--steps", "1%", "--rate", "5", "--canary", "--errors", "3%")):
        refused = cortex(tmp_path, "simulate", *arguments)
        assert refused.returncode == 2
        assert "--canary is now a command of cortex's repository: python -m benchmarks.canary_trials" in refused.stderr
