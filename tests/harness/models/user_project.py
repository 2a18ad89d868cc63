"""A project folder with a user's file, loaded like in a replica, and unloaded afterwards."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cortex.models.loader import LoadEvents
from cortex.models.spec import Catalogue, ModelSource
from cortex.predictor.loader import BoundPredictor, load


@dataclass(frozen=True)
class Spec:
    """The fields of a ReplicaSpec that the loader reads."""

    project_dir: str
    interface: str = "predictor"
    path: str = "predictor.py"
    python_path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    api_spec: dict[str, Any] = field(default_factory=dict)
    model_path: str | None = None
    type: str = "python"
    models: ModelSource | None = None
    tensorflow_serving: str | None = None
    app: str | None = None
    protobuf_path: str | None = None
    threads: int = 1
    gpu_ids: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ("unused",)
    kind: str = "RealtimeAPI"
    max_batch_size: int = 0
    isolates_failures: bool = True
    pin_processes: bool = False
    api: str = "iris"
    trusts_pickle: bool = False


class UserProject:
    """A user's files; `load` imports one of them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> Path:
        """Write a file, without the indentation of the test."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def load(
        self,
        interface: str,
        text: str | None = None,
        path: str = "predictor.py",
        *,
        catalogue: Catalogue | None = None,
        events: LoadEvents | None = None,
        extra_versions: Sequence[tuple[str, str]] = (),
        **fields: Any,
    ) -> BoundPredictor:
        """Write `text`, if any, to `path`, and load it."""
        if text is not None:
            self.write(path, text)
        return load(
            Spec(str(self.root), interface, path, **fields), catalogue, events=events, extra_versions=extra_versions
        )


@contextmanager
def user_project(root: Path) -> Iterator[UserProject]:
    """Run inside the project; its changes to this interpreter are undone."""
    cwd, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    os.chdir(root)
    try:
        yield UserProject(root)
    finally:
        os.chdir(cwd)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            module_file = getattr(sys.modules[name], "__file__", None) or ""
            if module_file.startswith(str(root)) or str(root) in str(getattr(sys.modules[name], "__path__", "")):
                del sys.modules[name]
