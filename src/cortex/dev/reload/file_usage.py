"""Which files of a project concern which of its APIs in `cortex dev`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cortex.config.schema import Api
from cortex.dev.dev_api import DevApi
from cortex.dev.local.project import LocalProject
from cortex.projects.archive import IGNORE_NAME


@dataclass(frozen=True)
class FileUsage:
    """The usage of a project's files by the processes of its APIs, as far as it is known.

    A process reports the modules that it has loaded and the files that it read while it was loading. One that has
    not loaded yet, and the program of a command, may use others. Names are relative to the project's folder.
    """

    project: LocalProject
    apis: Sequence[DevApi]

    def watched(self, has_failed: bool) -> set[Path]:
        """Return the files to watch; with their folders after a failure, since a missing module may be added."""
        project = self.project
        paths = {project.config_file, project.folder / IGNORE_NAME}
        paths |= {project.folder / name for name in project.diagnosis.project.files if name.endswith(".py")}
        for each in self.apis:
            paths |= {project.folder / name for name in (*each.modules, *each.data)}
            paths |= {*project.dependency_files(each.api), *project.settings_files(each.api)}
            if each.api.runs_command:  # any file of the project may be a part of its program
                paths |= {project.folder / name for name in project.diagnosis.project.files}
        if has_failed:
            paths |= {path.parent for path in paths if path.parent.is_relative_to(project.folder)}
        return paths

    @property
    def of_environments(self) -> set[Path]:
        """Return the files whose changes may change the environment or the variables of any API."""
        return {path for each in self.apis for path in self.project.environment_files(each.api)}

    def relative(self, path: Path) -> str:
        """Return the name of a file."""
        folder = self.project.folder
        return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)

    def concerned(self, changed: set[Path]) -> dict[DevApi, str]:
        """Return the APIs whose processes may use these files, with the first file of each."""
        names = sorted(map(self.relative, changed))
        first = {each: next((name for name in names if self.may_use(each, name)), "") for each in self.apis}
        return {each: name for each, name in first.items() if name}

    def may_use(self, each: DevApi, name: str) -> bool:
        """Return whether the process of an API may use a file, also one that has not loaded yet."""
        project = self.project
        paths = {project.config_file, project.folder / IGNORE_NAME, *project.dependency_files(each.api)}
        names = {self.relative(path) for path in paths} | each.data | each.modules
        if name in names or self.is_setting(each.api, name):
            return True
        if each.api.runs_command:
            return project.diagnosis.project.contains(name)
        if not name.endswith(".py"):
            return False
        if name == each.api.handler.path:
            return True
        others = [other for other in self.apis if other is not each]
        if each.modules:  # what no other API uses may be a module that it imports since its last start
            return not any(name in other.modules for other in others)
        return not any(name == other.api.handler.path for other in others)

    def is_setting(self, api: Api, name: str) -> bool:
        """Return whether a file is read before or beside the user's code."""
        settings = {self.relative(path) for path in self.project.settings_files(api)}
        return any(name == each or name.startswith(f"{each}/") for each in settings)

    def has_changed(self, each: DevApi, api: Api, changed: set[str], before: LocalProject) -> bool:
        """Return whether changes concern the code of an API, or a start that failed.

        `api` is its new configuration, and `before` the project before the changes.
        """
        if each.is_serving:
            return bool(changed & each.modules)
        files = {*self.project.diagnosis.project.files}
        added_or_removed = files ^ {*before.diagnosis.project.files}
        rest = changed - files if api.runs_command else changed
        return any(name in added_or_removed or self.may_use(each, name) for name in rest)
