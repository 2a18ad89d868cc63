"""Load the user's class for jobs: its code and models once per process, an object of it for each job.

It must not know where batches come from, nor what becomes of what is returned.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortex.models.spec import Catalogue
from cortex.predictor.binding import result_kind
from cortex.predictor.code import LoadSpec, UserCode, build_clients, import_code
from cortex.predictor.interface import ON_JOB_COMPLETE, TASK
from cortex.predictor.source_checks import declared_names
from cortex.predictor.task import task_call, unless_it_exits

if TYPE_CHECKING:
    from cortex.models.loader import LoadEvents, ModelFetcher
    from cortex.predictor.clients.python import Clients

BatchCall = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class BoundBatch:
    """The user's object of one job; whatever its methods are, the calls return once they are done."""

    call: BatchCall  #: (payload, batch id) → what the user's method returned; of generators a list
    on_job_complete: Callable[[], Any] | None  #: None if the class has no such method


class BatchCode:
    """The user's class, and its models where they are the same for all jobs; for one thread."""

    def __init__(
        self, code: UserCode, build: Callable[[], Clients | None], clients: Clients | None, metrics: object
    ) -> None:
        self._code = code
        self._build = build
        self._clients = clients
        self._metrics = metrics
        self._is_fresh = True
        self._loop = _Loop()

    def construct(self, config: dict[str, Any], job_spec: dict[str, Any], api_spec: dict[str, Any]) -> BoundBatch:
        """Make the object of a job; that of the job before is not to be called any more.

        `config` is the API's with the job's merged over it. Raises: UserError; the next job may still do better.
        """
        clients = self._clients_of_next()
        values = {
            "config": copy.deepcopy(config),
            "job_spec": job_spec,
            "api_spec": api_spec,
            "metrics_client": self._metrics,
        }
        if TASK in self._code.found.values():
            return BoundBatch(unless_it_exits(self._loop.waiting(task_call(self._code, values))), None)
        instance = self._code.make(values, clients)
        if clients is not None and clients.registry is not None:
            clients.registry.load_latest()  # finds those that are loaded
        (name,) = self._code.found
        names = declared_names(getattr(instance, name), self._code.generation.method_signature)
        call = _bind_arguments(getattr(instance, name), names)
        hook = getattr(instance, ON_JOB_COMPLETE, None)
        return BoundBatch(self._loop.waiting(call), None if hook is None else self._loop.waiting(hook))

    def close(self) -> None:
        """Unload the models and end what runs them; nothing may be called any more."""
        self._loop.close()
        if self._clients is not None:
            self._clients.close()

    def _clients_of_next(self) -> Clients | None:
        if self._clients is not None and self._clients.bind is not None and not self._is_fresh:
            # `load_model` of another object, with another job's config, made the models that are there.
            before, self._clients = self._clients, self._build()
            before.close()
        self._is_fresh = False
        return self._clients


def load_batch_code(
    spec: LoadSpec,
    catalogue: Catalogue | None = None,
    fetcher: ModelFetcher | None = None,
    events: LoadEvents | None = None,
    metrics: object = None,
) -> BatchCode:
    """Import and check the user's code, and load its models; the caller has made the project the working directory.

    Models that the user's own `load_model` makes are loaded with each job's object. `catalogue` says which there are,
    `metrics` is what a constructor gets that declares `metrics_client`.

    Raises: UserError as `loader.load` does.
    """
    code = import_code(spec)
    build = functools.partial(build_clients, spec, catalogue, fetcher, events)
    clients = build()
    try:
        if clients is not None and clients.registry is not None and clients.bind is None:
            clients.registry.load_latest()
    except BaseException:
        assert clients is not None
        clients.close()
        raise
    return BatchCode(code, build, clients, metrics)


def _bind_arguments(f: Any, names: tuple[str, ...]) -> BatchCall:
    """Build the cheapest call that passes just `names`."""
    absent = dict.fromkeys(name for name in names if name in ("query_params", "headers"))
    if absent:  # they belong to requests; a batch has none
        f = functools.partial(f, **absent)
    if "request_id" in names:  # what the caller of an AsyncAPI knows a workload by
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


class _Loop:
    """An event loop for coroutines, one for all calls, so that what they open stays usable; made when first needed."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` such that it returns values only."""

        def wait(*args: Any) -> Any:
            result = call(*args)
            return result if result is None else self._value_of(result)

        return wait

    def close(self) -> None:
        """Cancel what coroutines left running."""
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
            self._runner = asyncio.Runner()
        # The runner would keep the context of its first call.
        return self._runner.run(coroutine, context=contextvars.copy_context())


async def _wait(result: Any) -> Any:
    return await result


async def _collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]
