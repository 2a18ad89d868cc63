"""Server-side batching of the Open Inference Protocol: one run of a model for several requests, joined along axis 0.

`RequestBatcher` collects the requests, as it does for other methods. Those of one batch that have the model, version,
parameters and datatypes in common are joined; each of the others is a run of its own. So is each request of a joined
run that fails, unless the API has `isolate_failures: false`, or that returns other than one row per row.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import orjson

from cortex.predictor.binding import BoundMethod
from cortex.predictor.inference.inference_model import MethodModel
from cortex.predictor.loader import BoundPredictor
from cortex.worker.http.connection import Connection
from cortex.worker.requests.calls import Arguments, Caller
from cortex.worker.requests.inference_routes import INFERENCE, InferenceCall, InferenceRoutes, inference_kinds
from cortex.worker.requests.payload import Encoded
from cortex.worker.spec import ReplicaSpec

if TYPE_CHECKING:
    from cortex.predictor.inference.inference_model import Arrays

#: A parameter that does not change what a model computes.
_FORM_OF_ANSWERS = "binary_data_output"

#: Yields a call to run, with joined inputs or None for its own, and receives its outputs or an exception.
Runs = Generator[tuple[InferenceCall, "Arrays | None"], Any, list[Any]]


class InferenceCaller(Caller):
    """Decodes inference requests; responses are encoded by the joined method."""

    def __init__(self, api: str, predictor: BoundPredictor, routes: InferenceRoutes) -> None:
        super().__init__(api, predictor)
        self._routes = routes

    def parse_arguments(self, connection: Connection, method: BoundMethod) -> Arguments:
        """Return the decoded request in place of the payload. Raises: V2Error."""
        return self._routes.decode(connection), None, None


def joined_method(spec: ReplicaSpec, predictor: BoundPredictor, routes: InferenceRoutes) -> BoundMethod | None:
    """Return the method that answers several inference requests; None if each is a call of its own."""
    models = predictor.inference_models
    if not spec.batches_calls or not models:
        return None
    is_async = "async" in inference_kinds(models)
    run = _drive_async if is_async else _drive
    return BoundMethod(
        name=next((each.name for each in models.values() if isinstance(each, MethodModel)), "infer"),
        arguments=("payload",),
        needs_payload=True,
        needs_query_params=False,
        needs_headers=False,
        kind="async" if is_async else "sync",
        call=lambda calls, *_: run(_runs(routes, spec.isolates_failures, calls)),
        signature=INFERENCE,
    )


def _runs(routes: InferenceRoutes, isolates: bool, calls: list[InferenceCall]) -> Runs:
    """Yield the runs of all calls; return their responses, or exceptions."""
    groups: dict[Hashable, list[int]] = {}
    for index, call in enumerate(calls):
        groups.setdefault(_key(call) or index, []).append(index)
    results: dict[int, Any] = {}
    for group in groups.values():
        members = [calls[index] for index in group]
        results |= zip(group, (yield from _runs_of_group(routes, isolates, members)), strict=True)
    return [results[index] for index in range(len(calls))]


def _key(call: InferenceCall) -> Hashable | None:
    """Return what calls must have in common to be joined; None if this one can't be joined."""
    from cortex.predictor.inference.batching import joining_key  # noqa: PLC0415 - imports numpy

    key = joining_key(call.signature, call.inputs)
    if key is None:
        return None
    parameters = {name: value for name, value in call.header.parameters.items() if name != _FORM_OF_ANSWERS}
    is_method = isinstance(call.model, MethodModel)  # others ignore the parameters
    return call.route.model, call.route.version, orjson.dumps(parameters) if is_method else b"", key


def _runs_of_group(routes: InferenceRoutes, isolates: bool, group: list[InferenceCall]) -> Runs:
    from cortex.predictor.inference.batching import join, split  # noqa: PLC0415 - imports numpy

    if len(group) > 1:
        inputs = [call.inputs for call in group]
        outputs = yield group[0], join(inputs)
        if not isinstance(outputs, Exception):
            if (parts := split(outputs, inputs)) is not None:
                return [_encoded(routes, call, part) for call, part in zip(group, parts, strict=True)]
        elif not isolates:
            return [outputs] * len(group)
    results = []
    for call in group:
        outputs = yield call, None
        results.append(outputs if isinstance(outputs, Exception) else _encoded(routes, call, outputs))
    return results


def _drive(runs: Runs) -> list[Any]:
    outputs: Any = None
    try:
        while True:
            call, inputs = runs.send(outputs)
            try:
                outputs = call.run(inputs)
            except Exception as error:  # of the user's code or of the model
                outputs = error
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _drive_async(runs: Runs) -> list[Any]:
    outputs: Any = None
    try:
        while True:
            call, inputs = runs.send(outputs)
            try:
                outputs = call.run(inputs)
                if isawaitable(outputs):
                    outputs = await outputs
            except Exception as error:  # as above
                outputs = error
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _encoded(routes: InferenceRoutes, call: InferenceCall, outputs: Arrays) -> Encoded | Exception:
    try:
        return routes.encode(call, outputs)
    except Exception as error:  # of this request alone
        return error
