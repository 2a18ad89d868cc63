"""Decides which of an API's models a replica should serve, and whether that takes a new process. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from cortex.models.spec import Catalogue, Model, Version


class Loaded(NamedTuple):
    """One version of a model with the content that is (being) loaded."""

    model: str
    number: str
    digest: str


def servable(target: Catalogue, bad: Collection[tuple[str, str]], serving: Catalogue | None) -> Catalogue:
    """Return `target` without what can't be loaded: `bad` holds (model, digest).

    A version whose content is bad keeps the content that is being served; else it is left out, and the next lower one
    is the latest. A model of which nothing is left stays as it is served, or is left out.
    """
    before = serving.by_name if serving else {}
    models = []
    for model in target.models:
        old = before.get(model.name)
        versions = tuple(_usable(model, bad, old))
        if versions:
            models.append(Model(model.name, versions, model.signature_key))
        elif old is not None and (old.name, old.latest.digest) not in bad:
            models.append(old)
    return Catalogue(tuple(models), target.problems)


def _usable(model: Model, bad: Collection[tuple[str, str]], old: Model | None) -> Iterable[Version]:
    contents = {version.number: version for version in old.versions} if old else {}
    for version in model.versions:
        if (model.name, version.digest) not in bad:
            yield version
            continue
        kept = contents.get(version.number)
        if kept is not None and (model.name, kept.digest) not in bad:
            yield kept


def needs_new_process(serving: Catalogue, target: Catalogue, loaded: Collection[Loaded]) -> bool:
    """Tell whether `target` differs in what a process that loads every latest version has, or should have, loaded."""
    for model in target.models:
        before = serving.by_name.get(model.name)
        if before is None or _content(before.latest) != _content(model.latest):
            return True
        if before.signature_key != model.signature_key:
            return True
    for version in loaded:
        now = target.find(version.model, version.number)
        if now is not None and now.digest != version.digest:
            return True
    return False


def changed(serving: Catalogue | None, target: Catalogue) -> list[Loaded]:
    """List the latest versions in `target` that are not those of `serving`: suspects, if it can't be loaded."""
    before = serving.by_name if serving else {}
    return [
        Loaded(model.name, model.latest.number, model.latest.digest)
        for model in target.models
        if model.name not in before or _content(before[model.name].latest) != _content(model.latest)
    ]


def also_loaded(asked: Iterable[tuple[str, str]], target: Catalogue) -> tuple[tuple[str, str], ...]:
    """Name the versions that a new process should have loaded beside the latest, since calls have asked for them."""
    return tuple(sorted((model, number) for model, number in asked if target.find(model, number) is not None))


def missing_model(target: Catalogue, names: Iterable[str]) -> str | None:
    """Say why nothing can be served yet: none of the models that were named is there; None if one is."""
    wanted = list(names)
    if not wanted or any(name in target.by_name for name in wanted):
        return None
    problems = [problem.message for problem in target.problems if problem.model in wanted]
    return "; ".join(problems) or "the model path has no valid model"


def _content(version: Version) -> tuple[str, str]:
    return version.number, version.digest
