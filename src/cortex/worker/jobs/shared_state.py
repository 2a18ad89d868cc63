"""Memory that a job worker shares with its supervisor: the batch that runs, and the leases held.

It survives the worker, so that the supervisor finds out which batch was running when it died. It can be read while the
worker is stuck in C code and holds the interpreter lock.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from cortex.jobs.spec import HOOK_SEQ

_BYTES = 4096
_PHASE, _SEQ, _DEADLINE, _TIMEOUT, _JOB_BYTES, _TOKENS_BYTES, _LEASE, _RENEWED, _NAME_BYTES, _PID, _IS_OVER = range(11)
_JOB_START, _JOB_MAX_BYTES = 128, 64
_NAME_START, _NAME_MAX_BYTES = _JOB_START + _JOB_MAX_BYTES, 64
_TOKENS_START = _NAME_START + _NAME_MAX_BYTES
_TOKENS_MAX_BYTES = _BYTES - _TOKENS_START
#: Values of `_PHASE`.
_BEFORE, _RUNNING, _AFTER = range(3)


class SharedJobState:
    """State of one job worker; times are monotonic."""

    def __init__(self) -> None:
        self._bytes = memoryview(mmap.mmap(-1, _BYTES))
        self._words = self._bytes.cast("q")

    def clear(self) -> None:
        """Reset the state before a new process starts."""
        self._bytes[:] = bytes(_BYTES)

    # Written by the worker.

    def enter_process(self, pid: int) -> None:
        """Reset the state for a process that a fork server has forked."""
        self.clear()
        self._words[_PID] = pid

    def end_job(self) -> None:
        """Mark the job as over for this process: another one may run the next job."""
        self._words[_IS_OVER] = 1

    def enter_job(self, job_id: str, lease_s: float) -> None:
        """Set the job of the next batches."""
        data = job_id.encode()[:_JOB_MAX_BYTES]
        self._bytes[_JOB_START : _JOB_START + len(data)] = data
        self._words[_JOB_BYTES] = len(data)
        self._words[_PHASE] = _BEFORE
        self._words[_LEASE] = int(lease_s * 1e9)

    def begin(self, seq: int, deadline_ns: int = 0, timeout_ns: int = 0) -> None:
        """Mark a batch as running until `deadline_ns`; 0: without a deadline."""
        words = self._words
        words[_SEQ] = seq
        words[_DEADLINE] = deadline_ns
        words[_TIMEOUT] = timeout_ns
        words[_PHASE] = _RUNNING

    def set_name(self, name: str) -> None:
        """Set the name by which callers know the running batch."""
        data = name.encode()[:_NAME_MAX_BYTES]
        self._bytes[_NAME_START : _NAME_START + len(data)] = data
        self._words[_NAME_BYTES] = len(data)

    def end(self) -> None:
        """Mark the batch as finished."""
        self._words[_PHASE] = _AFTER

    def set_tokens(self, tokens: Iterable[str]) -> None:
        """Set the tokens of all leases held."""
        data = b" ".join(token.encode() for token in tokens)
        if len(data) > _TOKENS_MAX_BYTES:
            data = data[:_TOKENS_MAX_BYTES].rpartition(b" ")[0]
        self._words[_TOKENS_BYTES] = 0
        self._bytes[_TOKENS_START : _TOKENS_START + len(data)] = data
        self._words[_TOKENS_BYTES] = len(data)

    def set_renewed(self, now_ns: int) -> None:
        """Set the time at which leases were last renewed or granted."""
        self._words[_RENEWED] = now_ns

    # Read by the supervisor and the fork server.

    @property
    def pid(self) -> int:
        """Return the process that a fork server has forked; 0 without one."""
        return self._words[_PID]

    @property
    def is_job_over(self) -> bool:
        """Return whether the process has ended its job in order."""
        return bool(self._words[_IS_OVER])

    @property
    def running_batch(self) -> str:
        """Return the batch that runs, `<job id>:<seq>` or `<job id>:hook`; empty between batches."""
        return self._named() if self._words[_PHASE] == _RUNNING else ""

    @property
    def previous_batch(self) -> str:
        """Return the batch that ran last, as `running_batch` does, while none runs; empty before the first."""
        return self._named() if self._words[_PHASE] == _AFTER else ""

    @property
    def name(self) -> str:
        """Return the name by which callers know the batch that runs, or ran last; empty if there is none."""
        return bytes(self._bytes[_NAME_START : _NAME_START + self._words[_NAME_BYTES]]).decode(errors="replace")

    def _named(self) -> str:
        seq = self._words[_SEQ]
        job = bytes(self._bytes[_JOB_START : _JOB_START + self._words[_JOB_BYTES]]).decode(errors="replace")
        return f"{job}:{'hook' if seq == HOOK_SEQ else seq}"

    @property
    def deadline_ns(self) -> int:
        """Return the deadline of the running batch; 0 if it has none, or none is running."""
        return self._words[_DEADLINE] if self._words[_PHASE] == _RUNNING else 0

    @property
    def timeout_s(self) -> float:
        """Return the timeout of the running batch."""
        return self._words[_TIMEOUT] / 1e9

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the tokens of the leases held."""
        data = bytes(self._bytes[_TOKENS_START : _TOKENS_START + self._words[_TOKENS_BYTES]])
        return tuple(data.decode(errors="replace").split())

    @property
    def lease_s(self) -> float:
        """Return how long a lease is valid without a renewal."""
        return self._words[_LEASE] / 1e9

    @property
    def renewed_ns(self) -> int:
        """Return when leases were last renewed or granted."""
        return self._words[_RENEWED]
