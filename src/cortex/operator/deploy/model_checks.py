"""Inspect the models of a configuration before a deploy: check that each exists and is valid, and detect its format.

Each location is listed once, in bounded time. A location with too many files to list counts as valid; `cortex get`
then shows its problems after the deploy. To detect the format of a model in a bucket, the files of its newest version
are downloaded to a temporary folder, without
large ones. No model is loaded. The formats also name the packages that a deploy adds to an API.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from cortex.config.rules.violations import Violation
from cortex.config.schema import ANY_MODEL, PYTHON, Api
from cortex.errors import ModelFormatError, StorageError
from cortex.models.agent.layout import CheckedListing, check_listing, describe_invalid, source_entries
from cortex.models.agent.listing import Listing, Prefix, download_small_files, list_models, sample_names
from cortex.models.formats.detection import Detection, check_signature, detect
from cortex.models.formats.packages import PackageConflict, choose_packages
from cortex.models.source import loads_models, model_source, trusts_pickle
from cortex.models.spec import Model, ModelProblem, ModelSource
from cortex.predictor.clients.tensorflow_backend import SERVER
from cortex.predictor.estimators.loader import check_trust
from cortex.projects.project import ProjectFiles
from cortex.storage.client import is_remote, store_name

TIMEOUT_S = 30.0
#: A store that takes longer to name a first file at a location does not answer.
_SAMPLE_TIMEOUT_S = 5.0
#: Time after which a store is asked whether it answers, besides the listing that still runs.
_LIST_SOON_S = 1.0
_PARALLEL = 8
#: Maximum of invalid models per folder that are shown in full.
_SHOWN_MODELS = 5
_INDENT = "    "
#: Models of a folder whose formats are detected; the packages of the others are not derived.
_DETECTED_MODELS = 20
#: Larger files in buckets are not downloaded: their format stays unknown until a replica loads them.
_MAX_DOWNLOAD_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class ModelLocation:
    """One location of models in an API's configuration."""

    api: Api
    field: str
    source: ModelSource
    prefix: Prefix
    model: str  #: name of the model; empty for `dir`


@dataclass(frozen=True)
class ModelInspection:
    """The mistakes in the models of all APIs, and what was detected of those without any, by the name of the API."""

    violations: list[tuple[Api, Violation]] = field(default_factory=list)
    detections: dict[str, list[Detection]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Downloads:
    """Versions of models that were downloaded to detect their formats; several APIs may have the same."""

    folder: Path
    complete: dict[str, bool] = field(default_factory=dict)  #: by URL: False if files were too large

    def path(self, url: str) -> Path:
        return self.folder / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]


@dataclass(frozen=True)
class _Inspection:
    """Result for a prefix; both fields are empty if it is too large to list."""

    listing: Listing | None = None
    error: str = ""


