"""Detect the format of a model by the content of its files. Nothing is loaded or executed, and little is read.

    path ──┬─ folder ──┬─ MLmodel ───────────── MLflow
           │           ├─ saved_model.pb ────── SavedModel
           │           ├─ 1/, 2/, … ─────────── versions: the highest one is detected
           │           └─ files ─────────────── the only one that is a model
           └─ file ────── its bytes ─────────── `content.recognize`

File names have no influence: a pickle that is called `model.skops` is a pickle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cortex.errors import ModelFormatError
from cortex.models.formats import protobuf
from cortex.models.formats.content import ACCEPTED, ModelContent, ModelFormat, UnknownContentError, recognize
from cortex.models.formats.requirements import ModelRequirement, tensorflow_requirement
from cortex.models.formats.tensorflow_model import choose_signature, read_saved_model

_MAX_FILES = 1000  #: of a folder in which the model is searched
_MAX_ENTRIES = 10_000  #: of a folder that is checked for links to other places
_VERSION = re.compile(r"-?\d{1,18}")
_CHUNKS = "saved_model.cpb"  #: TensorFlow Serving reads it in place of saved_model.pb


@dataclass(frozen=True, slots=True)
class Detection:
    """The format of a model, and what its files say about it."""

    format: ModelFormat
    path: str  #: the model's file or folder; below the given path if that is a folder of versions, or of one file
    reason: str  #: one sentence: what was found, and why it counts as this format
    code: str = ""  #: why loading it runs code from its files; "": it does not
    requirements: tuple[ModelRequirement, ...] = ()
    signatures: tuple[str, ...] = ()  #: of a SavedModel
    needs_code: str = ""  #: why only a class can call it; "": requests without code can
    versions: tuple[str, ...] = ()  #: numbered folders of the given path, the newest last

    @property
    def name(self) -> str:
        """Return the name of the model's file or folder."""
        return Path(self.path).name

    @property
    def needs_trust(self) -> bool:
        """Return whether only somebody who trusts its files may load it."""
        return bool(self.code)


def detect(path: str | Path, root: str | Path | None = None) -> Detection:
    """Detect the format of a model: a file, a folder, or a folder of numbered versions.

    Links in a folder must not lead out of `root`, a folder above it; default: the folder itself.
    Raises: ModelFormatError if it is in no known format, in one that cortex can't run, or damaged.
    """
    model = Path(path)
    try:
        if model.is_dir():
            return _detect_folder(model, Path(root or model).resolve())
        if not model.exists():
            raise ModelFormatError(f"there is no model at {model}")
        if not model.is_file():
            raise ModelFormatError(f"{model} is neither a file nor a folder")
        return _detect_file(model)
    except OSError as exc:
        raise ModelFormatError(f"{model} can't be read: {exc.strerror or exc}") from exc


def check_signature(detection: Detection) -> None:
    """Raise ModelFormatError if no request to an API without code can run a model.

    It is ambiguous which signature of a SavedModel runs, say: `type: model` can't choose.
    """
    if detection.format == "tensorflow":
        choose_signature(detection.signatures, None, detection.path)
    if detection.needs_code:
        raise ModelFormatError(f"{detection.path} {detection.needs_code}")


def describe_format(path: str | Path) -> str:
    """Return the reason of a detection, for a model that is loaded already; "" without one."""
    try:
        return detect(path).reason
    except ModelFormatError:
        return ""


def _detect_file(file: Path) -> Detection:
    return _detection(file, recognize(file))


def _detection(file: Path, found: ModelContent) -> Detection:
    reason = f"{file.name} is {found.description}"
    return Detection(found.format, str(file), reason, found.code, found.requirements, needs_code=found.needs_code)


