"""Who the local operator is and whether its process is there, read from `CORTEX_HOME/run`. Changes nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex.home import Home

#: Readings of one process's creation time differ by the adjustments of the clock meanwhile.
_SAME_TIME_S = 5.0


@dataclass(frozen=True)
class OperatorIdentity:
    """The operator that wrote `run/operator.json`."""

    pid: int
    create_time: float  #: UNIX time, seconds, as psutil has it
    url: str
    gateway_url: str


def operator_file(home: Home) -> Path:
    """Return the file in which an operator writes who and where it is."""
    return home.run_dir / "operator.json"


def last_operator(home: Home) -> OperatorIdentity | None:
    """Return the operator that ran last, dead or alive; None if none ever did, or if it was stopped in order."""
    try:
        data: dict[str, Any] = json.loads(operator_file(home).read_text())
        return OperatorIdentity(
            int(data["pid"]), float(data["create_time"]), str(data["url"]).rstrip("/"), str(data["gateway_url"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_operator(home: Home) -> OperatorIdentity | None:
    """Return the operator if its process is there; it may still be starting."""
    operator = last_operator(home)
    return operator if operator and is_running(operator.pid, operator.create_time) else None


def is_running(pid: int, create_time: float) -> bool:
    """Tell whether this very process is there and has not ended."""
    try:
        # The command's name is in brackets and may hold any character; the state follows it.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        booted = int(Path("/proc/stat").read_bytes().partition(b"\nbtime ")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        return False
    started = booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] not in (b"Z", b"X") and abs(started - create_time) < _SAME_TIME_S
