from __future__ import annotations

from dataclasses import replace

import pytest

from cortex.cli.upgrade_plan import UpgradeFacts, manager_of, problem, steps

FACTS = UpgradeFacts("0.2.0", "0.3.0", 7, database_bytes=10**6, free_bytes=10**9, apis=("a", "b"), has_model_agent=True)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (FACTS, ""),
        (replace(FACTS, new="0.2.0"), ""),
        (replace(FACTS, old="(unknown)"), ""),
        (replace(FACTS, old="0.3.1"), "the operator runs version 0.3.1, which is newer than this command: 0.3.0"),
        (replace(FACTS, old="0.3.0.dev9", new="0.3.0.dev8"), "newer than this command"),
        (replace(FACTS, free_bytes=65 * 2**20), "the backup of the databases needs 65.9 MiB on the disk"),
        (replace(FACTS, free_bytes=0, has_postgresql=True), ""),
        (replace(FACTS, free_bytes=0, is_replaced=True), ""),
        (replace(FACTS, manager="systemd"), "systemd would start version 0.2.0 again: have it run this version"),
        (replace(FACTS, manager="systemd", is_replaced=True), ""),
        (replace(FACTS, manager="`cortex up --foreground --stop-all`"), "replace the image of its container"),
    ],
)
def test_an_upgrade_begins_only_if_it_can_succeed(facts: UpgradeFacts, expected: str) -> None:
    found = problem(facts)
    assert expected in found and bool(expected) == bool(found)


def test_steps_replace_the_operator_first_and_the_model_agent_last() -> None:
    stop, back_up, start, *rest = steps(FACTS, "/home/backups/1")
    assert stop == "stop the operator 0.2.0 (pid 7); gateway and replicas continue to serve"
    assert back_up == "back up the databases (977 KiB) in /home/backups/1"
    assert start.startswith("start the operator 0.3.0")
    assert rest == [
        "replace the replicas of a, as an update",
        "replace the replicas of b, as an update",
        "replace the model agent",
    ]
    assert steps(replace(FACTS, has_postgresql=True), "") == [stop, start, *rest]
    assert steps(replace(FACTS, is_replaced=True), "") == rest
    assert steps(replace(FACTS, is_standby=True), "/home/backups/1") == [stop, back_up, start]


def test_a_manager_is_known_by_command_line_and_environment() -> None:
    operator = ["python", "-P", "-m", "cortex.operator.main"]
    assert manager_of(7, [*operator, "--wait-for-input"], {}) == ""
    assert manager_of(7, [*operator, "--wait-for-input"], {"SYSTEMD_EXEC_PID": "6"}) == ""
    assert manager_of(7, operator, {"SYSTEMD_EXEC_PID": "7"}) == "systemd"
    assert manager_of(7, [*operator, "--start-lock", "3"], {}) == "the command that ran `cortex up --foreground`"
    assert "--stop-all" in manager_of(7, [*operator, "--stop-all", "--start-lock", "3"], {})
