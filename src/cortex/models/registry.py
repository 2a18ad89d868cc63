"""The models of one worker process: resolve the version that a call asks for, load it, and follow updates.

Without caching, the latest version of each model is loaded before the process serves, and stays loaded. With caching,
versions are loaded on first use and evicted within limits; newer versions of loaded models are loaded beside the old
ones in the background and then replace them. This module has no notion of user code, HTTP or storage.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic

from cortex.errors import ModelError
from cortex.models.loaded_models import LoadedModels, T, VersionKey, current_call
from cortex.models.loader import LoadCoordinator, LoadEvents, ModelFetcher, ModelLoader, display_name
from cortex.models.spec import DEFAULT_MODEL, LATEST, Catalogue, Model, ModelSource, Version

#: A call waits this long for room in the cache.
ROOM_TIMEOUT_S = 60.0
#: Interval at which retired versions are checked for use; it doubles up to the maximum.
_FIRST_CHECK_S, _MAX_CHECK_S = 0.1, 5.0
_MAX_LISTED_NAMES = 50
_MAX_QUOTED_CHARACTERS = 100


class Registry(Generic[T]):
    """Provides models to calls. Thread-safe."""

    def __init__(
        self,
        source: ModelSource,
        catalogue: Catalogue,
        loader: ModelLoader[T],
        fetcher: ModelFetcher,
        events: LoadEvents,
        room_timeout_s: float = ROOM_TIMEOUT_S,
    ) -> None:
        self._source = source
        self._has_one_model = source.form == "path"
        self._catalogue = catalogue
        self._loader = loader
        self._events = events
        self._requested: set[VersionKey] = set()
        self._loaded: LoadedModels[T] = LoadedModels()
        self._loads = LoadCoordinator(source, self._loaded, loader, fetcher, events, room_timeout_s)
        self._updates = _BackgroundUpdates(self._loaded.changed, self._load_newer, self._loads.unload_retired)
        # By model: the version that is served as the latest until the real latest one is loaded.
        self._stand_ins: dict[str, str] = {}
        # Resolved arguments of `get`. It is replaced, never cleared: a concurrent `get` then writes to the old one.
        self._keys: dict[tuple[Any, Any], VersionKey] = {}

    @property
    def models(self) -> Mapping[str, Model]:
        """Return the models that exist, by name."""
        return self._catalogue.by_name

    def load_latest(self, extra_versions: Sequence[tuple[str, str]] = ()) -> None:
        """Load the latest version of every model, and `extra_versions` that still exist; with caching, do nothing.

        Raises: ModelError for the first latest version that can't be loaded. A failure of an extra version is only
        reported; calls that request it retry.
        """
        if self._source.is_cached:
            return
        catalogue = self._catalogue
        for model in catalogue.models:
            self._loads.load(model, model.latest, None)
        for name, number in extra_versions:
            version = catalogue.find(name, number)
            if version is not None:
                self._note_requested(name, version)
                with contextlib.suppress(ModelError):
                    self._loads.load(catalogue.by_name[name], version, None)

    def get(self, name: str | None = None, version: str = LATEST) -> T:
        """Return a model and load it if necessary, which blocks this thread.

        Raises: ModelError, which lists the models or versions that exist.
        """
        if self._has_one_model:
            name = None  # any name means the one model; names may come from requests, so they must not fill `_keys`
        keys, handle = self._keys, current_call() if self._source.is_cached else None
        try:
            key = keys[name, version]
        except (KeyError, TypeError):  # not resolved yet, or not hashable
            pass
        else:
            with self._loaded.changed:
                entry = self._loaded.find(key, handle)
                if entry is not None:
                    return entry.value
        catalogue = self._catalogue
        model, found = self.find(name, version)
        if version != LATEST and not self._source.is_cached:
            self._note_requested(model.name, found)
        value = self._loads.load(model, found, handle)
        if catalogue is not self._catalogue:
            self._apply_catalogue()
        keys[name, version] = (model.name, found.number)
        return value

    def find(self, name: str | None = None, version: str = LATEST) -> tuple[Model, Version]:
        """Return the model and version that `get` would return, without loading it. Raises: ModelError."""
        model, found = resolve_version(self._source, self._catalogue, name, version)
        if version == LATEST and self._stand_ins:
            with self._loaded.changed:
                entry = self._loaded.entries.get((model.name, self._stand_ins.get(model.name, "")))
                if entry is not None:
                    return model, entry.version
        return model, found

    def update(self, catalogue: Catalogue) -> None:
        """Switch to a new catalogue. Returns at once; a background thread loads newer versions.

        Loaded versions are served until their replacements are loaded. Without caching nothing is replaced: removed
        versions are dropped, others stay as they were loaded.
        """
        with self._loaded.changed:
            self._catalogue, before = catalogue, self._catalogue
            if self._source.is_cached:
                self._choose_stand_ins(before)
            self._loads.keep_only(catalogue.versions())
        self._apply_catalogue()

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return for each model its versions, their modification times (UNIX, seconds), and the loaded ones."""
        with self._loaded.changed:
            loaded = set(self._loaded.entries)
        return {
            model.name: {
                "versions": [version.number for version in model.versions],
                "timestamps": [int(version.modified_at) for version in model.versions],
                "loaded": [version.number for version in model.versions if (model.name, version.number) in loaded],
            }
            for model in self._catalogue.models
        }

    def close(self) -> None:
        """Unload everything. The registry can't be used afterwards."""
        self._updates.close()
        with self._loaded.changed:
            entries = self._loaded.all
            for entry in entries:
                self._loaded.remove(entry)
        for entry in entries:
            self._loader.unload(entry.value)

    def _note_requested(self, name: str, version: Version) -> None:
        if (name, version.number) not in self._requested:
            self._requested.add((name, version.number))
            self._events.requested(name, version)

    def _choose_stand_ins(self, before: Catalogue) -> None:
        """Keep serving the previous latest version as the latest until the new one is loaded."""
        for name, model in before.by_name.items():
            served = self._stand_ins.get(name, model.latest.number)
            now = self._catalogue.by_name.get(name)
            is_replaced = now is not None and now.latest.number != served
            if is_replaced and (name, served) in self._loaded.entries:
                self._stand_ins[name] = served
            else:
                self._stand_ins.pop(name, None)

    def _newer(self, name: str) -> list[tuple[Model, Version]]:
        """Return the versions to load in place of loaded ones."""
        model = self._catalogue.by_name.get(name)
        if model is None:
            return []
        newer = []
        for version in model.versions:
            entry = self._loaded.entries.get((name, version.number))
            has_changed = entry is not None and entry.version.digest != version.digest
            if has_changed or (entry is None and name in self._stand_ins and version is model.latest):
                newer.append((model, version))
        return newer

    def _load_newer(self, name: str) -> float | None:
        """Load the newer versions of a model in the background; if one fails, return when to retry (monotonic)."""
        with self._loaded.changed:
            newer = self._newer(name)
            stand_in = self._loaded.entries.get((name, self._stand_ins.get(name, "")))
        retry_at = None
        for model, version in newer:
            failed_at = self._loads.update(model, version, stand_in)
            retry_at = failed_at if retry_at is None else retry_at
        if retry_at is None:
            with self._loaded.changed:
                if not self._newer(name):
                    self._stand_ins.pop(name, None)
            self._apply_catalogue()
        return retry_at

    def _apply_catalogue(self) -> None:
        """Retire loaded versions that the catalogue no longer has, and schedule the load of newer ones."""
        with self._loaded.changed:
            catalogue = self._catalogue
            gone = [
                key
                for key in self._loaded.entries
                if catalogue.find(*key) is None and self._stand_ins.get(key[0]) != key[1]
            ]
            for key in gone:
                self._loaded.retire(key)
            if self._loaded.retired:
                self._updates.unload_soon()
            for name in {entry.model for entry in self._loaded.entries.values()} if self._source.is_cached else ():
                if self._newer(name):
                    self._updates.load_soon(name)
            self._keys = {}
        if gone:
            self._loads.publish_loaded()


