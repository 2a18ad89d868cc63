"""What a broken rule is, and how one says that a project lacks a file."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cortex.config.project import ProjectFiles
from cortex.config.values import nearest, quote


class Violation(NamedTuple):
    """A broken rule. It points at the first of `places` that the user wrote, and needs all of them to be right.

    In the message `{got}` stands for what the user wrote there, and `{handler.path}` for the key of that place.
    """

    places: tuple[str, ...]
    message: str
    fix: str = ""


def is_folder(path: Path) -> bool:
    """Tell whether there is such a folder; no is the answer too for a name that no file can have."""
    return os.path.isdir(path)  # noqa: PTH112 - the method raises where a name is too long


def is_file(path: Path) -> bool:
    """Tell whether there is such a file, as `is_folder`."""
    return os.path.isfile(path)  # noqa: PTH113


def absent(file: str, project: ProjectFiles, suffixes: tuple[str, ...] = ()) -> tuple[str, str]:
    """Say how a file is missing, and which one may be meant: a message and a fix."""
    if is_folder(project.root / file):
        return f"{quote(file)}: is a folder, not a file", closest_file(file, project, suffixes)
    if is_file(project.root / file):
        return f"{quote(file)}: has been excluded from your project directory", "see .cortexignore, or rename the file"
    return f"{quote(file)}: file does not exist", closest_file(file, project, suffixes)


def closest_file(file: str, project: ProjectFiles, suffixes: tuple[str, ...]) -> str:
    """Say which file of a project is probably meant."""
    candidates = [name for name in project.files if not suffixes or name.endswith(suffixes)]
    same_name = [name for name in candidates if PurePosixPath(name).name == PurePosixPath(file).name]
    inside = [name for name in candidates if suffixes and name.startswith(f"{file}/")]
    found = (same_name or inside or [""])[0] or nearest(file, candidates)
    if found is None and len(candidates) == 1 and suffixes:
        found = candidates[0]
    return f"did you mean {quote(found)}?" if found else "create it, or correct the path"