def _detect_folder(folder: Path, root: Path, *, in_versions: bool = False) -> Detection:
    entries = sorted(_entries(folder), key=lambda entry: entry.name)
    names = {entry.name for entry in entries}
    files = [Path(e.path) for e in entries if e.is_file() and not e.name.startswith(".")]
    numbered = () if in_versions else (e.name for e in entries if e.is_dir() and _VERSION.fullmatch(e.name))
    if versions := sorted((name for name in numbered if _has_files(folder / name)), key=int):
        _refuse_links(folder, root, versions)
        newest = _detect_folder(folder / versions[-1], root, in_versions=True)
        reason = f"{folder.name} has {len(versions)} numbered versions; in the newest, {newest.reason}"
        return replace(newest, versions=tuple(str(int(version)) for version in versions), reason=reason)
    _refuse_links(folder, root)
    if "MLmodel" in names:
        from cortex.models.formats.mlflow_model import read_mlflow  # noqa: PLC0415 - needs PyYAML

        return _detection(folder, read_mlflow(folder))
    if "saved_model.pb" in names:
        return _saved_model(folder, names)
    return _only_model(folder, files)


def _only_model(folder: Path, files: list[Path]) -> Detection:
    """Return the only file of a folder that is a model; the others may be its documentation or data."""
    if len(files) == 1:
        return _detect_file(files[0])
    contents: dict[Path, ModelContent] = {}
    refusals: list[ModelFormatError] = []
    for file in files:
        try:
            contents[file] = recognize(file)
        except UnknownContentError:
            continue
        except ModelFormatError as exc:
            refusals.append(exc)
    data = {name for content in contents.values() for name in content.data_files}  # weights may look like anything
    models = {file: content for file, content in contents.items() if file.name not in data}
    if len(models) == 1:
        return _detection(*models.popitem())
    if models:
        names = ", ".join(file.name for file in list(models)[:10])
        raise ModelFormatError(f"{folder} has {len(models)} models: {names}; keep one, or give the path of one")
    if refusals:
        raise refusals[0]
    shown = ", ".join(file.name for file in files[:10]) or "no files"
    raise UnknownContentError(f"{folder} has no model; it has {shown}; accepted: {ACCEPTED}")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        found = [entry for entry, _ in zip(entries, range(_MAX_FILES + 1), strict=False)]
    if len(found) > _MAX_FILES:
        raise ModelFormatError(f"{folder} has more than {_MAX_FILES:,} entries; give the folder of one model")
    return found


def _has_files(folder: Path) -> bool:
    return any(files for _, _, files in os.walk(folder))


def _refuse_links(folder: Path, root: Path, versions: Sequence[str] = ()) -> None:
    """Raise if a link in a folder, at any depth, leads out of `root`: what is behind it may not be meant to be read.

    Of a folder of versions, only their own entries are checked; their content is checked when one is detected.
    """
    paths = map(folder.joinpath, versions) if versions else _paths_in(folder)
    for count, path in enumerate(paths, 1):
        if count > _MAX_ENTRIES:
            raise ModelFormatError(f"{folder} has more than {_MAX_ENTRIES:,} files; give the folder of one model")
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise ModelFormatError(
                f"{path.relative_to(folder)} in {folder} is a link to a place outside of the folder; copy the file"
            )


def _paths_in(root: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield Path(parent, name)


def _saved_model(folder: Path, names: Collection[str]) -> Detection:
    file = folder / "saved_model.pb"
    with file.open("rb") as stream:
        try:
            found = read_saved_model(stream, file.stat().st_size)
        except protobuf.MessageError as exc:
            raise ModelFormatError(f"{file} is truncated or damaged ({exc}); export the model again") from None
    if found is None:
        raise ModelFormatError(f"{file} is not a SavedModel: it has no graph; export the model again")
    stated = f" of TensorFlow {found.version}" if found.version else ""
    reason = f"{folder.name} is a SavedModel{stated}: a folder with the file saved_model.pb"
    code = f"it has the file {_CHUNKS}, which cortex can't check" if _CHUNKS in names else found.code
    requirements: tuple[ModelRequirement, ...] = (tensorflow_requirement(found.version),) if found.version else ()
    return Detection("tensorflow", str(folder), reason, code, requirements, found.signatures, found.needs_code)
