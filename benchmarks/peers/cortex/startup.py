"""API that reports the age of its processes at the import of this module."""

import os
import time
from pathlib import Path
from typing import Any


def _age_s(pid: int, now: float) -> float:
    """Return the age of `pid` in seconds, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return now - int(fields[19]) / os.sysconf("SC_CLK_TCK")


_NOW = time.clock_gettime(time.CLOCK_BOOTTIME)
AGES = {"process_ms": _age_s(os.getpid(), _NOW) * 1e3, "supervisor_ms": _age_s(os.getppid(), _NOW) * 1e3}


class Handler:
    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def handle_post(self, payload: dict[str, Any]) -> dict[str, Any]:
        return AGES
