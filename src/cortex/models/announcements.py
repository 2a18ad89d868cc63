"""Decides what a source's watchers are told, given what is on disk by now. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from cortex.models.spec import Catalogue, Model, ModelProblem, ModelSource, Version


def needed(source: ModelSource, *catalogues: Catalogue | None) -> dict[str, tuple[str, Version]]:
    """Return the versions that must be on disk before they are announced, by digest, with their model's name."""
    if source.is_cached:
        return {}
    return {model.latest.digest: (model.name, model.latest) for model in _models(catalogues)}


def announced(
    source: ModelSource,
    catalogue: Catalogue,
    previous: Catalogue | None,
    paths: Mapping[str, str],
    failures: Mapping[str, ModelProblem],
) -> Catalogue:
    """Return what is told of `catalogue`.

    A model whose latest version is not on disk (`paths`, by digest) stays as it was told before, or is left out. Why
    it could not be downloaded (`failures`, by digest) is among the problems.
    """
    if source.is_cached:
        return catalogue
    before = previous.by_name if previous else {}
    models: list[Model] = []
    problems = list(catalogue.problems)
    for model in catalogue.models:
        digest = model.latest.digest
        if digest in paths:
            models.append(replace(model, versions=(*model.versions[:-1], replace(model.latest, path=paths[digest]))))
        elif model.name in before:
            models.append(before[model.name])
        if digest in failures and digest not in paths:
            problems.append(replace(failures[digest], model=model.name, version=model.latest.number))
    return Catalogue(tuple(models), tuple(problems))


def digests_to_keep(source: ModelSource, *catalogues: Catalogue | None) -> frozenset[str]:
    """Return the contents that stay on disk for these catalogues.

    Without caching only the latest: older versions come when a call asks for one, and go when no process has them.
    """
    if source.is_cached:
        return frozenset(version.digest for model in _models(catalogues) for version in model.versions)
    return frozenset(model.latest.digest for model in _models(catalogues))


def find_content(model: str, number: str, digest: str, *catalogues: Catalogue | None) -> Version | None:
    """Find a version by what is in it."""
    for catalogue in catalogues:
        found = catalogue.find(model, number) if catalogue else None
        if found is not None and found.digest == digest:
            return found
    return None


def _models(catalogues: tuple[Catalogue | None, ...]) -> Iterator[Model]:
    return (model for catalogue in catalogues if catalogue for model in catalogue.models)
