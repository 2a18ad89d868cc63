"""Load the user's class for jobs and tasks, and construct its object: once per process, since each job has its own.

This module has no notion of where batches come from, nor of what happens to results.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cortex.models.spec import Catalogue
from cortex.payloads.annotations import takes_list
from cortex.payloads.json_object import Json
from cortex.payloads.payload_type import PayloadType
from cortex.payloads.signature import ApiSignature
from cortex.predictor.binding import Bodies, bind_types, bodies_of, method_signature, result_kind
from cortex.predictor.interface import BATCH, ON_JOB_COMPLETE, TASK
from cortex.predictor.interface_rules import declared_names
from cortex.predictor.loader import LoadSpec, UserCode, build_clients, import_code

if TYPE_CHECKING:
    from cortex.models.loader import LoadEvents, ModelFetcher
    from cortex.predictor.clients.builder import Clients

BatchCall = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class BoundBatch:
    """The user's object of one job. Calls are synchronous, also for async methods and generators."""

    call: BatchCall  #: (payload, batch id) → result of the user's method; a list for generators
    on_job_complete: Callable[[], Any] | None  #: None if the class does not define it
    signature: ApiSignature
    bodies: Bodies = Bodies.BY_TYPE  #: of workloads
    payload_type: PayloadType | None = None  #: of batches and workloads; None: they are not validated


class BatchCode:
    """The user's class and its models, for one job. Not thread-safe."""

    def __init__(self, code: UserCode, clients: Clients | None, metrics: object) -> None:
        self._code = code
        self._clients = clients
        self._metrics = metrics
        self._loop = _Loop()

    @property
    def class_name(self) -> str | None:
        """Return the name of the user's class."""
        return self._code.generation.class_name

    def construct(self, config: dict[str, Any], job_spec: dict[str, Any], api_spec: dict[str, Any]) -> BoundBatch:
        """Construct the object of the job, with the API's config merged with that of the job. Raises: UserError."""
        clients = self._clients
        values = {
            "config": copy.deepcopy(config),
            "job_spec": job_spec,
            "api_spec": api_spec,
            "metrics_client": self._metrics,
        }
        if TASK in self._code.serving_methods.values():
            return self._bind_task(values)
        instance = self._code.construct(values, clients)
        if clients is not None and clients.registry is not None:
            clients.registry.load_latest()  # reuses models that are loaded already
        (name,) = self._code.serving_methods
        method, generation = getattr(instance, name), self._code.generation
        names = declared_names(method, generation.method_signature)
        call = self._loop.synchronous(_bind_arguments(method, names))
        hook = getattr(instance, ON_JOB_COMPLETE, None)
        on_job_complete = None if hook is None else self._loop.synchronous(hook)
        has_items = BATCH in generation.methods.values()
        types = bind_types(method, name, generation, _list_of if has_items else None)
        found = method_signature(method, name, "POST", names, types)
        if has_items and found.payload is not None:
            found = replace(found, payload=replace(found.payload, schema=_schema_of_item(found.payload.schema)))
        signature = ApiSignature((found,))
        return BoundBatch(call, on_job_complete, signature, bodies_of(method, generation), types.payload)

    def _bind_task(self, values: Mapping[str, Any]) -> BoundBatch:
        """Bind the task, whose calls construct its object."""
        (name,) = self._code.serving_methods
        method = getattr(self._code.target, name)
        call = _accept_exit(self._loop.synchronous(_task_call(self._code, values)))
        return BoundBatch(call, None, ApiSignature((method_signature(method, name, "POST", ()),)))

    def close(self) -> None:
        """Unload the models and stop their backend; no object may be called afterwards."""
        self._loop.close()
        if self._clients is not None:
            self._clients.close()


