"""How much a process counts for the scheduler, and when memory runs out. Ray lowers both for its workers."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_OOM_FILE = "oom_score_adj"


@dataclass(frozen=True)
class Priority:
    """Of one process."""

    niceness: int  #: -20 to 19; the less, the more it counts
    oom_score: int  #: -1000 to 1000; the less, the later it is killed

    @classmethod
    def of(cls, pid: int) -> Priority:
        """Return that of a process. Raises: OSError."""
        return cls(os.getpriority(os.PRIO_PROCESS, pid), int(Path(f"/proc/{pid}/{_OOM_FILE}").read_text()))

    def take(self) -> None:
        """Have this process count as much, as far as its user may: only root has less niceness than before."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{_OOM_FILE}").write_text(str(self.oom_score))
