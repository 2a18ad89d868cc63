"""Check listings against the layouts of models, and describe what is expected. Pure.

A subfolder of a model whose name is an integer is a version, and everything beside it is ignored; a model without such
folders is version "1". A SavedModel
must have variables: TensorFlow 2 writes them even for a model without any, and a SavedModel without them may be one
that is still being uploaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cortex.models.agent.listing import (
    MAX_FILES,
    MAX_MODELS,
    FileMarks,
    Listing,
    ModelFolder,
    Prefix,
    VersionContent,
    is_stray,
    model_prefix,
    prefixes,
)
from cortex.models.spec import Layout, Model, ModelProblem, ModelSource, Version
from cortex.storage.objects import printable

_SHOWN = 50
_UNVERSIONED = "1"

_TREES: dict[Layout, tuple[str, ...]] = {
    "python": ("model.pkl", "data.txt"),
    "tensorflow": (
        "saved_model.pb",
        "variables/",
        "    variables.index",
        "    variables.data-00000-of-00001 (and more of them)",
    ),
    "neuron": ("saved_model.pb",),
    "onnx": ("model.onnx",),
}
_DESCRIPTIONS: dict[Layout, str] = {
    "python": "at least one file, of any name",
    "tensorflow": "a TensorFlow SavedModel",
    "neuron": "a SavedModel compiled for Inferentia",
    "onnx": "exactly one *.onnx file",
}


@dataclass(frozen=True)
class CheckedListing:
    """The valid models and the problems of one listing under one layout."""

    models: tuple[Model, ...]  #: sorted by name; each has at least one valid version
    problems: tuple[ModelProblem, ...]
    #: The model and version (None: all) of what exists but is not valid.
    invalid: frozenset[tuple[str, str | None]] = frozenset()
    is_truncated: bool = False  #: missing models may exist


def check_listing(layout: Layout, name: str, signature_key: str | None, listing: Listing, now: float) -> CheckedListing:
    """Check the listing of one prefix; `name` and `signature_key` are those of a prefix that is one model."""
    if not listing.prefix.is_dir:
        folder = listing.models.get("", ModelFolder({}, None))
        return _check_folder(layout, name, signature_key, listing.prefix.url, folder, now)
    models: list[Model] = []
    problems: list[ModelProblem] = []
    invalid: set[tuple[str, str | None]] = set()
    for each, folder in sorted(listing.models.items()):
        one = _check_dir_folder(layout, each, signature_key, listing.prefix.url, folder, now)
        models += one.models
        problems += one.problems
        invalid |= one.invalid
    if not models and not problems:
        problems.append(ModelProblem("", None, f"there is no model at {listing.prefix.url}", now))
    if listing.is_truncated:
        message = f"{listing.prefix.url} has more than {MAX_MODELS:,} models and versions; the rest was ignored"
        problems.append(ModelProblem("", None, message, now))
    return CheckedListing(tuple(models), tuple(problems), frozenset(invalid), listing.is_truncated)


def source_entries(source: ModelSource) -> tuple[tuple[Prefix, str, str | None], ...]:
    """Return each prefix of a source with the model name and signature key for `check_listing`."""
    if source.dir is not None:
        return ((prefixes(source)[0], "", source.signature_key),)
    return tuple((model_prefix(path.url), path.name, path.signature_key) for path in source.paths)


def expected_tree(layout: Layout) -> str:
    """Return the expected folder tree, without and with versions, for display."""
    lines = _TREES[layout]
    single = _draw(lines)
    versions = ["1/ (a version: any integer)", *_indent(lines), "2/ (a higher one is newer)", *_indent(lines)]
    return f"path/\n{single}\n\nor, with versions:\n\npath/\n{_draw(versions)}"


def describe_invalid(layout: Layout, found: Sequence[str]) -> str:
    """Return the expected tree and (at most 50 of) the found names for display."""
    names = [printable(name) for name in found[:_SHOWN]]
    if not names:
        names = ["(nothing)"]
    elif len(found) >= _SHOWN:
        names.append("…")
    return f"expected {_DESCRIPTIONS[layout]}:\n\n{expected_tree(layout)}\n\nfound:\n\n" + "\n".join(names)


def invalid_reason(layout: Layout, content: VersionContent) -> str | None:
    """Return the reason why the files of one version are invalid; None if they are valid."""
    if content.flaw:
        return content.flaw
    if content.files > MAX_FILES:
        return f"more than {MAX_FILES:,} files"
    if layout == "onnx":
        return None if content.onnx_files == 1 else f"{content.onnx_files or 'no'} *.onnx files; must be exactly one"
    if layout == "tensorflow" and content.files == 1 and content.example.endswith(".zip"):
        return None  # the form of 0.8 to 0.11; the loader unpacks it
    if layout in ("tensorflow", "neuron"):
        wanted = {"saved_model.pb": FileMarks.SAVED_MODEL}
        if layout == "tensorflow":
            wanted["variables/variables.index"] = FileMarks.VARIABLES_INDEX
            wanted["variables/variables.data-00000-of-*"] = FileMarks.VARIABLES_DATA
        missing = [name for name, mark in wanted.items() if mark not in content.marks]
        return f"no {' and no '.join(missing)}" if missing else None
    return f"no file except {content.example}" if is_stray(content.example) else None


def _check_dir_folder(
    layout: Layout, name: str, signature_key: str | None, url: str, folder: ModelFolder, now: float
) -> CheckedListing:
    shown = printable(name)
    if not name or shown != name or name in (".", ".."):
        return CheckedListing((), (ModelProblem(shown, None, f"{shown!r} is not a valid model name", now),))
    if is_stray(name):
        message = f"{url.rstrip('/')}/{name} is ignored: its name is that of a hidden file, or of an incomplete upload"
        return CheckedListing((), (ModelProblem(name, None, message, now),))
    return _check_folder(layout, name, signature_key, f"{url.rstrip('/')}/{name}", folder, now)


def _check_folder(
    layout: Layout, name: str, signature_key: str | None, url: str, folder: ModelFolder, now: float
) -> CheckedListing:
    def problem(version: str | None, message: str) -> ModelProblem:
        return ModelProblem(name, version, message, now)

    if not folder.versions:
        return _check_unversioned(layout, name, signature_key, url, folder.rest, now)
    duplicates = _duplicates(folder.versions)
    versions: list[Version] = []
    problems: list[ModelProblem] = []
    notes: list[ModelProblem] = []
    if folder.rest:
        example = folder.rest.example.partition("/")[0]
        notes.append(problem(None, f"{url}: {example} is ignored: a version is a folder whose name is an integer"))
    for directory, content in folder.versions.items():
        number = str(int(directory))
        if number in duplicates:
            continue
        reason = invalid_reason(layout, content)
        if reason:
            problems.append(problem(number, f"{url}/{directory}: {reason}"))
        else:
            versions.append(_version(number, content, f"{url}/{directory}"))
    for number, directories in duplicates.items():
        problems.append(problem(number, f"{url} has the same version twice: {' and '.join(directories)}"))
    versions.sort(key=lambda version: version.order)
    problems.sort(key=lambda each: int(each.version or 0))
    models = (Model(name, tuple(versions), signature_key),) if versions else ()
    return CheckedListing(models, (*problems, *notes), frozenset((name, each.version) for each in problems))


def _check_unversioned(
    layout: Layout, name: str, signature_key: str | None, url: str, content: VersionContent | None, now: float
) -> CheckedListing:
    if content is None:
        return CheckedListing((), (ModelProblem(name, None, f"there is no model at {url}", now),))
    reason = invalid_reason(layout, content)
    if reason:
        return CheckedListing((), (ModelProblem(name, None, f"{url}: {reason}", now),), frozenset({(name, None)}))
    return CheckedListing((Model(name, (_version(_UNVERSIONED, content, url),), signature_key),), ())


def _version(number: str, content: VersionContent, url: str) -> Version:
    return Version(number, content.digest, content.size_bytes, content.modified_at, url=url)


def _duplicates(versions: Mapping[str, VersionContent]) -> dict[str, list[str]]:
    """Return the version numbers that several folders have, such as 7 and 007."""
    folders: dict[str, list[str]] = {}
    for directory in sorted(versions):
        folders.setdefault(str(int(directory)), []).append(directory)
    return {number: directories for number, directories in folders.items() if len(directories) > 1}


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _draw(lines: Sequence[str]) -> str:
    """Draw lines, indented by four spaces per level, as a tree."""
    levels = [(len(line) - len(line.lstrip())) // 4 for line in lines]
    drawn = []
    for index, line in enumerate(lines):
        level = levels[index]
        parents = "".join("│   " if _has_next(levels, index, above) else "    " for above in range(level))
        branch = "├── " if _has_next(levels, index, level) else "└── "
        drawn.append(f"{parents}{branch}{line.strip()}")
    return "\n".join(drawn)


def _has_next(levels: Sequence[int], index: int, level: int) -> bool:
    """Return whether another line of this level follows in the same folder."""
    for later in levels[index + 1 :]:
        if later <= level:
            return later == level
    return False
