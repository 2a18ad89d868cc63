"""The shared memory in which a worker of jobs writes which batch it runs and which leases it holds.

It survives the worker's death, so its supervisor knows which batch is to blame, and it can be read while the worker is
stuck in C code and holds the interpreter lock.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

#: In place of a batch's number: `on_job_complete` is running.
HOOK = -1

_BYTES = 4096
_PLACE, _SEQ, _DEADLINE, _TIMEOUT, _JOB_BYTES, _TOKENS_BYTES, _LEASE, _TENDED, _NAME_BYTES = range(9)
_JOB_START, _JOB_MAX_BYTES = 128, 64
_NAME_START, _NAME_MAX_BYTES = _JOB_START + _JOB_MAX_BYTES, 64
_TOKENS_START = _NAME_START + _NAME_MAX_BYTES
_TOKENS_MAX_BYTES = _BYTES - _TOKENS_START
_NS_PER_S = 1_000_000_000
#: Where the process is, by `_PLACE`.
_BEFORE, _INSIDE, _AFTER = range(3)


class JobCells:
    """What one worker is at; times are those of the monotonic clock."""

    def __init__(self) -> None:
        self._bytes = memoryview(mmap.mmap(-1, _BYTES))
        self._cells = self._bytes.cast("q")

    def clear(self) -> None:
        """Forget the process before."""
        self._bytes[:] = bytes(_BYTES)

    # The worker writes.

    def enter_job(self, job_id: str, lease_s: float) -> None:
        """Say of which job the next batches are."""
        data = job_id.encode()[:_JOB_MAX_BYTES]
        self._bytes[_JOB_START : _JOB_START + len(data)] = data
        self._cells[_JOB_BYTES] = len(data)
        self._cells[_PLACE] = _BEFORE
        self._cells[_LEASE] = int(lease_s * _NS_PER_S)

    def begin(self, seq: int, deadline_ns: int = 0, timeout_ns: int = 0) -> None:
        """Say that the user's code gets this batch now, and until when it may keep it (0: as long as it likes)."""
        cells = self._cells
        cells[_SEQ] = seq
        cells[_DEADLINE] = deadline_ns
        cells[_TIMEOUT] = timeout_ns
        cells[_PLACE] = _INSIDE

    def call_it(self, name: str) -> None:
        """Say how callers know the batch inside, where they know it."""
        data = name.encode()[:_NAME_MAX_BYTES]
        self._bytes[_NAME_START : _NAME_START + len(data)] = data
        self._cells[_NAME_BYTES] = len(data)

    def end(self) -> None:
        """Say that the batch is done."""
        self._cells[_PLACE] = _AFTER

    def hold(self, tokens: Iterable[str]) -> None:
        """Say which leases are held, all of them."""
        data = b" ".join(token.encode() for token in tokens)
        if len(data) > _TOKENS_MAX_BYTES:
            data = data[:_TOKENS_MAX_BYTES].rpartition(b" ")[0]
        self._cells[_TOKENS_BYTES] = 0
        self._bytes[_TOKENS_START : _TOKENS_START + len(data)] = data
        self._cells[_TOKENS_BYTES] = len(data)

    def tend(self, now_ns: int) -> None:
        """Say that the leases were renewed, or given, just now."""
        self._cells[_TENDED] = now_ns

    # Its supervisor reads.

    @property
    def inside(self) -> str:
        """Return the batch that runs, `<job id>:<seq>` or `<job id>:hook`; empty between batches."""
        return self._named() if self._cells[_PLACE] == _INSIDE else ""

    @property
    def after(self) -> str:
        """Return the batch that ran last, as `inside` does, while none runs; empty before the first."""
        return self._named() if self._cells[_PLACE] == _AFTER else ""

    @property
    def name(self) -> str:
        """Return how callers know the batch that runs, or ran last; empty where they don't."""
        return bytes(self._bytes[_NAME_START : _NAME_START + self._cells[_NAME_BYTES]]).decode(errors="replace")

    def _named(self) -> str:
        seq = self._cells[_SEQ]
        job = bytes(self._bytes[_JOB_START : _JOB_START + self._cells[_JOB_BYTES]]).decode(errors="replace")
        return f"{job}:{'hook' if seq == HOOK else seq}"

    @property
    def deadline_ns(self) -> int:
        """Return when the batch inside has to be done; 0 if nothing says so, or none is inside."""
        return self._cells[_DEADLINE] if self._cells[_PLACE] == _INSIDE else 0

    @property
    def timeout_s(self) -> float:
        """Return how long the batch inside was given."""
        return self._cells[_TIMEOUT] / _NS_PER_S

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the leases that are held."""
        data = bytes(self._bytes[_TOKENS_START : _TOKENS_START + self._cells[_TOKENS_BYTES]])
        return tuple(data.decode(errors="replace").split())

    @property
    def lease_s(self) -> float:
        """Return how long a lease holds without being renewed."""
        return self._cells[_LEASE] / _NS_PER_S

    @property
    def tended_ns(self) -> int:
        """Return when the worker last renewed its leases, or was given one."""
        return self._cells[_TENDED]
