"""Looks, before a deploy, at the models that a configuration names: is each there, and does it have a valid layout?

Each place is listed once, whoever names it, and in bounded time: with more files than can be listed in it, a place
counts as right, and `cortex get` will say what is wrong there. Loads and downloads nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cortex.config.schema import Api
from cortex.config.violations import Violation
from cortex.errors import StorageError
from cortex.models.fetch_listing import list_models, sample_names
from cortex.models.layout import Judged, describe_invalid, judge, parts
from cortex.models.listing import Listing, Prefix
from cortex.models.source import loads_models, model_source
from cortex.models.spec import ModelProblem, ModelSource

TIMEOUT_S = 30.0
#: Of these, how long one may take to say whether there is anything at all in a place that is too big to be listed.
_SAMPLE_TIMEOUT_S = 5.0
_PARALLEL = 8
#: Of a folder with many invalid models, this many are shown in full.
_SHOWN_MODELS = 5
_INDENT = "    "


@dataclass(frozen=True)
class Place:
    """Where one API names models, in the current form of the configuration."""

    api: Api
    field: str
    source: ModelSource
    prefix: Prefix
    model: str  #: empty for `dir`


@dataclass(frozen=True)
class _Look:
    """What was found at a prefix; neither of both where it is too big to tell."""

    listing: Listing | None = None
    error: str = ""


def examine_models(
    apis: Sequence[Api], project_dir: Path, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> list[tuple[Api, Violation]]:
    """Return what is wrong with the models of these APIs; blocks for `timeout_s` at most. No event loop may run."""
    places = [place for api in apis for place in places_of(api, project_dir)]
    return asyncio.run(_examine(places, project_dir, environ, timeout_s)) if places else []


def places_of(api: Api, project_dir: Path) -> Iterator[Place]:
    """Go through the places in which an API has models that are ours to load."""
    source = model_source(api, project_dir)
    if source is None or not loads_models(api):
        return
    for index, (prefix, name, _) in enumerate(parts(source)):
        field = f"paths.{index}.path" if source.form == "paths" else source.form
        yield Place(api, f"handler.models.{field}", source, prefix, name)


async def _examine(
    places: Sequence[Place], project_dir: Path, environ: Mapping[str, str], timeout_s: float
) -> list[tuple[Api, Violation]]:
    deadline = time.monotonic() + timeout_s
    turns = asyncio.Semaphore(_PARALLEL)

    async def look(prefix: Prefix) -> _Look:
        async with turns:
            return await _look(prefix, environ, deadline)

    distinct = list(dict.fromkeys(place.prefix for place in places))
    looks = dict(zip(distinct, await asyncio.gather(*map(look, distinct)), strict=True))
    found: list[tuple[Api, Violation]] = []
    for place in places:
        for message in await _judge(place, looks[place.prefix], environ, deadline):
            # Models of the project are in a folder of which its user knows nothing.
            first, *more = message.replace(f"{project_dir}/", "").rstrip().split("\n")
            text = "\n".join([first, *(f"{_INDENT}{line}".rstrip() for line in more)])
            found.append((place.api, Violation((place.field,), text)))
    return found


async def _look(prefix: Prefix, environ: Mapping[str, str], deadline: float) -> _Look:
    try:
        try:
            async with asyncio.timeout(deadline - _SAMPLE_TIMEOUT_S - time.monotonic()):
                return _Look(await list_models(prefix, environ))
        except TimeoutError:
            async with asyncio.timeout(deadline - time.monotonic()):
                names = await sample_names(prefix.url, environ, 1)
            return _Look(error="" if names else f"there is nothing at {prefix.url}")
    except TimeoutError:
        return _Look(error=f"{prefix.url} did not answer in time")
    except StorageError as error:
        return _Look(error=str(error))


async def _judge(place: Place, look: _Look, environ: Mapping[str, str], deadline: float) -> list[str]:
    """Say what is wrong: one message for each invalid model."""
    if look.listing is None:
        return [look.error] if look.error else []
    url, layout = place.prefix.url, place.source.layout
    if not look.listing.objects:
        return [f"there is nothing at {url}"]
    judged = judge(layout, place.model, None, look.listing, time.time())
    if not judged.models and not judged.invalid:
        names = await _names(url, environ, deadline)
        what = "has no folders, each of which would be a model" if place.prefix.is_dir else "has no model"
        return [f"{url} {what}\n{describe_invalid(layout, names)}"]
    by_model = _by_model(judged)
    messages = []
    for model, problems in list(by_model.items())[:_SHOWN_MODELS]:
        names = await _names(f"{url}/{model}" if place.prefix.is_dir else url, environ, deadline)
        reasons = "\n".join(problem.message for problem in problems[:_SHOWN_MODELS])
        messages.append(f"{reasons}\n{describe_invalid(layout, names)}")
    if len(by_model) > _SHOWN_MODELS:
        messages.append(f"{len(by_model) - _SHOWN_MODELS} more models of {url} are invalid")
    return messages


def _by_model(judged: Judged) -> dict[str, list[ModelProblem]]:
    invalid: dict[str, list[ModelProblem]] = {}
    for problem in judged.problems:
        if (problem.model, problem.version) in judged.invalid:
            invalid.setdefault(problem.model, []).append(problem)
    return invalid


async def _names(url: str, environ: Mapping[str, str], deadline: float) -> list[str]:
    """Return the first names at `url`; fewer or none where that takes too long, or they are just gone."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await sample_names(url, environ)
    except (StorageError, TimeoutError):
        return []
