"""What a model must look like: judges what a listing found, by layout, and says what was expected instead. Pure.

The first part of a file's path below the model decides: an integer is a version's folder; if there is none, all of it
is version "1". A SavedModel must have its variables: TensorFlow 2 writes them even for a model without any, and one
that is still being uploaded looks just like one that has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cortex.models.listing import MAX_FILES, MAX_MODELS, Content, Folder, Listing, Marks, Prefix, model_prefix, prefixes
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
_WORDS: dict[Layout, str] = {
    "python": "at least one file, of any name",
    "tensorflow": "a TensorFlow SavedModel",
    "neuron": "a SavedModel compiled for Inferentia",
    "onnx": "exactly one *.onnx file",
}


@dataclass(frozen=True)
class Judged:
    """What one listing has for one layout."""

    models: tuple[Model, ...]  #: sorted by name; with at least one valid version each
    problems: tuple[ModelProblem, ...]
    invalid: frozenset[tuple[str, str | None]] = frozenset()  #: there, but not valid: model and version, None: all
    is_cut: bool = False  #: what is missing may be there all the same


def judge(layout: Layout, name: str, signature_key: str | None, listing: Listing, now: float) -> Judged:
    """Judge what one prefix holds; `name` and `signature_key` are of the one model of a prefix that isn't a dir."""
    if not listing.prefix.is_dir:
        folder = listing.models.get("", Folder({}, None))
        return _judge_folder(layout, name, signature_key, listing.prefix.url, folder, now)
    models: list[Model] = []
    problems: list[ModelProblem] = []
    invalid: set[tuple[str, str | None]] = set()
    for each, folder in sorted(listing.models.items()):
        one = _judge_dir_folder(layout, each, signature_key, listing.prefix.url, folder, now)
        models += one.models
        problems += one.problems
        invalid |= one.invalid
    if not models and not problems:
        problems.append(ModelProblem("", None, f"there is no model at {listing.prefix.url}", now))
    if listing.is_cut:
        message = f"{listing.prefix.url} has more than {MAX_MODELS:,} models and versions; the rest was left out"
        problems.append(ModelProblem("", None, message, now))
    return Judged(tuple(models), tuple(problems), frozenset(invalid), listing.is_cut)


def catalogue_models(
    source: ModelSource, listings: Mapping[Prefix, Listing], now: float
) -> tuple[tuple[Model, ...], tuple[ModelProblem, ...]]:
    """Return the valid versions in these listings, and what is wrong with the others.

    A prefix without a listing is passed over. Nothing has a `path` yet. A valid model may have problems too.
    """
    judged = [
        judge(source.layout, name, signature_key, listings[prefix], now)
        for prefix, name, signature_key in parts(source)
        if prefix in listings
    ]
    models = sorted((model for one in judged for model in one.models), key=lambda model: model.name)
    return tuple(models), tuple(problem for one in judged for problem in one.problems)


def parts(source: ModelSource) -> tuple[tuple[Prefix, str, str | None], ...]:
    """Return each prefix of a source with the name and signature key that `judge` needs."""
    if source.dir is not None:
        return ((prefixes(source)[0], "", source.signature_key),)
    return tuple((model_prefix(path.url), path.name, path.signature_key) for path in source.paths)


def expected_tree(layout: Layout) -> str:
    """Return what a model looks like, alone and with versions, as text to show."""
    lines = _TREES[layout]
    single = _drawn(lines)
    versions = ["1/ (a version: any integer)", *_indented(lines), "2/ (a higher one is newer)", *_indented(lines)]
    return f"path/\n{single}\n\nor, with versions:\n\npath/\n{_drawn(versions)}"


def describe_invalid(layout: Layout, found: Sequence[str]) -> str:
    """Return the expected tree beside (at most 50 of) the names that were found, as text to show."""
    names = [printable(name) for name in found[:_SHOWN]]
    if not names:
        names = ["(nothing)"]
    elif len(found) >= _SHOWN:
        names.append("…")
    return f"expected {_WORDS[layout]}:\n\n{expected_tree(layout)}\n\nfound:\n\n" + "\n".join(names)


