"""What an API's models are and which of them there are just now: plain data that crosses processes as JSON.

A `ModelSource` says where models come from. The model agent lists it and answers with a `Catalogue`; replicas load
what the catalogue names. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import orjson

#: The name of the one model of `path`.
DEFAULT_MODEL = "_cortex_default"
#: The version that asks for the highest one.
LATEST = "latest"

#: What a model folder must look like; "neuron" is a SavedModel compiled for Inferentia.
Layout = Literal["python", "tensorflow", "neuron", "onnx"]


@dataclass(frozen=True)
class ModelPath:
    """One model: its folder, or, for ONNX, its file."""

    name: str
    url: str  #: s3://, gs:// or an absolute local path
    signature_key: str | None = None  #: TensorFlow: which signature to run; None leaves the choice to the model


@dataclass(frozen=True)
class ModelSource:
    """Where the models of one API come from, and how many of them may be held; exactly one of `paths` and `dir`."""

    layout: Layout
    paths: tuple[ModelPath, ...] = ()  #: of `path`: one, named DEFAULT_MODEL
    dir: str | None = None  #: a folder whose first-level folders are models
    signature_key: str | None = None  #: for models of `dir`
    poll_interval_s: float = 10.0
    is_live: bool = True  #: False: listed once and never again
    cache_size: int | None = None  #: model versions in the memory of one process
    disk_cache_size: int | None = None  #: model versions of this API on this machine's disk
    cache_memory_bytes: int | None = None  #: bytes that models may take in the memory of one process

    @property
    def is_cached(self) -> bool:
        """Tell whether models are loaded when first asked for, and dropped again to stay within a limit."""
        return self.cache_size is not None or self.cache_memory_bytes is not None

    @property
    def form(self) -> Literal["path", "paths", "dir"]:
        """Tell which of the three the user wrote."""
        if self.dir is not None:
            return "dir"
        return "path" if self.paths and self.paths[0].name == DEFAULT_MODEL else "paths"

    def to_data(self) -> dict[str, Any]:
        """Return plain data; `from_data` is its inverse."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ModelSource:
        """Read what `to_data` returned; unknown keys of a newer version are ignored."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**{**known, "paths": tuple(ModelPath(**path) for path in data["paths"])})


@dataclass(frozen=True)
class Version:
    """One version of a model, complete in its source."""

    number: str  #: the folder's name, an integer; "1" where the model has no versions
    digest: str  #: of names, sizes and ETags of its files: differs if and only if the content does
    size_bytes: int
    modified_at: float  #: of the newest file; UNIX time, seconds
    path: str | None = None  #: the folder with its files on this machine; None: not downloaded
    url: str = ""  #: where its files are in the source

    @property
    def order(self) -> int:
        """Return what versions are compared by."""
        return int(self.number)


@dataclass(frozen=True)
class Model:
    """One model and its versions, in ascending order; there is at least one."""

    name: str
    versions: tuple[Version, ...]
    signature_key: str | None = None

    @property
    def latest(self) -> Version:
        """Return the highest version."""
        return self.versions[-1]


@dataclass(frozen=True)
class Problem:
    """Why something in the source is not served."""

    model: str
    version: str | None  #: None: the model as a whole
    message: str  #: one line
    since: float  #: UNIX time, seconds
    detail: str = ""  #: more lines: the user's traceback, a listing


@dataclass(frozen=True)
class Catalogue:
    """Every model of an API, as one state of its source."""

    models: tuple[Model, ...]  #: sorted by name
    problems: tuple[Problem, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, Model]:
        """Map each model's name to it."""
        return {model.name: model for model in self.models}

    def versions(self) -> Iterator[tuple[Model, Version]]:
        """Go through all versions of all models."""
        return ((model, version) for model in self.models for version in model.versions)

    def find(self, name: str, number: str) -> Version | None:
        """Find one version of a model; LATEST is the highest."""
        model = self.by_name.get(name)
        if model is None:
            return None
        if number == LATEST:
            return model.latest
        return next((version for version in model.versions if version.number == number), None)

    def to_json(self) -> bytes:
        """Return one JSON object; `from_json` is its inverse."""
        return orjson.dumps({"models": self.models, "problems": self.problems})

    @classmethod
    def from_json(cls, data: bytes) -> Catalogue:
        """Read what `to_json` wrote. Raises: ValueError, KeyError, TypeError if it did not."""
        plain = orjson.loads(data)
        return cls(
            tuple(
                Model(item["name"], tuple(Version(**version) for version in item["versions"]), item["signature_key"])
                for item in plain["models"]
            ),
            tuple(Problem(**item) for item in plain["problems"]),
        )
