"""The plan of an upgrade: why it can't begin, and its steps. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from cortex.errors import format_size

#: Free space that is needed besides two copies of the databases: one is migrated first, one is the backup.
_SPARE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class UpgradeFacts:
    """State of an installation before its upgrade."""

    old: str  #: version of the running operator
    new: str  #: version of this command
    pid: int  #: of the running operator
    is_replaced: bool = False  #: the running operator is already that of this environment
    manager: str = ""  #: what starts the operator again, see `manager_of`
    database_bytes: int = 0  #: size of the SQLite databases
    free_bytes: int = 0  #: on the disk of the home
    has_postgresql: bool = False
    is_standby: bool = False
    apis: Sequence[str] = ()  #: those with replicas to replace
    has_model_agent: bool = False


def manager_of(pid: int, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return which program would start an operator again, or end with it; "" if it was started in the background."""
    if "--stop-all" in command:
        return "`cortex up --foreground --stop-all`"
    if environ.get("SYSTEMD_EXEC_PID") == str(pid):
        return "systemd"
    return "the command that ran `cortex up --foreground`" if "--start-lock" in command else ""


def problem(facts: UpgradeFacts) -> str:
    """Return why the upgrade can't begin, and what to do; "" if it can."""
    if _is_older(facts.new, facts.old):
        return f"the operator runs version {facts.old}, which is newer than this command: {facts.new}"
    if facts.is_replaced:
        return ""
    if "--stop-all" in facts.manager:
        return (
            f"the operator runs under {facts.manager}, with which everything ends: replace the image of its container"
        )
    if facts.manager:
        return (
            f"{facts.manager} would start version {facts.old} again: have it run this version and restart only the "
            "operator (`systemctl restart`), then run `cortex upgrade` again, which replaces the rest"
        )
    needed = 2 * facts.database_bytes + _SPARE_BYTES
    if not facts.has_postgresql and facts.free_bytes < needed:
        return (
            f"the backup of the databases needs {format_size(needed)} on the disk of CORTEX_HOME, and "
            f"{format_size(facts.free_bytes)} are free"
        )
    return ""


def steps(facts: UpgradeFacts, backup: str) -> list[str]:
    """Return the steps in their order, for people."""
    found = []
    if not facts.is_replaced:
        found.append(f"stop the operator {facts.old} (pid {facts.pid}); gateway and replicas continue to serve")
        if not facts.has_postgresql:
            found.append(f"back up the databases ({format_size(facts.database_bytes)}) in {backup}")
        found.append(
            f"start the operator {facts.new}, which migrates the databases and has HAProxy reload if it differs"
        )
    if facts.is_standby:
        return found
    found += [f"replace the replicas of {name}, as an update" for name in facts.apis]
    return [*found, "replace the model agent"] if facts.has_model_agent else found


def _is_older(one: str, other: str) -> bool:
    try:
        return Version(one) < Version(other)
    except InvalidVersion:  # of an operator whose version is unknown
        return False
