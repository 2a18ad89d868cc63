"""Rules of what only some kinds of APIs have: batching of requests, the APIs behind a splitter, and schedules. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cortex.config.schema import Api
from cortex.config.schema_models import LOCAL_SERVING
from cortex.config.values import quote
from cortex.config.violations import Violation
from cortex.lifecycle import ApiKind

BATCHING = "handler.server_side_batching"


def batching_violations(api: Api) -> Iterator[Violation]:
    """Check that the code can be given batches of requests."""
    handler = api.handler
    if (batching := handler.server_side_batching) is None:
        return
    if handler.type == "onnx":
        message = "cannot be used with type onnx"
        yield Violation((BATCHING, "handler.type"), message, "remove it, or run the session from Python code")
    if handler.type != "tensorflow":
        return
    # There each request keeps its own call, and runs of the model are joined: of no more calls than there are threads.
    calls = handler.processes_per_replica * handler.threads_per_process
    if batching.max_batch_size > calls:
        size = f"{BATCHING}.max_batch_size"
        message = (
            "max_batch_size cannot be greater than processes_per_replica times threads_per_process "
            f"({batching.max_batch_size} > {calls})"
        )
        threads = math.ceil(batching.max_batch_size / handler.processes_per_replica)
        places = (size, "handler.threads_per_process", "handler.processes_per_replica")
        yield Violation(places, message, f"set threads_per_process to at least {threads}")
    if handler.tensorflow_serving not in (None, LOCAL_SERVING):
        message = "cannot be used with a server elsewhere, which batches as it was told to"
        yield Violation((BATCHING, "handler.tensorflow_serving"), message, "remove one of them")


def splitter_violations(api: Api) -> Iterator[Violation]:
    """Check that what a splitter shares out comes to a whole."""
    if api.kind is not ApiKind.SPLITTER:
        return
    if not api.apis:
        yield Violation(("apis",), "must be defined", 'write "apis:" with "- name: my-api" and "weight: 100" below it')
        return
    seen: set[str] = set()
    shadows = 0
    for index, traffic in enumerate(api.apis):
        place = f"apis.{index}"
        if traffic.name in seen:
            yield Violation((f"{place}.name",), f"{quote(traffic.name)} is in the list already", "remove one of them")
        seen.add(traffic.name)
        shadows += traffic.shadow
        if traffic.shadow and shadows > 1:
            yield Violation((f"{place}.shadow",), "only one API can be the shadow", "remove it, or this API")
    total = sum(traffic.weight for traffic in api.apis if not traffic.shadow)
    if total != 100:
        at = [f"apis.{index}.weight" for index, traffic in enumerate(api.apis) if not traffic.shadow]
        places = (at[-1],) if at else ("apis",)
        message = f"the weights of all APIs but a shadow must sum up to 100 (got {total})"
        yield Violation(places, message, "change the weights" if at else "add an API that is no shadow")


def schedule_violations(api: Api) -> Iterator[Violation]:
    """Check that a schedule has something to submit."""
    if api.schedule is not None and api.kind is ApiKind.BATCH and not api.schedule.submission:
        message = "must be defined: a job of a BatchAPI needs its input"
        fix = 'write "submission:" with what you would post, such as "workers" and "delimited_files"'
        yield Violation(("schedule.submission",), message, fix)
