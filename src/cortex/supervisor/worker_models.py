"""What one worker process has of its API's models, and what it is to know of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cortex.models.spec import Catalogue, ModelProblem
from cortex.replica.channel import Channel
from cortex.replica.models import ModelStart
from cortex.supervisor.model_plan import Loaded, also_loaded


@dataclass
class WorkerModels:
    """Filled by the process's messages; `catalogue` is set by the supervisor."""

    catalogue: Catalogue | None = None  #: what the process is started with, and told once it changes
    also: tuple[tuple[str, str], ...] = ()  #: versions to load at the start beside the latest: (model, number)
    file: Path | None = None  #: holds `catalogue`, for a process that runs already
    loaded: frozenset[Loaded] = frozenset()
    asked: frozenset[tuple[str, str]] = frozenset()  #: (model, number) that calls have named
    loading: Loaded | None = None  #: if the process dies now, this is why
    problems: dict[Loaded, ModelProblem] = field(default_factory=dict)  #: what it could not load while it served
    _told: Catalogue | None = None

    def on_start(self) -> None:
        """Forget the process before: a new one starts with `catalogue`, and with the versions that one had loaded."""
        if self.asked and self.catalogue is not None:
            self.also = also_loaded(self.asked, self.catalogue)
        self.loaded = frozenset()
        self.loading = None
        self.problems.clear()
        self._told = self.catalogue

    def start(self, is_standby: bool) -> ModelStart | None:
        """Return what a new process is to load; None for an API without models."""
        return ModelStart(self.catalogue, self.also, is_standby) if self.catalogue is not None else None

    def on_message(self, message: dict[str, Any]) -> None:
        """Take a message about models. Raises: KeyError, TypeError, ValueError if our code did not write it."""
        kind = message["kind"]
        if kind == "loading":
            self.loading = Loaded(message["model"], message["version"], message["digest"])
        elif kind == "asked":
            self.asked = self.asked | {(message["model"], message["version"])}
        elif kind == "loaded":
            added = frozenset(Loaded(*item) for item in message["added"])
            self.loaded = (self.loaded | added) - frozenset(Loaded(*item) for item in message["removed"])
            if self.loading in added:
                self.loading = None
            for version in added:
                self.problems.pop(version, None)
        elif kind == "problem":
            version = Loaded(message["model"], message["version"], message["digest"])
            text, detail = str(message["message"]), str(message["detail"])
            self.problems[version] = ModelProblem(version.model, version.number, text, time.time(), detail)

    def tell(self, channel: Channel) -> None:
        """Tell a serving process of a change in the catalogue."""
        if self._told is self.catalogue or self.file is None:
            return
        if channel.send("catalogue", path=str(self.file)):
            self._told = self.catalogue
            known = {Loaded(m.name, v.number, v.digest) for m, v in self.catalogue.versions()} if self.catalogue else ()
            self.problems = {key: value for key, value in self.problems.items() if key in known}
