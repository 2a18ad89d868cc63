"""What the registry needs of others: who fetches a model's files, who loads them, who is told of it. Types only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from cortex.models.spec import Version

T = TypeVar("T")
Key = tuple[str, str]  #: a model's name and a version's number


@dataclass(frozen=True)
class LoadRequest:
    """One version of a model, whose files are on this machine, to be loaded."""

    model: str
    version: str
    path: str
    digest: str
    size_bytes: int
    signature_key: str | None


class Loader(Protocol[T]):
    """Turns files into a model in memory, and frees it again."""

    def load(self, request: LoadRequest) -> T:
        """Load one version; may raise anything. One at a time per process, on any thread."""
        ...

    def unload(self, model: T) -> None:
        """Release what is not released by dropping the last reference: native memory, a server's."""
        ...


class Fetcher(Protocol):
    """Brings the files of a version to this machine."""

    def fetch(self, model: str, version: Version) -> Path:
        """Return the folder with the files; it stays until `release`. Blocks. Raises: ModelError."""
        ...

    def release(self, version: Version) -> None:
        """Say that the files are not needed just now."""
        ...


class Events(Protocol):
    """Is told what a registry does, on any thread, in order; must not raise nor call the registry."""

    def loading(self, model: str, version: Version) -> None:
        """Loading starts: if the process dies now, this is why."""
        ...

    def asked(self, model: str, version: Version) -> None:
        """A call named this version by its number, for the first time; only without caching."""
        ...

    def loaded(self, versions: Sequence[tuple[str, Version]]) -> None:
        """Say what is loaded now, all of it, after each change."""
        ...

    def failed(self, model: str, version: Version, message: str, detail: str) -> None:
        """One version could not be fetched or loaded; `detail` holds the user's traceback."""
        ...
