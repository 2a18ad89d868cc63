"""Local models and their catalogues, in the format of the model agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cortex.models.agent.layout import check_listing, source_entries
from cortex.models.agent.listing import Listing, Prefix
from cortex.models.spec import DEFAULT_MODEL, Catalogue, Model, ModelPath, ModelProblem, ModelSource, Version

Files = Mapping[str, bytes]


def write_models(root: Path, models: Mapping[str, Mapping[str, Files]]) -> Catalogue:
    """Write models, `{name: {version: files}}`, and return a catalogue of them."""
    found = []
    for name, versions in sorted(models.items()):
        known = [_write(root / name / number, number, files) for number, files in versions.items()]
        found.append(Model(name, tuple(sorted(known, key=lambda version: version.order))))
    return Catalogue(tuple(found))


def source_of(layout: str, *names: str, cache_size: int | None = None) -> ModelSource:
    """Return a source with `path`, or with `paths` for the given names."""
    paths = tuple(ModelPath(name, f"s3://bucket/{name}/") for name in names or (DEFAULT_MODEL,))
    return ModelSource(layout, paths, cache_size=cache_size, disk_cache_size=cache_size)  # type: ignore[arg-type]


def catalogue_models(
    source: ModelSource, listings: Mapping[Prefix, Listing], now: float
) -> tuple[tuple[Model, ...], tuple[ModelProblem, ...]]:
    """Return the valid models and the problems of these listings."""
    checked = [
        check_listing(source.layout, name, signature_key, listings[prefix], now)
        for prefix, name, signature_key in source_entries(source)
    ]
    models = sorted((model for one in checked for model in one.models), key=lambda model: model.name)
    return tuple(models), tuple(problem for one in checked for problem in one.problems)


def _write(folder: Path, number: str, files: Files) -> Version:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    size = sum(map(len, files.values()))
    return Version(number, f"{folder.parent.name}-{number}", size, 1600000000.5 + int(number), str(folder))
