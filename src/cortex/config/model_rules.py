"""Rules of models: which fields go together, with which types of code, and that local models are there.

Pure but for a look whether a local path exists; what is inside a model's folder is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from cortex.config.project import ProjectFiles
from cortex.config.schema import Api
from cortex.config.schema_models import LOCAL_SERVING, STORES, Models
from cortex.config.values import nearest, quote
from cortex.config.violations import Violation, absent, is_file, is_folder

_MODELS = "handler.models"
_FORMS = ("path", "paths", "dir")


def model_violations(api: Api) -> Iterator[Violation]:
    """Check what an API says about models, all but whether they are there."""
    handler = api.handler
    if handler.models is not None:
        yield from _form_violations(handler.models)
        yield from _cache_violations(api, handler.models)
    elif handler.type != "python":
        message = f"must be defined with type {handler.type}"
        yield Violation((_MODELS,), message, 'write "models:" with "path: s3://bucket/path"')
    if handler.type != "tensorflow":
        for place in _tensorflow_places(api):
            message = f"cannot be used with type {handler.type}, only with tensorflow"
            yield Violation((place, "handler.type"), message, "remove it")


def model_file_violations(api: Api, project: ProjectFiles) -> Iterator[Violation]:
    """Check that models which are not in a store are in the project, or on this machine."""
    if api.handler.model is not None:
        yield from _location_violations("handler.model", api.handler.model, project)
    models = api.handler.models
    if models is None:
        return
    if models.path is not None:
        yield from _location_violations(f"{_MODELS}.path", models.path, project)
    for index, entry in enumerate(models.paths or ()):
        yield from _location_violations(f"{_MODELS}.paths.{index}.path", entry.path, project)
    if models.dir is not None:
        yield from _location_violations(f"{_MODELS}.dir", models.dir, project, folder=True)


def _form_violations(models: Models) -> Iterator[Violation]:
    given = [f"{_MODELS}.{form}" for form in _FORMS if getattr(models, form) is not None]
    every = tuple(f"{_MODELS}.{form}" for form in _FORMS)
    if not given:
        message = "must have one of path, paths and dir"
        yield Violation((_MODELS, *every), message, 'write "path: s3://bucket/path" in it')
    elif len(given) > 1:
        # At the later ones: the first is what a reader sees as right.
        for place in given[1:]:
            yield Violation((place, given[0]), f"cannot be used together with {{{given[0]}}}", "remove one of them")
    names = Counter(entry.name for entry in models.paths or ())
    seen: set[str] = set()
    for index, entry in enumerate(models.paths or ()):
        if names[entry.name] > 1 and entry.name in seen:
            place = f"{_MODELS}.paths.{index}.name"
            yield Violation((place,), f"{quote(entry.name)} is the name of another model", "rename one")
        seen.add(entry.name)


def _cache_violations(api: Api, models: Models) -> Iterator[Violation]:
    size, on_disk, memory = (f"{_MODELS}.{key}" for key in ("cache_size", "disk_cache_size", "cache_memory"))
    if models.cache_size is not None and models.disk_cache_size is None:
        fix = f'add "disk_cache_size: {models.cache_size}" or more'
        yield Violation((size, on_disk), "needs disk_cache_size beside it", fix)
    elif models.cache_size is None and models.disk_cache_size is not None:
        fix = f'add "cache_size: {models.disk_cache_size}" or less'
        yield Violation((on_disk, size), "needs cache_size beside it", fix)
    elif (models.cache_size or 0) > (models.disk_cache_size or 0):
        message = f"cache_size cannot be greater than disk_cache_size ({models.cache_size} > {models.disk_cache_size})"
        yield Violation((size, on_disk), message, f"set disk_cache_size to at least {models.cache_size}")
    limit = api.compute.mem_limit
    if models.cache_memory is not None and limit is not None and models.cache_memory >= limit:
        places = (memory, "compute.mem_limit")
        yield Violation(places, "cache_memory must be less than mem_limit", "lower cache_memory, or raise mem_limit")
    if not models.is_cached:
        return
    caches = (size, memory) if models.cache_size is not None else (memory,)
    if api.handler.processes_per_replica > 1:
        message = f"must be 1 when models are cached (got {api.handler.processes_per_replica})"
        fix = 'remove it; "threads_per_process" and replicas are not bound to 1'
        yield Violation(("handler.processes_per_replica", *caches), message, fix)
    if api.handler.tensorflow_serving not in (None, LOCAL_SERVING):
        message = "must be local when models are cached: another server holds what it holds"
        fix = f'write "{LOCAL_SERVING}", or remove the limits on models'
        yield Violation(("handler.tensorflow_serving", *caches), message, fix)


def _tensorflow_places(api: Api) -> Iterator[str]:
    handler = api.handler
    if handler.signature_key is not None:
        yield "handler.signature_key"
    if handler.tensorflow_serving is not None:
        yield "handler.tensorflow_serving"
    if handler.models is None:
        return
    if handler.models.signature_key is not None:
        yield f"{_MODELS}.signature_key"
    for index, entry in enumerate(handler.models.paths or ()):
        if entry.signature_key is not None:
            yield f"{_MODELS}.paths.{index}.signature_key"


def _location_violations(
    place: str, location: str, project: ProjectFiles, *, folder: bool = False
) -> Iterator[Violation]:
    if location.startswith(STORES):
        return
    if location.startswith("/"):
        is_there = is_folder(Path(location))
        if not is_there and not is_file(Path(location)):
            yield Violation((place,), f"{quote(location)}: path does not exist", "correct the path")
        elif folder and not is_there:
            yield _not_a_folder(place, location)
    elif project.contains(location):
        if folder:
            yield _not_a_folder(place, location)
    elif not project.has_folder(location):
        yield Violation((place,), *_absent_model(location, project))


def _absent_model(location: str, project: ProjectFiles) -> tuple[str, str]:
    if is_folder(project.root / location):
        return f"{quote(location)}: has no files, or has been excluded from your project directory", "see .cortexignore"
    if is_file(project.root / location):
        return absent(location, project)
    folders = {str(parent) for file in project.files for parent in PurePosixPath(file).parents if parent.name}
    near = nearest(location.removeprefix("./").rstrip("/"), folders.union(project.files))
    fix = f"did you mean {quote(near)}?" if near else "create it, or correct the path"
    return f"{quote(location)}: path does not exist", fix


def _not_a_folder(place: str, location: str) -> Violation:
    return Violation((place,), f"{quote(location)}: is a file, not a folder", "name the folder that models are in")
