"""Projects for the tests of the configuration: a folder with a cortex.yaml and the files that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cortex.config.project import ProjectFiles
from cortex.config.schema import Api
from cortex.config.validate import CheckedFile, check_file

FILES = ("predictor.py", "handler.py", "requirements.txt", "conda-packages.txt", "dependencies.sh", "src/model.py")


def examine_text(
    folder: Path, text: str, deployed: Sequence[Api] = (), files: Mapping[str, str] | Sequence[str] = FILES
) -> CheckedFile:
    """Write a project and read its configuration."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    config = folder / "cortex.yaml"
    config.write_text(text)
    return check_file(config, "cortex.yaml", ProjectFiles.scan(folder, "cortex.yaml"), deployed)


def lines_of(reading: CheckedFile) -> list[str]:
    """Return the problems without their fixes."""
    return [f"{p.line}:{p.column}: {p.path}: {p.message}" for p in reading.problems]
