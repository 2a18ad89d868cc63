"""Model sources and catalogues: plain data that crosses processes as JSON.

A `ModelSource` describes where the models of an API come from. The model agent lists it and publishes a `Catalogue`,
the confirmed models and versions, which replicas load. Nothing here does I/O. The field names are JSON keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import orjson

from cortex.processes.codec import decode, newer

#: The name of the one model of `path`.
DEFAULT_MODEL = "_cortex_default"
#: The version that means the highest one.
LATEST = "latest"

#: Metadata of a dataclass field that may hold a path below a home; `map_paths` translates it for nodes.
HOME_PATH = {"is_home_path": True}

#: The layout of a model folder; "neuron" is a SavedModel compiled for Inferentia.
Layout = Literal["python", "tensorflow", "neuron", "onnx"]


@dataclass(frozen=True)
class ModelPath:
    """One model: its folder, or, for ONNX, its file."""

    name: str
    url: str = field(metadata=HOME_PATH)  #: s3://, gs:// or an absolute local path
    signature_key: str | None = None  #: TensorFlow: the signature to run; None: the model's default


@dataclass(frozen=True)
class Pin:
    """The version that counts as the latest one of a model."""

    model: str
    number: str
    digest: str
    size_bytes: int
    modified_at: float


@dataclass(frozen=True)
class ModelSource:
    """The location of an API's models and the limits of its caches; exactly one of `paths` and `dir` is set."""

    layout: Layout
    paths: tuple[ModelPath, ...] = ()  #: for `path`: one, named DEFAULT_MODEL
    dir: str | None = field(default=None, metadata=HOME_PATH)  #: a folder whose direct subfolders are models
    signature_key: str | None = None  #: for models of `dir`
    poll_interval_s: float = 10.0
    is_live: bool = True  #: False: listed only once
    cache_size: int | None = None  #: model versions in the memory of one process
    disk_cache_size: int | None = None  #: model versions of this API on this machine's disk
    cache_memory_bytes: int | None = None  #: memory budget of models in one process
    pins: tuple[Pin, ...] = newer(())  #: of models whose latest version is not the highest one of the source

    @property
    def is_cached(self) -> bool:
        """Return whether models are loaded on first use and evicted to stay within a limit."""
        return self.cache_size is not None or self.cache_memory_bytes is not None

    @property
    def form(self) -> Literal["path", "paths", "dir"]:
        """Return which of the three fields the user configured."""
        if self.dir is not None:
            return "dir"
        return "path" if self.paths and self.paths[0].name == DEFAULT_MODEL else "paths"


@dataclass(frozen=True)
class Version:
    """One complete version of a model."""

    number: str  #: the folder's name, an integer; "1" where the model has no versions
    digest: str  #: hash of the names, sizes and ETags of its files; identifies the content
    size_bytes: int
    modified_at: float  #: of the newest file; UNIX time, seconds
    path: str | None = None  #: the folder with its files on this machine; None if not downloaded
    url: str = ""  #: the location of its files in the source

    @property
    def order(self) -> int:
        """Return the sort key of versions."""
        return int(self.number)


@dataclass(frozen=True)
class Model:
    """One model and its versions in ascending order; at least one."""

    name: str
    versions: tuple[Version, ...]
    signature_key: str | None = None
    pinned: str | None = None  #: number of the version that counts as the latest; None: the highest

    @property
    def latest(self) -> Version:
        """Return the pinned version, or else the highest."""
        if self.pinned is not None:
            for version in self.versions:
                if version.number == self.pinned:
                    return version
        return self.versions[-1]


@dataclass(frozen=True)
class ModelProblem:
    """The reason why a model or version in the source is not served."""

    model: str
    version: str | None  #: None: the whole model
    message: str  #: one line
    since: float  #: UNIX time, seconds
    detail: str = ""  #: more lines: the user's traceback, a listing


@dataclass(frozen=True)
class Catalogue:
    """All models of an API at one point in time."""

    models: tuple[Model, ...]  #: sorted by name
    problems: tuple[ModelProblem, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, Model]:
        """Return the models by name."""
        return {model.name: model for model in self.models}

    def versions(self) -> Iterator[tuple[Model, Version]]:
        """Iterate over all versions of all models."""
        return ((model, version) for model in self.models for version in model.versions)

    def find(self, name: str, number: str) -> Version | None:
        """Return one version of a model, None if it does not exist; LATEST is that which counts as the latest."""
        model = self.by_name.get(name)
        if model is None:
            return None
        if number == LATEST:
            return model.latest
        return next((version for version in model.versions if version.number == number), None)

    def to_json(self) -> bytes:
        """Return one JSON object, which `from_json` reads."""
        return orjson.dumps({"models": self.models, "problems": self.problems})

    @classmethod
    def from_json(cls, data: bytes) -> Catalogue:
        """Read the result of `to_json`. Raises: ValueError for anything else."""
        return decode(cls, orjson.loads(data))