def why_invalid(layout: Layout, content: Content) -> str | None:
    """Tell in a few words what is wrong with the files of one version; None if nothing is."""
    if content.flaw:
        return content.flaw
    if content.files > MAX_FILES:
        return f"more than {MAX_FILES:,} files"
    if layout == "onnx":
        return None if content.onnx_files == 1 else f"{content.onnx_files or 'no'} *.onnx files; must be exactly one"
    if layout in ("tensorflow", "neuron"):
        wanted = {"saved_model.pb": Marks.SAVED_MODEL}
        if layout == "tensorflow":
            wanted["variables/variables.index"] = Marks.VARIABLES_INDEX
            wanted["variables/variables.data-00000-of-*"] = Marks.VARIABLES_DATA
        missing = [name for name, mark in wanted.items() if mark not in content.marks]
        return f"no {' and no '.join(missing)}" if missing else None
    return None


def _judge_dir_folder(
    layout: Layout, name: str, signature_key: str | None, url: str, folder: Folder, now: float
) -> Judged:
    shown = printable(name)
    if not name or shown != name or name in (".", ".."):
        return Judged((), (ModelProblem(shown, None, f"{shown!r} can't be the name of a model", now),))
    return _judge_folder(layout, name, signature_key, f"{url.rstrip('/')}/{name}", folder, now)


def _judge_folder(layout: Layout, name: str, signature_key: str | None, url: str, folder: Folder, now: float) -> Judged:
    def problem(version: str | None, message: str) -> ModelProblem:
        return ModelProblem(name, version, message, now)

    if folder.versions and folder.rest:
        example = folder.rest.flaw or folder.rest.example
        message = f"{url} mixes folders of versions (integers) with other files: {example}"
        return Judged((), (problem(None, message),), frozenset({(name, None)}))
    if not folder.versions:
        return _judge_unversioned(layout, name, signature_key, url, folder.rest, now)
    twins = _twins(folder.versions)
    versions: list[Version] = []
    problems: list[ModelProblem] = []
    for directory, content in folder.versions.items():
        number = str(int(directory))
        if number in twins:
            continue
        reason = why_invalid(layout, content)
        if reason:
            problems.append(problem(number, f"{url}/{directory}: {reason}"))
        else:
            versions.append(_version(number, content, f"{url}/{directory}"))
    for number, directories in twins.items():
        problems.append(problem(number, f"{url} has the same version twice: {' and '.join(directories)}"))
    versions.sort(key=lambda version: version.order)
    problems.sort(key=lambda each: int(each.version or 0))
    models = (Model(name, tuple(versions), signature_key),) if versions else ()
    return Judged(models, tuple(problems), frozenset((name, each.version) for each in problems))


def _judge_unversioned(
    layout: Layout, name: str, signature_key: str | None, url: str, content: Content | None, now: float
) -> Judged:
    if content is None:
        return Judged((), (ModelProblem(name, None, f"there is no model at {url}", now),))
    reason = why_invalid(layout, content)
    if reason:
        return Judged((), (ModelProblem(name, None, f"{url}: {reason}", now),), frozenset({(name, None)}))
    return Judged((Model(name, (_version(_UNVERSIONED, content, url),), signature_key),), ())


def _version(number: str, content: Content, url: str) -> Version:
    return Version(number, content.digest, content.size_bytes, content.modified_at, url=url)


def _twins(versions: Mapping[str, Content]) -> dict[str, list[str]]:
    """Return the numbers that several folders have: 7 and 007."""
    folders: dict[str, list[str]] = {}
    for directory in sorted(versions):
        folders.setdefault(str(int(directory)), []).append(directory)
    return {number: directories for number, directories in folders.items() if len(directories) > 1}


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _drawn(lines: Sequence[str]) -> str:
    """Draw lines, indented by four blanks a level, as a tree."""
    levels = [(len(line) - len(line.lstrip())) // 4 for line in lines]
    drawn = []
    for index, line in enumerate(lines):
        level = levels[index]
        parents = "".join("│   " if _goes_on(levels, index, above) else "    " for above in range(level))
        branch = "├── " if _goes_on(levels, index, level) else "└── "
        drawn.append(f"{parents}{branch}{line.strip()}")
    return "\n".join(drawn)


def _goes_on(levels: Sequence[int], index: int, level: int) -> bool:
    """Tell whether there is another line of this level below, in the same folder."""
    for later in levels[index + 1 :]:
        if later <= level:
            return later == level
    return False
