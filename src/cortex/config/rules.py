"""Rules between the fields of one API, and between an API and its project's files.

Pure: each rule looks at a checked `Api` and yields what is wrong by place in the current form. `validate.py` finds
the line and the key as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from cortex.config.kind_rules import BATCHING, batching_violations, schedule_violations, splitter_violations
from cortex.config.model_rules import model_file_violations, model_violations
from cortex.config.project import ProjectFiles
from cortex.config.sample_rules import sample_violations
from cortex.config.schema import MAX_NAME_LENGTH, MIN_CORES, MIN_MEMORY_BYTES, Api
from cortex.config.values import nearest, quote
from cortex.config.violations import Violation, absent, closest_file
from cortex.lifecycle import ApiKind


def field_violations(api: Api) -> Iterator[Violation]:
    """Check the fields of one API against each other and against the bounds that depend on its generation."""
    yield from _kind_violations(api)
    yield from _replica_violations(api)
    yield from _concurrency_violations(api)
    yield from _compute_violations(api)
    yield from model_violations(api)
    yield from batching_violations(api)
    yield from splitter_violations(api)
    yield from schedule_violations(api)
    strategy = api.update_strategy
    if {strategy.max_surge.rstrip("%"), strategy.max_unavailable.rstrip("%")} == {"0"}:
        places = ("update_strategy.max_unavailable", "update_strategy.max_surge")
        yield Violation(places, "max_surge and max_unavailable cannot both be 0", "raise one of them")
    if api.deployment is None and len(api.name) > MAX_NAME_LENGTH:
        yield Violation(
            ("name",), f"cannot be longer than {MAX_NAME_LENGTH} characters (got {len(api.name)})", "shorten it"
        )
    if api.handler.interface == "handler" and api.name.startswith("b-"):
        yield Violation(("name",), f'{quote(api.name)} cannot start with "b-"', "rename the API")


def _kind_violations(api: Api) -> Iterator[Violation]:
    if api.kind is ApiKind.ASYNC:
        fix = 'remove it: "autoscaling" says how many workloads are worked on at the same time'
    elif api.kind.runs_jobs:
        fix = 'remove it: a submission says how many "workers" its job has'
    else:
        return
    for key in ("processes_per_replica", "threads_per_process"):
        if getattr(api.handler, key) > 1:
            message = f"{key} key is not supported for {api.kind} kind"
            yield Violation((f"handler.{key}",), message, fix)


def _replica_violations(api: Api) -> Iterator[Violation]:
    low, high, first = api.autoscaling.min_replicas, api.autoscaling.max_replicas, api.autoscaling.init_replicas
    minimum, maximum, initial = "autoscaling.min_replicas", "autoscaling.max_replicas", "autoscaling.init_replicas"
    if low > high:
        message = f"min_replicas cannot be greater than max_replicas ({low} > {high})"
        yield Violation((minimum, maximum), message, f"set max_replicas to at least {low}")
    elif first > high:
        message = f"init_replicas cannot be greater than max_replicas ({first} > {high})"
        yield Violation((initial, maximum, minimum), message, f"set init_replicas to at most {high}")
    elif first < low:
        message = f"init_replicas cannot be less than min_replicas ({first} < {low})"
        yield Violation((initial, minimum), message, f"set init_replicas to at least {low}")
    target = api.autoscaling.target_cpu_utilization
    # Later files of that family measured against the request, so that more than 100 % made sense.
    if target is not None and target > 100 and api.handler.interface == "functions":
        yield Violation(
            ("autoscaling.target_cpu_utilization",),
            f"must be less than or equal to 100 (got {target})",
            "write 100 or less",
        )


def _concurrency_violations(api: Api) -> Iterator[Violation]:
    target, most = api.target_concurrency, api.autoscaling.max_replica_concurrency
    if target > most:
        message = f"target_replica_concurrency cannot be greater than max_replica_concurrency ({target:g} > {most})"
        places = ("autoscaling.target_replica_concurrency", "autoscaling.max_replica_concurrency")
        others = ("handler.processes_per_replica", "handler.threads_per_process", f"{BATCHING}.max_batch_size")
        yield Violation((*places, *others), message, f"set max_replica_concurrency to at least {target:g}")


def _compute_violations(api: Api) -> Iterator[Violation]:
    compute = api.compute
    if api.deployment is None:
        if compute.cpu is not None and compute.cpu < MIN_CORES:
            yield Violation(
                ("compute.cpu",), "must be greater than or equal to 20m (got {got})", 'write something like "200m" or 1'
            )
        for name, size in (("mem", compute.mem), ("mem_limit", compute.mem_limit)):
            if size is not None and size < MIN_MEMORY_BYTES:
                fix = 'write something like "512Mi" or "2Gi"'
                yield Violation((f"compute.{name}",), "must be greater than or equal to 20Mi (got {got})", fix)
    if compute.mem is not None and compute.mem_limit is not None and compute.mem_limit < compute.mem:
        yield Violation(("compute.mem_limit", "compute.mem"), "mem_limit cannot be less than mem", "raise mem_limit")
    if compute.inf and api.handler.type == "onnx":
        yield Violation(("compute.inf", "handler.type"), "inf cannot be used with type onnx", "remove inf")
    if compute.inf and compute.gpu:
        yield Violation(("compute.inf", "compute.gpu"), "inf and gpu cannot be used together", "remove one of them")
    processes = api.handler.processes_per_replica
    if compute.inf and (compute.inf * 4) % processes:
        message = f"{processes} processes cannot share {compute.inf * 4} NeuronCores evenly"
        yield Violation(("handler.processes_per_replica", "compute.inf"), message, "use 1, 2 or 4")


def project_violations(api: Api, project: ProjectFiles, named: frozenset[str]) -> Iterator[Violation]:
    """Check that the files an API names are in its project; `named` are the places that the user wrote."""
    if api.kind is not ApiKind.SPLITTER:
        yield from _code_violations(api, project)
    python_path = api.handler.python_path
    if python_path is not None and not project.has_folder(python_path):
        message = f"{quote(python_path)}: path does not exist, or has been excluded from your project directory"
        folders = {f"{parent}/" for file in project.files for parent in PurePosixPath(file).parents if parent.name}
        near = nearest(python_path, folders)
        yield Violation(
            ("handler.python_path",), message, f"did you mean {quote(near)}?" if near else "correct the path"
        )
    for name in ("pip", "conda", "shell"):
        place, file = f"handler.dependencies.{name}", getattr(api.handler.dependencies, name)
        if place in named and not project.contains(file):
            yield Violation((place,), *absent(file, project))
    yield from model_file_violations(api, project)
    yield from sample_violations(api, project)


def _code_violations(api: Api, project: ProjectFiles) -> Iterator[Violation]:
    path = api.handler.path
    suffixes = (".py",) if api.handler.interface == "functions" else (".py", ".pickle")
    if not project.contains(path):
        yield Violation(("handler.path",), *absent(path, project, suffixes))
    elif not path.endswith(suffixes):
        message = f"{quote(path)} must be a {' or '.join(suffixes)} file"
        yield Violation(("handler.path",), message, closest_file(path, project, suffixes))
