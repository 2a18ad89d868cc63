"""The models of one worker process: which version a call gets, and what is loaded for it.

Without caching the latest version of each model is loaded before the process serves, and stays. With caching versions
are loaded when first asked for, within limits, and newer ones of loaded models are loaded beside them and swapped in.
It must not know the user's code, HTTP or sources.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Generic

from cortex.errors import ModelError
from cortex.models.handles import current
from cortex.models.loaded_models import Shelf
from cortex.models.loader import Loads
from cortex.models.loading import Events, Fetcher, Key, Loader, LoadRequest, T
from cortex.models.renewals import Renewals
from cortex.models.spec import LATEST, Catalogue, Model, ModelSource, Version
from cortex.models.versions import find, latest

__all__ = ["Events", "Fetcher", "LoadRequest", "Loader", "Registry"]

#: So long a call waits for others to be done with their models, where no more may be loaded.
ROOM_TIMEOUT_S = 60.0


class Registry(Generic[T]):
    """Gives models to calls. Safe for any thread."""

    def __init__(
        self,
        source: ModelSource,
        catalogue: Catalogue,
        loader: Loader[T],
        fetcher: Fetcher,
        events: Events,
        room_timeout_s: float = ROOM_TIMEOUT_S,
    ) -> None:
        self._source = source
        self._has_one_model = source.form == "path"
        self._catalogue = catalogue
        self._loader = loader
        self._events = events
        self._asked: set[Key] = set()
        self._shelf: Shelf[T] = Shelf()
        self._loads = Loads(source, self._shelf, loader, fetcher, events, room_timeout_s)
        self._renewals = Renewals(self._shelf, self._renew, self._loads.dispose)
        # A version that is served as the latest until the real one is loaded, by model.
        self._stand_ins: dict[str, str] = {}
        # What arguments of `get` mean; replaced, never cleared: who finds out meanwhile writes into the old one.
        self._keys: dict[tuple[Any, Any], Key] = {}

    def load_latest(self, also: Sequence[tuple[str, str]] = ()) -> None:
        """Load the latest version of every model, and `also` what is named and still there; nothing with caching.

        Raises: ModelError for the first latest version that can't be loaded; it names it, and is chained from the
        cause. Of others it is told, and calls that name them try again.
        """
        if self._source.is_cached:
            return
        catalogue = self._catalogue
        for model in catalogue.models:
            self._loads.obtain(model, latest(model), None)
        for name, number in also:
            version = catalogue.find(name, number)
            if version is not None:
                self._note_asked(name, version)
                with contextlib.suppress(ModelError):
                    self._loads.obtain(catalogue.by_name[name], version, None)

    def get(self, name: str | None = None, version: str = LATEST) -> T:
        """Return a model, loaded if need be, which blocks this thread. Raises: ModelError, which names what exists."""
        if self._has_one_model:
            name = None  # whatever was said means it, and may be made up by those who send requests
        keys, holder = self._keys, current() if self._source.is_cached else None
        try:
            key = keys[name, version]
        except (KeyError, TypeError):  # not asked for yet, or not hashable
            pass
        else:
            with self._shelf.changed:
                entry = self._shelf.find(key, holder)
                if entry is not None:
                    return entry.value
        catalogue = self._catalogue
        model, found = self.find(name, version)
        if version != LATEST and not self._source.is_cached:
            self._note_asked(model.name, found)
        value = self._loads.obtain(model, found, holder)
        if catalogue is not self._catalogue:
            self._settle()
        keys[name, version] = (model.name, found.number)
        return value

    def find(self, name: str | None = None, version: str = LATEST) -> tuple[Model, Version]:
        """Return what `get` would, without loading it. Raises: ModelError as `get` does."""
        model, found = find(self._source, self._catalogue, name, version)
        if version == LATEST and self._stand_ins:
            with self._shelf.changed:
                entry = self._shelf.entries.get((model.name, self._stand_ins.get(model.name, "")))
                if entry is not None:
                    return model, entry.version
        return model, found

    def update(self, catalogue: Catalogue) -> None:
        """Take a newer state of the source; returns at once, what is to be loaded is loaded in the background.

        What is loaded is served until what replaces it is loaded. Without caching nothing is replaced: versions that
        are gone are dropped, others stay as they were loaded.
        """
        with self._shelf.changed:
            self._catalogue, before = catalogue, self._catalogue
            if self._source.is_cached:
                self._stand_in(before)
            self._loads.forget_all_but(catalogue.versions())
        self._settle()

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return each model's versions, when each was changed (UNIX time, seconds), and which are loaded."""
        with self._shelf.changed:
            loaded = set(self._shelf.entries)
        return {
            model.name: {
                "versions": [version.number for version in model.versions],
                "timestamps": [int(version.modified_at) for version in model.versions],
                "loaded": [version.number for version in model.versions if (model.name, version.number) in loaded],
            }
            for model in self._catalogue.models
        }

    def close(self) -> None:
        """Unload everything; nothing may be asked for any more."""
        self._renewals.close()
        with self._shelf.changed:
            entries = self._shelf.all
            for entry in entries:
                self._shelf.remove(entry)
        for entry in entries:
            self._loader.unload(entry.value)

    def _note_asked(self, name: str, version: Version) -> None:
        if (name, version.number) not in self._asked:
            self._asked.add((name, version.number))
            self._events.asked(name, version)

    def _stand_in(self, before: Catalogue) -> None:
        """Let what has been served as latest be served as such until the new latest is loaded."""
        for name, model in before.by_name.items():
            served = self._stand_ins.get(name, latest(model).number)
            now = self._catalogue.by_name.get(name)
            is_replaced = now is not None and latest(now).number != served
            if is_replaced and (name, served) in self._shelf.entries:
                self._stand_ins[name] = served
            else:
                self._stand_ins.pop(name, None)

    def _newer(self, name: str) -> list[tuple[Model, Version]]:
        """List what should be loaded in place of what is."""
        model = self._catalogue.by_name.get(name)
        if model is None:
            return []
        newer = []
        for version in model.versions:
            entry = self._shelf.entries.get((name, version.number))
            is_other = entry is not None and entry.version.digest != version.digest
            if is_other or (entry is None and name in self._stand_ins and version is latest(model)):
                newer.append((model, version))
        return newer

    def _renew(self, name: str) -> float | None:
        """Load what is newer than what is loaded, in the background; returns when to try again, if it failed."""
        with self._shelf.changed:
            newer = self._newer(name)
            stand_in = self._shelf.entries.get((name, self._stand_ins.get(name, "")))
        retry_at = None
        for model, version in newer:
            failed_at = self._loads.renew(model, version, stand_in)
            retry_at = failed_at if retry_at is None else retry_at
        if retry_at is None:
            with self._shelf.changed:
                if not self._newer(name):
                    self._stand_ins.pop(name, None)
            self._settle()
        return retry_at

    def _settle(self) -> None:
        """Let go of what is loaded and no longer to be served, and have loaded what is newer."""
        with self._shelf.changed:
            catalogue = self._catalogue
            gone = [
                key
                for key in self._shelf.entries
                if catalogue.find(*key) is None and self._stand_ins.get(key[0]) != key[1]
            ]
            for key in gone:
                self._shelf.retire(key)
            if self._shelf.leaving:
                self._renewals.wake()
            for name in {entry.model for entry in self._shelf.entries.values()} if self._source.is_cached else ():
                if self._newer(name):
                    self._renewals.add(name)
            self._keys = {}
        if gone:
            self._loads.tell_loaded()
