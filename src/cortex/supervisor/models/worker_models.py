"""The models of one worker process: loaded versions, versions in use, versions that failed to load."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cortex.models.spec import Catalogue, ModelProblem
from cortex.worker.channel import Channel
from cortex.worker.worker_process import ModelStart


class LoadedVersion(NamedTuple):
    """One version of a model, with the content that is loaded or being loaded."""

    model: str
    number: str
    digest: str


def find_extra_versions(asked: Iterable[tuple[str, str]], target: Catalogue) -> tuple[tuple[str, str], ...]:
    """Return the versions of `target` besides the latest that a new process loads, because calls have named them."""
    return tuple(sorted((model, number) for model, number in asked if target.find(model, number) is not None))


@dataclass
class WorkerModels:
    """Updated by messages of the process; the supervisor sets `catalogue`."""

    catalogue: Catalogue | None = None  #: sent to the process at its start and after each change
    extra_versions: tuple[tuple[str, str], ...] = ()  #: (model, number) to load at the start besides the latest ones
    file: Path | None = None  #: holds `catalogue` for a process that already runs
    loaded: frozenset[LoadedVersion] = frozenset()
    asked: frozenset[tuple[str, str]] = frozenset()  #: (model, number) named by calls
    loading: LoadedVersion | None = None  #: blamed if the process dies now
    #: Versions that a serving process can't load.
    problems: dict[LoadedVersion, ModelProblem] = field(default_factory=dict)
    _sent: Catalogue | None = None

    def on_start(self) -> None:
        """Reset the state for a new process, which starts with `catalogue` and the versions named by calls."""
        if self.asked and self.catalogue is not None:
            self.extra_versions = find_extra_versions(self.asked, self.catalogue)
        self.loaded = frozenset()
        self.loading = None
        self.problems.clear()
        self._sent = self.catalogue

    def start(self, is_standby: bool) -> ModelStart | None:
        """Return the models that a new process loads; None for an API without models."""
        return ModelStart(self.catalogue, self.extra_versions, is_standby) if self.catalogue is not None else None

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message about models. Raises: KeyError, TypeError, ValueError if user code wrote it."""
        kind = message["kind"]
        if kind == "loading":
            self.loading = LoadedVersion(message["model"], message["version"], message["digest"])
        elif kind == "asked":
            self.asked = self.asked | {(message["model"], message["version"])}
        elif kind == "loaded":
            added = frozenset(LoadedVersion(*item) for item in message["added"])
            self.loaded = (self.loaded | added) - frozenset(LoadedVersion(*item) for item in message["removed"])
            if self.loading in added:
                self.loading = None
            for version in added:
                self.problems.pop(version, None)
        elif kind == "problem":
            version = LoadedVersion(message["model"], message["version"], message["digest"])
            text, detail = str(message["message"]), str(message["detail"])
            self.problems[version] = ModelProblem(version.model, version.number, text, time.time(), detail)

    def send_changes(self, channel: Channel) -> None:
        """Send a changed catalogue to a serving process."""
        if self._sent is self.catalogue or self.file is None:
            return
        if channel.send("catalogue", path=str(self.file)):
            self._sent = self.catalogue
            versions = self.catalogue.versions() if self.catalogue else ()
            known = {LoadedVersion(model.name, version.number, version.digest) for model, version in versions}
            self.problems = {key: value for key, value in self.problems.items() if key in known}
