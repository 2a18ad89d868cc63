"""SavedModels in ZIP archives, the form of 0.8 to 0.11: a version folder at the top, such as `1568244606/`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cortex.errors import InputError, ModelError
from cortex.projects.archive import unpack

_MARK = "saved_model.pb"


def find_archive(path: Path) -> Path | None:
    """Return the ZIP archive at a path, which is the file or a folder with nothing else; None if there is none."""
    files = [path] if path.is_file() else list(path.iterdir()) if path.is_dir() else []
    return files[0] if len(files) == 1 and files[0].suffix == ".zip" else None


def unpack_model(archive: Path) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Unpack an archive; return the folder, which the caller removes, and that of the highest version in it.

    Raises: ModelError if the archive is invalid, too large, or has no SavedModel.
    """
    folder = tempfile.TemporaryDirectory(prefix="cortex-model-")
    try:
        content = Path(folder.name, "content")
        unpack(archive.read_bytes(), content)
        versions = sorted((file.parent for file in content.rglob(_MARK)), key=_order)
        if not versions:
            raise ModelError(f"{archive.name} has no SavedModel: no folder in it has the file {_MARK}")
    except InputError as error:
        folder.cleanup()
        raise ModelError(f"{archive.name} can't be unpacked: {error}") from error
    except BaseException:
        folder.cleanup()
        raise
    return folder, versions[-1]


def _order(folder: Path) -> tuple[int, str]:
    return int(folder.name) if folder.name.isdecimal() else -1, str(folder)
