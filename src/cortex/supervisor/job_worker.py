"""A worker of jobs, as its supervisor holds it: the batch inside and its deadline, whom a death is to be blamed on.

The process leases and reports by itself. Its supervisor renews its leases only while it can't: it may be in a call
that keeps the interpreter lock for longer than a lease holds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cortex.jobs.spec import batch_id
from cortex.lifecycle import ProcessState
from cortex.replica.channel import Channel
from cortex.replica.jobs.shared_state import JobCells
from cortex.replica.jobs.worker import run_job_worker
from cortex.replica.spec import KEPT_DEATHS, Death, ProcessStatus, ReplicaSpec
from cortex.supervisor.exit_reasons import timed_out
from cortex.supervisor.lease_renewal import LeaseRenewal
from cortex.supervisor.process_slot import EXIT_S, Fork, Slot

#: A worker that has not renewed its leases for this part of the time that they hold can't do so.
_UNTENDED = 0.5


class JobWorker(Slot):
    """A slot whose processes work through batches."""

    def __init__(self, spec: ReplicaSpec, index: int, fork: Fork, clock_ns: Callable[[], int] = time.monotonic_ns):
        super().__init__(spec, index, fork)
        self.slots = 1
        self._cells = JobCells()
        self._clock_ns = clock_ns
        self._renewal = LeaseRenewal(spec)
        self._deaths: deque[Death] = deque(maxlen=KEPT_DEATHS)
        self._was_inside = ""
        self._name = ""  #: of what was inside, where callers know it
        self._is_told_to_stop = False
        self._exit_until: float | None = None

    def run(self, channel: Channel) -> int:
        """Be the process: called in the fork, returns its exit code."""
        return run_job_worker(self._spec, self.index, channel, self._cells, self.models.start(self.is_standby))

    @property
    def is_busy(self) -> bool:
        """Tell whether deadlines or limits have to be watched closely."""
        if self.state in (ProcessState.STARTING, ProcessState.READY):
            return bool(self._spec.mem_limit_bytes or self._cells.deadline_ns)
        return True

    @property
    def status(self) -> ProcessStatus:
        """Return what the engine is told."""
        return replace(super().status, deaths=tuple(self._deaths))

    def take_inside(self) -> str:
        """Name the batch that was inside the process that died, once; empty if none was."""
        job_id, _, seq = self._was_inside.partition(":")
        self._was_inside = ""
        if not job_id:
            return ""
        if self._name:
            return f"workload {self._name}"
        return "on_job_complete" if seq == "hook" else f"batch {batch_id(job_id, int(seq))}"

    # Start and messages.

    def _on_start(self) -> None:
        self._cells.clear()
        self._renewal.close()

    def on_message(self, message: dict[str, Any]) -> None:
        """Take a message of the process. Raises: KeyError, TypeError, ValueError if our code did not write it."""
        kind = message["kind"]
        if kind == "constructing":
            if self.state is ProcessState.READY:
                self.state = ProcessState.STARTING  # anew, for another job
        elif kind == "leaving":
            if self.state in (ProcessState.STARTING, ProcessState.READY):
                self.state = ProcessState.STOPPING
                self._drain_until = time.monotonic()
                self._is_told_to_stop = True
        else:
            super().on_message(message)

    # Time.

    def _tend_without_process(self) -> None:
        pass

    def _tend(self, now: float) -> None:
        deadline_ns = self._cells.deadline_ns
        if deadline_ns and self._clock_ns() > deadline_ns:
            self.kill(timed_out(self._cells.timeout_s))
        self._renew(now)

    def _renew(self, now: float) -> None:
        """Keep the leases of a process that runs but does not come to it."""
        self._renewal.tick(now)
        lease_s = self._cells.lease_s
        untended_s = (self._clock_ns() - self._cells.tended_ns) / 1e9
        if self.pid is None or not lease_s or untended_s < lease_s * _UNTENDED:
            return
        tokens = self._cells.tokens
        if tokens and self._renewal.is_due(now, lease_s) and _runs(self.pid):
            self._renewal.begin(now, self.pid, tokens)

    # Stop and death.

    def _carry_on_stop(self, now: float) -> None:
        assert self._drain_until is not None
        if not self._is_told_to_stop and self.channel is not None:
            self._is_told_to_stop = self.channel.send("stop")
        if self._cells.inside:
            self._exit_until = None
            if now >= self._drain_until:
                self.kill()
            return
        if self._exit_until is None:
            self._exit_until = now + EXIT_S
        elif now > self._exit_until:
            self.kill()

    def _on_dead(self, death: Death) -> Death:
        self._renewal.close()
        self._was_inside, self._name = self._cells.inside, self._cells.name
        return replace(death, inside=self._was_inside, after=self._cells.after)

    def _note_death(self, death: Death) -> None:
        super()._note_death(death)
        self._deaths.append(death)

    def _is_quick(self, death: Death, now: float) -> bool:
        return not death.inside and super()._is_quick(death, now)

    def _become_stopped(self) -> None:
        super()._become_stopped()
        self._renewal.close()


def _runs(pid: int) -> bool:
    """Tell whether a process is neither stopped by a signal nor by a debugger: such a one holds nothing for long."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("T", "t", "Z", "X")
