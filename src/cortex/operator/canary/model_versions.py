"""New versions of models as canaries: each gets a revision of its own, which differs only by its pinned models.

The replicas of an API with `models.canary` serve the versions that their revision pins, whatever else the bucket has.
The operator watches the model agent's catalogue. When a version appears, the same files and configuration are deployed
with that version, and the trial of this revision is like any other:

| a version | is |
|---|---|
| above the pinned one, or at its number with other content | tried, if no revision was ever pinned to its content |
| that appears during a trial | tried after that, and at once if the trial is held |
| that is tried, and deleted | replaced by the next lower one: the trial ends |
| that serves, and deleted | served on, from the disks; the next lower one is tried |
| that was rolled back | not tried again, unless it leaves the bucket and comes back, or is deployed again |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from cortex.config.schema import PinnedModel
from cortex.errors import ConflictError
from cortex.models.protocol import MAX_LINE_BYTES, CatalogueUpdate, Watch, read_answer, write
from cortex.models.source import model_source
from cortex.models.spec import Catalogue, Model, ModelSource
from cortex.operator.canary.trials import TrialOutcome, Trials
from cortex.operator.deploy.model_pins import pin_of, pins_of
from cortex.operator.error_log import LoopErrorLog
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.state.queries.key_values import KeyValueStore
from cortex.telemetry import Logger

CHECK_S = 1.0

#: A version with its content: model, number, digest.
Content = tuple[str, str, str]


def content_of(pin: PinnedModel) -> Content:
    """Return what identifies a pinned version."""
    return pin.model, pin.number, pin.digest


def newest_versions(pins: Sequence[PinnedModel], catalogue: Catalogue, tried: Collection[Content]) -> list[PinnedModel]:
    """Return the versions that an API should have, given those of its newest revision and those tried before."""
    models = catalogue.by_name
    return [_newest(pin, models[pin.model], tried) if pin.model in models else pin for pin in pins]


def _newest(pin: PinnedModel, model: Model, tried: Collection[Content]) -> PinnedModel:
    found = [(version.order, (model.name, version.number, version.digest)) for version in reversed(model.versions)]
    new = [each for order, each in found if order >= int(pin.number) and each not in tried and each != content_of(pin)]
    if new:
        return pin_of(model, new[0][1])
    if content_of(pin) in (each for _, each in found):
        return pin
    lower = [each for order, each in found if order < int(pin.number)]
    return pin_of(model, lower[0][1]) if lower else pin


class ModelVersions:
    """The control loop that deploys new versions of models.

    `deploy` (api, pins, revision) deploys an API with other versions if its newest revision is still this one. Raises:
    CortexError.
    """

    def __init__(
        self,
        agent_socket: Path,
        apis: ApiStore,
        trials: Trials,
        store: KeyValueStore,
        deploy: Callable[[str, Sequence[PinnedModel], str], Awaitable[object]],
        logger: Logger,
    ) -> None:
        self._agent_socket = agent_socket
        self._apis = apis
        self._trials = trials
        self._store = store
        self._deploy = deploy
        self._watches: dict[str, CatalogueWatch] = {}
        self._tried: dict[str, set[Content]] = {}  #: by API; what is stored
        self._error_log = LoopErrorLog(logger, "new versions of models can't be deployed")

    async def run(self) -> None:
        """Look for new versions every second."""
        try:
            while True:
                self._stop_unneeded()
                for record in self._apis.records():
                    try:
                        await self._check(record)
                        self._error_log.succeeded()
                    except Exception as error:  # of any kind: the other APIs must be checked
                        self._error_log.failed(error, api=record.name)
                await asyncio.sleep(CHECK_S)
        finally:
            for watch in self._watches.values():
                watch.stop()

    async def _check(self, record: ApiRecord) -> None:
        source, pins = model_source(record.spec, None), pins_of(record.spec)
        if source is None or not pins:
            return
        source = replace(source, pins=(), is_live=True)
        watch = self._watches.get(record.name)
        if watch is None or watch.source != source:
            if watch is not None:
                watch.stop()
            watch = self._watches[record.name] = CatalogueWatch(self._agent_socket, record.name, source)
            watch.start()
        await self.check(record, watch.catalogue)

    async def check(self, record: ApiRecord, catalogue: Catalogue | None) -> None:
        """Deploy an API with new versions in the catalogue, if there are any. Raises: CortexError."""
        pins = pins_of(record.spec)
        tried = self._remember(record, catalogue)
        if catalogue is None or not self._may_deploy(record, catalogue):
            return
        wanted = newest_versions(pins, catalogue, tried)
        if wanted != list(pins):
            with contextlib.suppress(ConflictError):  # somebody deployed it meanwhile
                await self._deploy(record.name, wanted, record.revision)
                if (present := self._apis.get(record.name)) is not None:
                    self._remember(present, catalogue)

    def _stop_unneeded(self) -> None:
        needed = {record.name for record in self._apis.records() if pins_of(record.spec)}
        for name in self._watches.keys() - needed:
            self._watches.pop(name).stop()

    def _remember(self, record: ApiRecord, catalogue: Catalogue | None) -> set[Content]:
        """Add the versions of the present revisions to those tried before; forget those that the bucket has lost."""
        key = f"models/{record.name}"
        stored = self._tried.get(record.name)
        if stored is None:
            stored = {(model, number, digest) for model, number, digest in json.loads(self._store.get(key) or "[]")}
        present = {content_of(pin) for pin in pins_of(record.spec)}
        if record.serving is not None:
            present |= {content_of(pin) for pin in pins_of(record.serving.spec)}
        tried = stored | present
        if catalogue is not None:
            tried = (tried & _contents(catalogue)) | present
        if tried != stored:
            self._store.put(key, json.dumps(sorted(tried)))
        self._tried[record.name] = tried
        return tried

    def _may_deploy(self, record: ApiRecord, catalogue: Catalogue) -> bool:
        """Return whether newer versions need not wait for the end of an update or a trial."""
        if record.serving is None:
            return record.failure is not None
        known = self._trials.of(record)
        if known is None:
            return record.serving.hash == record.revision
        if known[0].outcome is TrialOutcome.TRYING:
            return not {content_of(pin) for pin in pins_of(record.spec)} <= (
                _contents(catalogue) | {content_of(pin) for pin in pins_of(record.serving.spec)}
            )
        return known[0].outcome is TrialOutcome.HELD


def _contents(catalogue: Catalogue) -> set[Content]:
    return {(model.name, version.number, version.digest) for model, version in catalogue.versions()}


class CatalogueWatch:
    """The newest catalogue of a source; None until the model agent has listed it."""

    def __init__(self, agent_socket: Path, api: str, source: ModelSource) -> None:
        self.source = source
        self.catalogue: Catalogue | None = None
        self._agent_socket = agent_socket
        self._api = api
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch in the background; the model agent may restart at any time."""
        self._task = asyncio.create_task(self._run(), name=f"watch the models of {self._api}")

    def stop(self) -> None:
        """End the watch."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it ends, or another version wrote it
                await self._read()
            await asyncio.sleep(CHECK_S)

    async def _read(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(self._agent_socket), limit=MAX_LINE_BYTES)
        try:
            writer.write(write(Watch(self._api, self.source)))
            while line := await reader.readline():
                update = read_answer(line)
                if isinstance(update, CatalogueUpdate) and update.confirmed is not None:
                    data = await asyncio.to_thread(Path(update.confirmed).read_bytes)
                    self.catalogue = Catalogue.from_json(data)
        finally:
            writer.close()
