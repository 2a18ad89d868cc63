"""Pack a project and its configuration file into the archive that a deploy uploads."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex.errors import InputError, format_size
from cortex.projects.project import ProjectFiles, pack
from cortex.spelling import nearest

DEFAULT_CONFIG = "cortex.yaml"
#: The command line asks for confirmation before it uploads files of this size or number.
BIG_BYTES = 10 * 1024 * 1024
MANY_FILES = 1000


@dataclass(frozen=True)
class Package:
    """Packed project."""

    config_name: str  #: path of the configuration file inside the archive
    archive: bytes
    warnings: tuple[str, ...]  #: reasons why the project is unusually large


def find_config(path: Path) -> Path:
    """Return the configuration file at `path`, which is the file or its folder. Raises: InputError."""
    file = path / DEFAULT_CONFIG if path.is_dir() else path
    fix = "give the path of a configuration file or of its folder"
    if not file.is_file():
        if os.path.lexists(file):  # a pipe, a device, a broken link
            raise InputError(f"{file}: is not a file; {fix}")
        raise InputError(f"{file}: does not exist; {_similar(file) or fix}")
    if file.suffix == ".py":  # a typical mistake, for which a YAML error would be misleading
        raise InputError(f"{file}: is a Python file, not a configuration file; {fix}")
    return file


def _similar(file: Path) -> str:
    """Return a suggestion for a file that does not exist; "" if there is none."""
    beside = [each.name for each in file.parent.iterdir()] if file.parent.is_dir() else []
    if guess := nearest(file.name, beside):
        return f"did you mean {file.with_name(guess)}?"
    if file.name == DEFAULT_CONFIG:
        return "give the path of a configuration file or of its folder; `cortex init` writes one"
    return ""


def read_config(config_file: Path) -> bytes:
    """Return the content of a configuration file. Raises: InputError."""
    try:
        return config_file.read_bytes()
    except OSError as error:
        raise InputError(f"{config_file}: can't be read: {error.strerror}") from None


def pack_file(config_file: Path) -> Package:
    """Pack a configuration file and the folder that contains it. Raises: InputError, ConfigError."""
    content = read_config(config_file)
    return _pack(ProjectFiles.scan(config_file.parent, config_file.name), config_file.name, content)


def pack_specs(api_specs: Sequence[Mapping[str, Any]], project_dir: Path) -> Package:
    """Pack a folder with API specifications as its `cortex.yaml`. Raises: InputError, ConfigError."""
    content = dump_specs(api_specs).encode()
    return _pack(ProjectFiles.scan(project_dir, DEFAULT_CONFIG), DEFAULT_CONFIG, content)


def dump_specs(api_specs: Sequence[Mapping[str, Any]]) -> str:
    """Return API specifications as YAML. Raises: ValueError."""
    import yaml  # noqa: PLC0415 - `cortex deploy` does not need it, and the import takes a tenth of its time

    try:
        return yaml.safe_dump([dict(spec) for spec in api_specs], sort_keys=False)
    except yaml.YAMLError as error:
        raise ValueError(f"`api_spec` contains a value that can't be written as YAML: {error}") from None


def _pack(project: ProjectFiles, config_name: str, content: bytes) -> Package:
    buffer = io.BytesIO(pack(project))
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(config_name, content)
    data = buffer.getvalue()
    return Package(config_name, data, tuple(_warnings(project, len(data))))


def _warnings(project: ProjectFiles, archive_bytes: int) -> list[str]:
    sizes = {name: (project.root / name).stat().st_size for name in project.files}
    found = [f"{name} is {format_size(size)}" for name, size in sizes.items() if size >= BIG_BYTES]
    if archive_bytes >= BIG_BYTES:
        found.append(f"the packed project is {format_size(archive_bytes)}")
    if len(project.files) >= MANY_FILES:
        found.append(f"the project has {len(project.files):,} files")
    return found
