"""Which model and version a call asks for, and what is said when there is no such one. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cortex.errors import ModelError
from cortex.models.spec import DEFAULT_MODEL, LATEST, Catalogue, Model, ModelSource, Version

_LISTED = 50
_QUOTED_CHARACTERS = 100


def find(source: ModelSource, catalogue: Catalogue, name: object, version: object) -> tuple[Model, Version]:
    """Return the model and version asked for; with `path` any name means its one model.

    Raises: ModelError, which names what exists.
    """
    number = check_version(version)
    model = _find_model(source, catalogue, name)
    if number == LATEST:
        return model, latest(model)
    for each in model.versions:
        if each.number == number:
            return model, each
    exist = shown(each.number for each in model.versions)
    message = f"model {label(source, model.name)} of version {number} wasn't found; available versions: {exist}"
    raise ModelError(message + _why(catalogue, model.name, number))


def check_version(version: object) -> str:
    """Return the version if it is "latest" or an integer written as a string. Raises: ModelError."""
    if not isinstance(version, str):
        write = f'"{version}"' if isinstance(version, int) and not isinstance(version, bool) else '"1" or "latest"'
        raise ModelError(f"model_version must be str, not {type(version).__name__}; write {write}")
    if version != LATEST and not _is_integer(version):
        asked = repr(version[:_QUOTED_CHARACTERS])
        raise ModelError(f"model_version must be either a parse-able numeric value or 'latest', not {asked}")
    return version


def latest(model: Model) -> Version:
    """Return the version with the greatest number: 10 is above 9."""
    return max(model.versions, key=lambda version: version.order)


def label(source: ModelSource, name: str) -> str:
    """Return what the user calls a model: its name, or the location for the one model of `path`."""
    return source.paths[0].url if name == DEFAULT_MODEL and source.form == "path" else name


def shown(names: Iterable[str]) -> str:
    """Return names as a list, cut short where there are very many."""
    every = list(names)
    listed = ", ".join(repr(name) for name in every[:_LISTED])
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return f"[{listed}]{more}"


def _find_model(source: ModelSource, catalogue: Catalogue, name: object) -> Model:
    if source.form == "path":
        name = DEFAULT_MODEL
    elif name is None:
        raise ModelError(f"model_name was not specified, choose one of the following: {_available(source, catalogue)}")
    elif not isinstance(name, str):
        write = shown(model.name for model in catalogue.models)
        raise ModelError(f"model_name must be str, not {type(name).__name__}; choose one of the following: {write}")
    model = catalogue.by_name.get(name)
    if model is not None and model.versions:
        return model
    if model is not None or any(path.name == name for path in source.paths):
        message = f"'{label(source, name)}' model's versions have been removed; add at least a version to serve it"
    else:
        quoted = repr(name[:_QUOTED_CHARACTERS])
        message = f"{quoted} model wasn't found in the list of available models: {_available(source, catalogue)}"
    raise ModelError(message + _why(catalogue, name, None))


def _available(source: ModelSource, catalogue: Catalogue) -> str:
    names = [path.name for path in source.paths] or [model.name for model in catalogue.models]
    return shown(sorted(names))


def _why(catalogue: Catalogue, name: str, number: str | None) -> str:
    """Say why something that is in the source is not served, if that is known."""
    for problem in catalogue.problems:
        if problem.model == name and (number is None or problem.version in (None, number)):
            return f"; what is there can't be served: {problem.message}"
    return ""


def _is_integer(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True
