"""Gives the last lease of a job, the right to call `on_job_complete`, to one process, whatever operator is there.

Who has it and what came of it is stored before anyone is told, so that an operator that takes over neither gives it to
another process while the first is inside, nor again once it is done.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field

import orjson

from cortex.errors import ConflictError
from cortex.jobs.lease_expiry import UNHEARD
from cortex.jobs.queue import LEASE_S
from cortex.jobs.store import JobStore

_HOLDER = "hook"
_OUTCOME = "hook_outcome"


@dataclass(frozen=True)
class HookOutcome:
    """How `on_job_complete` ended; both empty: well."""

    error: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class HookLost:
    """The process that was inside `on_job_complete` died."""

    cause: str = ""  #: where it is known already


@dataclass(frozen=True)
class _Holder:
    """The process that was given the last lease, and its token."""

    token: str
    worker: str
    pid: int


@dataclass
class _Hook:
    """The last lease of a job while its end is waited for."""

    outcome: asyncio.Future[HookOutcome | HookLost]
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    holder: _Holder | None = None
    heard_at: float = 0.0  #: when the holder was last heard of


class Hooks:
    """The last leases of all jobs."""

    def __init__(self, store: JobStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._hooks: dict[str, _Hook] = {}

    async def run(
        self, job_id: str, is_there: Callable[[str, int], bool], on_open: Callable[[], None]
    ) -> HookOutcome | HookLost:
        """Wait for the end of a job's `on_job_complete`, or of the process inside it.

        `is_there` tells whether a worker's process may still be at it; `on_open` is called once the lease can be had.
        """
        marks = await self._store.marks(job_id)
        if text := marks.get(_OUTCOME):
            return HookOutcome(**orjson.loads(text))
        hook = self._hooks[job_id] = _Hook(asyncio.get_running_loop().create_future())
        if (holder := _holder_of(marks)) and is_there(holder.worker, holder.pid):
            hook.holder, hook.token, hook.heard_at = holder, holder.token, self._clock()
        on_open()
        try:
            outcome = await hook.outcome
            if isinstance(outcome, HookLost):
                await self._store.set_mark(job_id, _HOLDER, "")
            return outcome
        finally:
            self._hooks.pop(job_id, None)

    async def take(self, job_id: str, worker: str, pid: int) -> str | None:
        """Return the token of a job's last lease, if it is to be had or was this process's before."""
        hook = self._hooks.get(job_id)
        if hook is None or hook.outcome.done():
            return None
        holder = _Holder(hook.token, worker, pid)
        if hook.holder not in (None, holder):
            return None
        hook.holder, hook.heard_at = holder, self._clock()
        await self._store.set_mark(job_id, _HOLDER, orjson.dumps(asdict(holder)).decode())
        return hook.token

    async def done(self, job_id: str, worker: str, pid: int, token: str, outcome: HookOutcome) -> None:
        """Store how it ended. Raises: ConflictError if it was not this process's to call."""
        if _holder_of(await self._store.marks(job_id)) != _Holder(token, worker, pid):
            raise ConflictError("this worker's right to complete the job was lost")
        await self._store.set_mark(job_id, _OUTCOME, orjson.dumps(asdict(outcome)).decode())
        hook = self._hooks.get(job_id)  # none yet where this operator has just begun: `run` finds what is stored
        if hook is not None and not hook.outcome.done():
            hook.outcome.set_result(outcome)

    def renew(self, worker: str, pid: int, tokens: Collection[str]) -> set[str]:
        """Hear of a process; return those of `tokens` that are last leases of its own."""
        held = [hook for hook in self._hooks.values() if hook.holder in [_Holder(t, worker, pid) for t in tokens]]
        for hook in held:
            hook.heard_at = self._clock()
        return {hook.token for hook in held}

    def expire(self) -> None:
        """Take the last lease from processes that were not heard of, as if they had died."""
        for hook in self._hooks.values():
            is_silent = self._clock() - hook.heard_at > LEASE_S
            if hook.holder is not None and is_silent and not hook.outcome.done():
                hook.outcome.set_result(HookLost(UNHEARD))

    def lose(self, worker: str, pid: int | None, except_pid: int | None = None, cause: str = "") -> None:
        """Learn that a worker's process died; None: every process of it, but for `except_pid`."""
        for hook in self._hooks.values():
            holder = hook.holder
            if holder is None or holder.worker != worker or holder.pid == except_pid or hook.outcome.done():
                continue
            if pid in (None, holder.pid):
                hook.outcome.set_result(HookLost(cause))


def _holder_of(marks: dict[str, str]) -> _Holder | None:
    text = marks.get(_HOLDER)
    return _Holder(**orjson.loads(text)) if text else None