class _BackgroundUpdates:
    """A thread that loads newer versions and unloads retired ones; it runs only while there is work.

    `load_newer` loads the newer versions of a model and returns when to retry (monotonic, seconds), or None;
    `unload_retired` returns True if retired versions are still in use. `changed` guards the state.
    """

    def __init__(
        self,
        changed: threading.Condition,
        load_newer: Callable[[str], float | None],
        unload_retired: Callable[[], bool],
    ) -> None:
        self._changed = changed
        self._load_newer = load_newer
        self._unload_retired = unload_retired
        self._due: dict[str, float] = {}  #: by model: when to load newer versions
        self._unload_at: float | None = None
        self._unload_interval_s = _FIRST_CHECK_S
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def load_soon(self, name: str) -> None:
        """Load the newer versions of a model now; the caller holds `changed`."""
        self._due[name] = 0.0
        self._start()

    def unload_soon(self) -> None:
        """Unload retired versions now; the caller holds `changed`."""
        self._unload_at, self._unload_interval_s = 0.0, _FIRST_CHECK_S
        self._start()

    def close(self) -> None:
        """Start no further work, and wait for the work in progress."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="cortex-model-updates", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while (name := self._next()) is not None:
            retry_at = self._load_newer(name) if name else None
            is_in_use = self._unload_retired()
            with self._changed:
                if retry_at is not None:
                    self._due.setdefault(name, retry_at)
                self._unload_at = time.monotonic() + self._unload_interval_s if is_in_use else None
                self._unload_interval_s = min(self._unload_interval_s * 2, _MAX_CHECK_S)

    def _next(self) -> str | None:
        """Wait for work: return a model to update, "" if there are only versions to unload, None to end."""
        with self._changed:
            while not self._is_closed and (self._due or self._unload_at is not None):
                now = time.monotonic()
                due = [name for name, at in self._due.items() if at <= now]
                if due:
                    del self._due[due[0]]
                    return due[0]
                if self._unload_at is not None and self._unload_at <= now:
                    return ""
                times = [*self._due.values(), *([] if self._unload_at is None else [self._unload_at])]
                self._changed.wait(min(times) - now)
            self._thread = None
            return None


# Resolving names and versions.


def resolve_version(source: ModelSource, catalogue: Catalogue, name: object, version: object) -> tuple[Model, Version]:
    """Return the requested model and version; with `path`, any name means its one model.

    Raises: ModelError, which lists the models or versions that exist.
    """
    number = check_version(version)
    model = _find_model(source, catalogue, name)
    if number == LATEST:
        return model, model.latest
    for each in model.versions:
        if each.number == number:
            return model, each
    exist = format_names(each.number for each in model.versions)
    label = display_name(source, model.name)
    message = f"model {label} of version {number} wasn't found; available versions: {exist}"
    raise ModelError(message + _reason(catalogue, model.name, number))


def check_version(version: object) -> str:
    """Return the version if it is "latest" or an integer written as a string. Raises: ModelError."""
    if not isinstance(version, str):
        write = f'"{version}"' if isinstance(version, int) and not isinstance(version, bool) else '"1" or "latest"'
        raise ModelError(f"model_version must be str, not {type(version).__name__}; write {write}")
    if version != LATEST and not _is_integer(version):
        given = repr(version[:_MAX_QUOTED_CHARACTERS])
        raise ModelError(f"model_version must be either a parse-able numeric value or 'latest', not {given}")
    return version


def format_names(names: Iterable[str]) -> str:
    """Return names as a list, truncated if there are very many."""
    every = list(names)
    listed = ", ".join(repr(name) for name in every[:_MAX_LISTED_NAMES])
    more = f" and {len(every) - _MAX_LISTED_NAMES} more" if len(every) > _MAX_LISTED_NAMES else ""
    return f"[{listed}]{more}"


def _find_model(source: ModelSource, catalogue: Catalogue, name: object) -> Model:
    if source.form == "path":
        name = DEFAULT_MODEL
    elif name is None:
        raise ModelError(f"model_name was not specified, choose one of the following: {_available(source, catalogue)}")
    elif not isinstance(name, str):
        write = format_names(model.name for model in catalogue.models)
        raise ModelError(f"model_name must be str, not {type(name).__name__}; choose one of the following: {write}")
    model = catalogue.by_name.get(name)
    if model is not None and model.versions:
        return model
    if model is not None or any(path.name == name for path in source.paths):
        label = display_name(source, name)
        message = f"'{label}' model's versions have been removed; add at least a version to serve it"
    else:
        quoted = repr(name[:_MAX_QUOTED_CHARACTERS])
        message = f"{quoted} model wasn't found in the list of available models: {_available(source, catalogue)}"
    raise ModelError(message + _reason(catalogue, name, None))


def _available(source: ModelSource, catalogue: Catalogue) -> str:
    names = [path.name for path in source.paths] or [model.name for model in catalogue.models]
    return format_names(sorted(names))


def _reason(catalogue: Catalogue, name: str, number: str | None) -> str:
    """Return the known problem of a model or version as the end of a message."""
    for problem in catalogue.problems:
        if problem.model == name and (number is None or problem.version in (None, number)):
            return f"; its files can't be served: {problem.message}"
    return ""


def _is_integer(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True
