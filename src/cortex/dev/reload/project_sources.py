"""What the process of an API uses of a project: the modules that it has loaded, with their sources, and other files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from cortex.dev.reload.hot_swap import ModuleSource, swap
from cortex.dev.reload.source_changes import NewProcess, decide


class ProjectSources:
    """The modules of a project that this process has loaded, with the sources that they run; and its other files.

    `update` and `swap` are for one thread at a time.
    """

    def __init__(self, folder: str) -> None:
        self._prefix = folder.rstrip("/") + "/"
        self._sources: dict[str, bytes] = {}  #: by path relative to the project
        self._executed: dict[str, bytes] = {}  #: likewise, of modules that have run since the last `update`
        self._data: set[str] = set()
        self._written: set[str] = set()
        self._count = 0
        self._is_recording = False
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the files of the project that are read, such as models; not those that are written as well.

        Otherwise each start of a process that writes such a file would be a reason for the next.
        """
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def update(self) -> bool:
        """Add the modules that were loaded since the last call; return whether there are any."""
        if len(sys.modules) == self._count:
            return False
        self._count = len(sys.modules)
        new = self._modules().keys() - self._sources.keys()
        for path in new:
            self._sources[path] = self._executed[path] if path in self._executed else self._read(path)
        self._executed.clear()
        return bool(new)

    def describe(self) -> dict[str, list[str]]:
        """Return the paths of all modules, and of all other files that were read while they were recorded."""
        return {"modules": sorted(self._sources), "data": sorted(self._data - self._written - self._sources.keys())}

    def swap(self, class_name: str | None) -> tuple[list[str], bool] | NewProcess:
        """Replace the functions that have changed on disk; return their names, and whether a signature changed.

        `class_name` is that of the API. Raises: SwapError, SyntaxError, OSError; what annotations and imports raise.
        """
        self.update()
        try:
            new = {path: self._read(path) for path in self._sources}
        except FileNotFoundError as error:
            return NewProcess(f"{error.filename.removeprefix(self._prefix)} was removed")
        changes = decide(self._sources, new, class_name)
        if isinstance(changes, NewProcess):
            return changes
        modules = self._modules()
        sources = {
            path: ModuleSource(modules[path], str(modules[path].__file__), self._sources[path], new[path])
            for path in changes
        }
        swap(sources, changes)
        self._sources = new
        names = [name for change in changes.values() for name in change.names]
        return names, any(change.changes_signatures for change in changes.values())

    def _read(self, path: str) -> bytes:
        return Path(self._prefix + path).read_bytes()

    def _modules(self) -> dict[str, ModuleType]:
        found: dict[str, ModuleType] = {}
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.startswith(self._prefix) and self._is_own(file):
                found[file.removeprefix(self._prefix)] = module
        return found

    def _is_own(self, file: str) -> bool:
        """Return whether a file is source code of the user, and not of an environment inside of the project."""
        return file.endswith(".py") and "/site-packages/" not in file

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec":
            self._record_source(arguments[0])
        elif event == "open" and self._is_recording and isinstance(arguments[0], str | bytes):
            self._record_data(arguments)

    def _record_source(self, code: CodeType) -> None:
        """Keep the source of a module that begins to run: its file may change while it loads a model."""
        file = code.co_filename
        if code.co_name != "<module>" or not file.startswith(self._prefix) or not self._is_own(file):
            return
        path = file.removeprefix(self._prefix)
        if path not in self._sources:
            with contextlib.suppress(OSError):
                self._executed[path] = self._read(path)

    def _record_data(self, arguments: tuple[Any, ...]) -> None:
        path, mode = os.path.abspath(os.fsdecode(arguments[0])), arguments[1]  # noqa: PTH100 - no symbolic links
        is_read = not isinstance(mode, str) or not set(mode) & set("wax+")
        if path.startswith(self._prefix) and not path.endswith((".py", ".pyc")):
            (self._data if is_read else self._written).add(path.removeprefix(self._prefix))
