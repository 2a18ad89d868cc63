"""Keeps, per revision, what must be there before its replicas start, and when the next attempt may be made.

Preparing itself (environments, models) is passed in. Lives in memory only: environments and models are cached on
disk, so an operator that starts anew prepares again in milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from cortex.engine.environment import Prepared
from cortex.errors import CortexError
from cortex.operator.replicas.plan import Preparation, Stage
from cortex.replica.spec import Failure
from cortex.state.apis import Target
from cortex.telemetry import Logger

#: Revision of an API.
Key = tuple[str, str]

_FIRST_RETRY_S = 10.0
_MAX_RETRY_S = 300.0
_MAX_LOSS_DELAY_S = 60.0
#: Replicas lost longer ago than this don't slow down the next start.
_LOSSES_FORGOTTEN_AFTER_S = 300.0
_ONE_BLOW_S = 0.5


@dataclass
class _Entry:
    state: Preparation = Preparation()
    prepared: Prepared | None = None
    task: asyncio.Task[None] | None = None
    attempts: int = 0
    losses: int = 0
    lost_at: float = 0.0


class Preparations:
    """All revisions that are being, or were, prepared. `on_change` is called after each attempt."""

    def __init__(
        self,
        prepare: Callable[[Target], Awaitable[Prepared]],
        on_change: Callable[[], None],
        clock: Callable[[], float],
        logger: Logger,
    ) -> None:
        self._prepare = prepare
        self.on_change = on_change
        self._clock = clock
        self._logger = logger
        self._entries: dict[Key, _Entry] = {}

    def states(self) -> dict[Key, Preparation]:
        """Return how far each revision is."""
        return {key: entry.state for key, entry in self._entries.items()}

    def prepared(self, target: Target) -> Prepared | None:
        """Return what `target` is started with, once it is prepared."""
        entry = self._entries.get(_key(target))
        return entry.prepared if entry else None

    def begin(self, target: Target) -> None:
        """Prepare a revision in the background, unless that is going on."""
        entry = self._entry(_key(target))
        if entry.state.stage is Stage.NEEDED:
            entry.state = replace(entry.state, stage=Stage.RUNNING)
            entry.task = asyncio.create_task(self._run(target, entry), name=f"prepare {target.spec.name}")

    def start_failed(self, target: Target, error: Exception) -> None:
        """Record that a replica could not be started although all was prepared."""
        entry = self._entry(_key(target))
        entry.attempts += 1
        entry.prepared = None
        entry.state = Preparation(Stage.NEEDED, Failure(str(error)), self._clock() + _retry_s(entry.attempts))

    def lost(self, key: Key, was_ready: bool) -> None:
        """Record that a replica vanished: the first is replaced at once, those that follow later and later."""
        entry, now = self._entry(key), self._clock()
        ago = now - entry.lost_at
        # Whatever ended several replicas that served at one blow, such as a lack of memory, is one loss.
        if not was_ready or not entry.losses or ago > _ONE_BLOW_S:
            entry.losses = entry.losses + 1 if ago < _LOSSES_FORGOTTEN_AFTER_S else 1
            entry.lost_at = now
        delay = min(2.0 ** (entry.losses - 2), _MAX_LOSS_DELAY_S) if entry.losses > 1 else 0.0
        failure = entry.state.failure
        if not was_ready:
            failure = Failure(f"a replica ended before it was ready; `cortex logs {key[0]}` shows what it said")
        entry.state = replace(entry.state, failure=failure, hold_until=now + delay)

    def became_ready(self, key: Key) -> None:
        """Forget why a revision failed before."""
        entry = self._entries.get(key)
        if entry and entry.state.failure:
            entry.attempts = 0
            entry.state = replace(entry.state, failure=None)

    def keep_only(self, keys: Collection[Key]) -> None:
        """Forget all other revisions and end what is being done for them."""
        for key in [key for key in self._entries if key not in keys]:
            entry = self._entries.pop(key)
            if entry.task:
                entry.task.cancel()

    async def shutdown(self) -> None:
        """End what is being done."""
        tasks = [entry.task for entry in self._entries.values() if entry.task]
        self.keep_only(())
        await asyncio.gather(*tasks, return_exceptions=True)

    def _entry(self, key: Key) -> _Entry:
        return self._entries.setdefault(key, _Entry())

    async def _run(self, target: Target, entry: _Entry) -> None:
        entry.attempts += 1
        try:
            entry.prepared = await self._prepare(target)
            entry.state = Preparation(Stage.DONE)
        except CortexError as error:
            self._fail(target, entry, error)
            self._logger.warning("preparation failed", api=target.spec.name, error=error)
        except Exception as error:
            self._fail(target, entry, error)
            self._logger.error("preparation failed", exc_info=error, api=target.spec.name)
        self.on_change()

    def _fail(self, target: Target, entry: _Entry, error: Exception) -> None:
        failure = Failure(str(error) or type(error).__name__)
        hold_until = self._clock() + _retry_s(entry.attempts)
        entry.state = Preparation(Stage.NEEDED, failure, hold_until, entry.attempts)


def _key(target: Target) -> Key:
    return target.spec.name, target.revision


def _retry_s(attempts: int) -> float:
    return min(_FIRST_RETRY_S * 2.0 ** min(attempts - 1, 10), _MAX_RETRY_S)