def load_batch_code(
    spec: LoadSpec,
    catalogue: Catalogue | None = None,
    fetcher: ModelFetcher | None = None,
    events: LoadEvents | None = None,
    metrics: object = None,
) -> BatchCode:
    """Import and check the user's code, and load its models. The project must be the working directory.

    Models that need the user's `load_model` are loaded for the object of each job. `catalogue` lists the models;
    `metrics` is passed to constructors that declare `metrics_client`.

    Raises: UserError as `loader.load` does.
    """
    code = import_code(spec)
    clients = build_clients(spec, catalogue, fetcher, events)
    try:
        if clients is not None and clients.registry is not None and clients.bind is None:
            clients.registry.load_latest()
    except BaseException:
        assert clients is not None
        clients.close()
        raise
    return BatchCode(code, clients, metrics)


def _list_of(annotation: Any) -> Any:
    """Return the annotation of a batch, a list of items: the annotation itself, or a list of it if it is one item's.

    So a class can annotate `handle_post` for one request, and run jobs with it as well.
    """
    return annotation if takes_list(annotation) else list[annotation]


def _schema_of_item(schema: Json) -> Json:
    """Return the schema of an item from that of a list; {} if the list has none for all items."""
    items = schema.get("items")
    if not isinstance(items, dict):
        return {}
    return items if "$defs" not in schema else {**items, "$defs": schema["$defs"]}


def _bind_arguments(f: Any, names: tuple[str, ...]) -> BatchCall:
    """Return the fastest call that passes exactly `names`."""
    absent = dict.fromkeys(name for name in names if name in ("query_params", "headers"))
    if absent:  # batches are not HTTP requests
        f = functools.partial(f, **absent)
    if "request_id" in names:  # the id of a workload of an AsyncAPI
        if "payload" in names:
            return lambda payload, batch_id: f(payload=payload, request_id=batch_id)
        return lambda payload, batch_id: f(request_id=batch_id)
    calls: dict[tuple[bool, bool], BatchCall] = {
        (False, False): lambda payload, batch_id: f(),
        (True, False): lambda payload, batch_id: f(payload=payload),
        (False, True): lambda payload, batch_id: f(batch_id=batch_id),
        (True, True): lambda payload, batch_id: f(payload=payload, batch_id=batch_id),
    }
    return calls["payload" in names, "batch_id" in names]


def _task_call(code: UserCode, values: Mapping[str, Any]) -> BatchCall:
    """Return a call that constructs and runs the task.

    The object is constructed in the call: the task has started by then, so an exception of its constructor fails it.
    """
    names = declared_names(code.target.__init__, code.generation.constructor_signature)
    arguments = {name: values[name] for name in names if name in values}

    def call(payload: Any, batch_id: str) -> Any:
        return code.target(**arguments)(copy.deepcopy(values["config"]))

    return call


def _accept_exit(call: BatchCall) -> BatchCall:
    """Let `sys.exit()` or `sys.exit(0)` end a task successfully, as in a script; other exit codes fail it."""

    def guarded(payload: Any, batch_id: str) -> Any:
        try:
            return call(payload, batch_id)
        except SystemExit as error:
            if error.code in (None, 0):
                return None
            raise

    return guarded


class _Loop:
    """A lazily created event loop, one for all calls, so that connections opened in one call work in the next."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def synchronous(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call` so that it awaits coroutines and collects generators."""

        def wait(*args: Any) -> Any:
            result = call(*args)
            return result if result is None else self._value_of(result)

        return wait

    def close(self) -> None:
        """Cancel tasks that are still running."""
        if self._runner is not None:
            self._runner.close()

    def _value_of(self, result: Any) -> Any:
        while (kind := result_kind(result)) != "sync":
            if kind == "generator":
                return list(result)
            result = self._run(_collect(result) if kind == "async_generator" else _wait(result))
        return result

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:
            # With a factory, the loop does not become the current loop of this thread, which belongs to user code.
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        # Without an explicit context, the runner would reuse the context of its first call.
        return self._runner.run(coroutine, context=contextvars.copy_context())


async def _wait(result: Any) -> Any:
    return await result


async def _collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]