def inspect_models(
    apis: Sequence[Api], project_dir: Path, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> ModelInspection:
    """Inspect the models of these APIs; blocks for up to `timeout_s`. No event loop may run."""
    locations = [location for api in apis for location in _locations(api, project_dir)]
    passed = [(api, api.handler.model) for api in apis if api.handler.model and is_remote(api.handler.model)]
    if not locations and not passed:
        return ModelInspection()
    with tempfile.TemporaryDirectory(prefix="cortex-models-") as downloads:
        return asyncio.run(_check(locations, passed, project_dir, environ, timeout_s, _Downloads(Path(downloads))))


def _locations(api: Api, project_dir: Path) -> Iterator[ModelLocation]:
    """Yield the locations of models that cortex loads, in contrast to an external TensorFlow Serving."""
    source = model_source(api, project_dir)
    if source is None or not loads_models(api):
        return
    for index, (prefix, name, _) in enumerate(source_entries(source)):
        field = f"paths.{index}.path" if source.form == "paths" else source.form
        yield ModelLocation(api, f"handler.models.{field}", source, prefix, name)


async def _check(
    locations: Sequence[ModelLocation],
    passed: Sequence[tuple[Api, str]],
    project_dir: Path,
    environ: Mapping[str, str],
    timeout_s: float,
    downloads: _Downloads,
) -> ModelInspection:
    """Check the models that cortex loads, and the URLs of those that are passed to module functions."""
    deadline = time.monotonic() + timeout_s
    slots = asyncio.Semaphore(_PARALLEL)

    async def inspect(prefix: Prefix) -> _Inspection:
        async with slots:
            return await _inspect(prefix, environ, deadline)

    async def find(url: str) -> str:
        async with slots:
            return await _absence(url, environ)

    distinct = list(dict.fromkeys(location.prefix for location in locations))
    inspections = dict(zip(distinct, await asyncio.gather(*map(inspect, distinct)), strict=True))
    result = ModelInspection()
    found = result.violations
    for location in locations:
        inspection = inspections[location.prefix]
        models, messages = await _location_problems(location, inspection, environ, deadline)
        if not messages and location.api.handler.type != PYTHON:
            detected, messages = await _detect_models(location, models, environ, deadline, downloads)
            result.detections.setdefault(location.api.name, []).extend(detected)
        for message in messages:
            # Models of the project are in a temporary folder that means nothing to the user.
            first, *more = message.replace(f"{project_dir}/", "").rstrip().split("\n")
            text = "\n".join([first, *(f"{_INDENT}{line}".rstrip() for line in more)])
            found.append((location.api, Violation((location.field,), text)))
    errors = await asyncio.gather(*(find(url) for _, url in passed))
    found += [
        (api, Violation(("handler.model",), error)) for (api, _), error in zip(passed, errors, strict=True) if error
    ]
    return result


async def _inspect(prefix: Prefix, environ: Mapping[str, str], deadline: float) -> _Inspection:
    listing = asyncio.create_task(list_models(prefix, environ))
    try:
        await asyncio.wait({listing}, timeout=min(_LIST_SOON_S, deadline - time.monotonic()))
        # It may be large, or empty, or the store does not answer at all.
        if not listing.done() and (error := await _absence(prefix.url, environ)):
            return _Inspection(error=error)
        if time.monotonic() >= deadline:  # a timeout that is over does not end what is done
            return _Inspection()
        async with asyncio.timeout(deadline - time.monotonic()):
            return _Inspection(await listing)
    except TimeoutError:
        return _Inspection()
    except StorageError as error:
        return _Inspection(error=str(error))
    finally:
        listing.cancel()


async def _absence(url: str, environ: Mapping[str, str]) -> str:
    """Return why there is no file at or below `url`; empty if there is one."""
    try:
        async with asyncio.timeout(_SAMPLE_TIMEOUT_S):
            names = await sample_names(url, environ, 1)
    except TimeoutError:
        return f"{url}: {await store_name(url, environ)} did not answer within {_SAMPLE_TIMEOUT_S:g} s"
    except StorageError as error:
        return str(error)
    return "" if names else f"there is nothing at {url}"


async def _location_problems(
    location: ModelLocation, inspection: _Inspection, environ: Mapping[str, str], deadline: float
) -> tuple[Sequence[Model], list[str]]:
    """Return the valid models of a location, and one message for each invalid one."""
    if inspection.listing is None:
        return (), [inspection.error] if inspection.error else []
    url, layout = location.prefix.url, location.source.layout
    if not inspection.listing.objects:
        return (), [f"there is nothing at {url}"]
    judged = check_listing(layout, location.model, None, inspection.listing, time.time())
    if not judged.models and not judged.invalid:
        names = await _names(url, environ, deadline)
        what = "contains no model folders" if location.prefix.is_dir else "contains no model"
        return (), [f"{url} {what}\n{describe_invalid(layout, names)}"]
    by_model = _by_model(judged)
    messages = []
    for model, problems in list(by_model.items())[:_SHOWN_MODELS]:
        names = await _names(f"{url}/{model}" if location.prefix.is_dir else url, environ, deadline, url)
        reasons = "\n".join(problem.message for problem in problems[:_SHOWN_MODELS])
        messages.append(f"{reasons}\n{describe_invalid(layout, names)}")
    if len(by_model) > _SHOWN_MODELS:
        messages.append(f"{len(by_model) - _SHOWN_MODELS} more models of {url} are invalid")
    return judged.models, messages


async def _detect_models(
    location: ModelLocation, models: Sequence[Model], environ: Mapping[str, str], deadline: float, downloads: _Downloads
) -> tuple[list[Detection], list[str]]:
    """Detect the formats of the models of a location; return them, and why some can't be served without code.

    With another type than `model`, the format is fixed, and a replica reports what is wrong with the files.
    """
    url = location.prefix.url
    detections: list[Detection] = []
    messages: list[str] = []
    for model in models[:_DETECTED_MODELS]:
        try:
            if is_remote(url):
                found = await _detect_remote(model.latest.url, environ, deadline, downloads)
            else:
                found = await asyncio.to_thread(detect, model.latest.url, url)
            if found is not None and location.api.handler.type == ANY_MODEL:
                check_trust(found, trusts_pickle(location.api))
                check_signature(found)
        except ModelFormatError as error:
            messages += [str(error)] if location.api.handler.type == ANY_MODEL else []
        else:
            detections += [found] if found is not None else []
    return detections, messages


async def _detect_remote(
    url: str, environ: Mapping[str, str], deadline: float, downloads: _Downloads
) -> Detection | None:
    """Detect the format of a version in a bucket; None if that takes too long, or needs files that are too large.

    Raises: ModelFormatError, which names the bucket's files.
    """
    folder = downloads.path(url)
    if url not in downloads.complete:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                downloads.complete[url] = await download_small_files(url, folder, environ, _MAX_DOWNLOAD_BYTES)
        except (StorageError, TimeoutError):
            return None
    try:
        found = await asyncio.to_thread(detect, folder)
    except ModelFormatError as error:
        if not downloads.complete[url]:
            return None
        raise ModelFormatError(_with_url(str(error), folder, url)) from None
    return replace(found, reason=_with_url(found.reason, folder, url), path=_with_url(found.path, folder, url))


def _with_url(text: str, folder: Path, url: str) -> str:
    """Return a text with the URL of a model instead of the folder that it was downloaded to."""
    file = folder / folder.name  # if the model is a single file
    return text.replace(str(file), url).replace(str(folder), url)


def _by_model(judged: CheckedListing) -> dict[str, list[ModelProblem]]:
    invalid: dict[str, list[ModelProblem]] = {}
    for problem in judged.problems:
        if (problem.model, problem.version) in judged.invalid:
            invalid.setdefault(problem.model, []).append(problem)
    return invalid


async def _names(url: str, environ: Mapping[str, str], deadline: float, root: str | None = None) -> list[str]:
    """Return some names at `url`; fewer or none if that takes too long or fails."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await sample_names(url, environ, root=root)
    except (StorageError, TimeoutError):
        return []


def packages_of(
    api: Api, detections: Sequence[Detection], project: ProjectFiles
) -> tuple[dict[str, str], list[PackageConflict]]:
    """Return the packages for the models of an API, see `choose_packages`, and the conflicts among them.

    A project with a script or conda packages installs what its models need itself.
    """
    files = api.handler.dependencies
    if project.text(files.shell).strip() or project.text(files.conda).strip():
        return {}, []
    found = [each for each in detections if each.format != "tensorflow" or _runs_tensorflow(api)]
    is_trusted = trusts_pickle(api) or api.handler.type != ANY_MODEL
    return choose_packages(found, project.text(files.pip), is_trusted)


def _runs_tensorflow(api: Api) -> bool:
    """Return whether the processes of an API run SavedModels, instead of TensorFlow Serving or Inferentia's runtime."""
    has_server = shutil.which(SERVER) is not None and find_spec("tensorflow") is None
    return api.handler.tensorflow_serving is None and not api.compute.inf and not has_server
