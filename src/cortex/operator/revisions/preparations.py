"""Prepare revisions in the background: build environments, fetch models, and retry with backoff.

State is kept in memory only. Environments and models are cached on disk, so a new operator repeats the preparation
within milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from cortex.engine.environment import Prepared, preparation_failure
from cortex.errors import CortexError
from cortex.operator.revisions.preparation_states import Preparation, RevisionKey, Stage
from cortex.processes.backoff import Backoff
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.spec import StartFailure

_BACKOFF = Backoff(10.0, 300.0)
#: Delay after the second loss in a row and later ones; the first replacement is immediate.
_LOSS_BACKOFF = Backoff(1.0, 60.0)
#: Losses older than this don't delay the next start.
_LOSSES_FORGOTTEN_AFTER_S = 300.0
#: Losses of ready replicas within this time have one cause and count once.
_SAME_CAUSE_S = 0.5


@dataclass
class _Progress:
    state: Preparation = Preparation()
    prepared: Prepared | None = None
    task: asyncio.Task[None] | None = None
    attempts: int = 0
    losses: int = 0
    lost_at: float = 0.0


class Preparations:
    """Preparation states of all revisions. Calls `on_change` after each attempt."""

    def __init__(
        self,
        prepare: Callable[[Revision], Awaitable[Prepared]],
        on_change: Callable[[], None],
        clock: Callable[[], float],
        logger: Logger,
    ) -> None:
        self._prepare = prepare
        self._on_change = on_change
        self._clock = clock
        self._logger = logger
        self._progress: dict[RevisionKey, _Progress] = {}

    def states(self) -> dict[RevisionKey, Preparation]:
        """Return the state of each revision."""
        return {key: progress.state for key, progress in self._progress.items()}

    def prepared(self, revision: Revision) -> Prepared | None:
        """Return the result of preparing `revision`, or None if it is not prepared."""
        progress = self._progress.get(_key(revision))
        return progress.prepared if progress else None

    def begin(self, revision: Revision) -> None:
        """Start to prepare a revision in the background, unless it is prepared or in progress."""
        progress = self._progress_of(_key(revision))
        if progress.state.stage is Stage.NEEDED:
            progress.state = replace(progress.state, stage=Stage.RUNNING)
            progress.task = asyncio.create_task(self._run(revision, progress), name=f"prepare {revision.spec.name}")

    def start_failed(self, revision: Revision, error: Exception) -> None:
        """Record that a prepared replica could not be started: the revision is prepared again after a backoff."""
        progress = self._progress_of(_key(revision))
        progress.attempts += 1
        progress.prepared = None
        progress.state = Preparation(
            Stage.NEEDED, StartFailure(str(error)), self._clock() + _BACKOFF.delay_s(progress.attempts)
        )

    def lost(self, key: RevisionKey, is_blameless: bool) -> None:
        """Record that a replica vanished. The first one is replaced at once, later ones after a growing delay.

        `is_blameless`: the revision is not the cause, because the replica was ready, or was lost with its node.
        """
        progress, now = self._progress_of(key), self._clock()
        elapsed = now - progress.lost_at
        # Several ready replicas that end together, for example because memory ran out, are one loss.
        if not is_blameless or not progress.losses or elapsed > _SAME_CAUSE_S:
            progress.losses = progress.losses + 1 if elapsed < _LOSSES_FORGOTTEN_AFTER_S else 1
            progress.lost_at = now
        delay = _LOSS_BACKOFF.delay_s(progress.losses - 1) if progress.losses > 1 else 0.0
        failure = progress.state.failure
        if not is_blameless and progress.losses > 1:  # the first one may have been killed; the next starts at once
            reason = f"a replica ended before it was ready; `cortex logs {key[0]}` shows its output"
            failure = StartFailure(reason, summary=reason)
        progress.state = replace(progress.state, failure=failure, hold_until=now + delay)

    def became_ready(self, key: RevisionKey) -> None:
        """Clear the failure of a revision."""
        progress = self._progress.get(key)
        if progress and progress.state.failure:
            progress.attempts = 0
            progress.state = replace(progress.state, failure=None)

    def keep_only(self, keys: Collection[RevisionKey]) -> None:
        """Drop all other revisions and cancel their preparation."""
        for key in [key for key in self._progress if key not in keys]:
            progress = self._progress.pop(key)
            if progress.task:
                progress.task.cancel()

    async def shutdown(self) -> None:
        """Cancel all preparation."""
        tasks = [progress.task for progress in self._progress.values() if progress.task]
        self.keep_only(())
        await asyncio.gather(*tasks, return_exceptions=True)

    def _progress_of(self, key: RevisionKey) -> _Progress:
        return self._progress.setdefault(key, _Progress())

    async def _run(self, revision: Revision, progress: _Progress) -> None:
        progress.attempts += 1
        try:
            progress.prepared = await self._prepare(revision)
            progress.state = Preparation(Stage.DONE)
        except CortexError as error:
            self._fail(progress, error)
            self._logger.warning("preparation failed", api=revision.spec.name, error=error)
        except Exception as error:
            self._fail(progress, error)
            self._logger.error("preparation failed", exc_info=error, api=revision.spec.name)
        self._on_change()

    def _fail(self, progress: _Progress, error: Exception) -> None:
        failure = preparation_failure(str(error) or type(error).__name__, error)
        hold_until = self._clock() + _BACKOFF.delay_s(progress.attempts)
        progress.state = Preparation(Stage.NEEDED, failure, hold_until, progress.attempts)


def _key(revision: Revision) -> RevisionKey:
    return revision.spec.name, revision.hash
