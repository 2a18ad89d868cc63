"""A model store in a local folder for tests of the registry: real files, a real loader, and a fetcher that copies.

`FolderFetcher` implements `ModelFetcher` without a model agent.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from cortex.errors import ModelError
from cortex.models.loader import LoadRequest
from cortex.models.spec import Catalogue, Model, Version


@dataclass
class Store:
    """Versions of models as files, `FOLDER/MODEL/NUMBER/model.pkl`."""

    folder: Path

    def add(self, model: str, number: str = "1", mark: object = None, size_bytes: int = 0) -> None:
        """Write or replace a version; the model is a dict with a mark and some weights."""
        path = self.folder / model / number
        path.mkdir(parents=True, exist_ok=True)
        weights = numpy.ones(size_bytes // 8)
        content = {"name": model, "number": number, "mark": mark, "weights": weights}
        _write(path / "model.pkl", pickle.dumps(content, protocol=5))

    def add_raw(self, model: str, data: bytes, number: str = "1") -> None:
        """Write a version with arbitrary data."""
        path = self.folder / model / number
        path.mkdir(parents=True, exist_ok=True)
        _write(path / "model.pkl", data)

    def remove(self, model: str, number: str | None = None) -> None:
        """Remove a version, or the model with all versions."""
        shutil.rmtree(self.folder / model / number if number else self.folder / model)

    def catalogue(self, has_paths: bool = False) -> Catalogue:
        """Return the catalogue; with `has_paths`, all files are local, as without caching."""
        models = []
        for path in sorted(self.folder.iterdir()):
            folders = sorted(path.iterdir(), key=lambda folder: int(folder.name))
            versions = tuple(_version(folder, has_paths) for folder in folders)
            if versions:
                models.append(Model(path.name, versions))
        return Catalogue(tuple(models))


@dataclass
class FolderFetcher:
    """Copies versions from a store into its own folder."""

    store: Store
    folder: Path
    fetched: Counter[str] = field(default_factory=Counter)
    released: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fetch(self, model: str, version: Version) -> Path:
        with self._lock:
            self.fetched[model] += 1
            target = self.folder / version.digest
            if not target.exists():
                try:
                    shutil.copytree(
                        self.store.folder / model / version.number, target, ignore=shutil.ignore_patterns("part")
                    )
                except OSError as error:
                    raise ModelError(f"model {model}, version {version.number}, can't be fetched: {error}") from error
            return target

    def release(self, version: Version) -> None:
        self.released[version.digest] += 1


@dataclass
class PickleLoader:
    """Loads the files of a store and tracks its live models; `before` runs at the start of each load."""

    before: Callable[[LoadRequest], object] = lambda request: None
    loads: Counter[str] = field(default_factory=Counter)
    live: list[Any] = field(default_factory=list)
    most: int = 0  #: maximum number of models in memory, including the one being loaded
    at_once: int = 0  #: maximum number of concurrent loads
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, request: LoadRequest) -> Any:
        with self._lock:
            self.loads[request.model] += 1
            self._running += 1
            self.at_once = max(self.at_once, self._running)
            self.most = max(self.most, len(self.live) + self._running)
        try:
            self.before(request)
            model = pickle.loads((Path(request.path) / "model.pkl").read_bytes())  # noqa: S301 – ours
        finally:
            with self._lock:
                self._running -= 1
        self.live.append(model)
        return model

    def unload(self, model: Any) -> None:
        self.live[:] = [other for other in self.live if other is not model]

    def is_live(self, model: Any) -> bool:
        return any(other is model for other in self.live)


@dataclass
class RecordedEvents:
    """Records the events of a registry."""

    loading_: list[tuple[str, str]] = field(default_factory=list)
    requested_: list[tuple[str, str]] = field(default_factory=list)
    sets: list[list[tuple[str, str]]] = field(default_factory=list)
    failures: list[tuple[str, str, str, str]] = field(default_factory=list)

    def loading(self, model: str, version: Version) -> None:
        self.loading_.append((model, version.number))

    def requested(self, model: str, version: Version) -> None:
        self.requested_.append((model, version.number))

    def loaded(self, versions: Sequence[tuple[str, Version]]) -> None:
        self.sets.append([(model, version.number) for model, version in versions])

    def failed(self, model: str, version: Version, message: str, detail: str) -> None:
        self.failures.append((model, version.number, message, detail))


def _write(path: Path, data: bytes) -> None:
    part = path.with_name("part")
    part.write_bytes(data)
    part.replace(path)  # atomic, for concurrent copies


def _version(folder: Path, has_paths: bool) -> Version:
    files = list(folder.rglob("*.pkl"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files) + str(folder).encode()).hexdigest()
    size_bytes = sum(path.stat().st_size for path in files)
    modified_at = max(path.stat().st_mtime for path in files)
    return Version(folder.name, digest[:32], size_bytes, modified_at, str(folder) if has_paths else None)
