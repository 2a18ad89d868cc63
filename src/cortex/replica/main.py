"""The entry of a worker: load the user's code, say so to the supervisor, serve until told to stop."""

from __future__ import annotations

import asyncio
import gc
from functools import partial
from pathlib import Path

import uvloop

from cortex.models.spec import Catalogue
from cortex.predictor.loader import BoundPredictor, load
from cortex.processes.priority import enter_background, in_background
from cortex.replica.app import App
from cortex.replica.batches import batched_method
from cortex.replica.channel import Channel
from cortex.replica.connections import Connections
from cortex.replica.metric_file import MetricFile
from cortex.replica.models import ModelEvents, ModelStart
from cortex.replica.orphan import Estate, Orphan, outlive_supervisor
from cortex.replica.payload import make_headers
from cortex.replica.process import enter_project, open_metrics, run_exit_hooks, tell_failure
from cortex.replica.readiness import answer_sample
from cortex.replica.runner import Runner
from cortex.replica.shared_state import Cells
from cortex.replica.spec import ReplicaSpec
from cortex.replica.tracker import Tracker
from cortex.replica.user_metrics import MetricsClient, metrics_client


def run_worker(
    spec: ReplicaSpec, index: int, channel: Channel, cells: Cells, models: ModelStart | None, estate: Estate
) -> int:
    """Serve as process `index` of a replica; returns the exit code."""
    try:
        enter_project(spec, index)
        file = open_metrics(spec, index)
        predictor = _load(spec, channel, models, metrics_client(spec, index, file))
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        answer_sample(spec, predictor, loop, channel)
    except BaseException as error:  # the edge of the process: ours, or the user's beyond Exception
        tell_failure(channel, error)
        return 1
    gc.freeze()  # models stay: no collection has to walk them
    orphan = _serve(spec, predictor, loop, channel, cells, file, estate)
    run_exit_hooks()
    orphan.finish()
    enter_background()  # giving back the memory of big models takes a while
    return 0


def _load(spec: ReplicaSpec, channel: Channel, start: ModelStart | None, metrics: MetricsClient) -> BoundPredictor:
    if start is None or spec.models is None:
        return load(spec, metrics=metrics)
    from cortex.models.fetcher import AgentFetcher  # noqa: PLC0415 - others start sooner without
    from cortex.models.memory_budget import configure_allocator  # noqa: PLC0415

    configure_allocator()
    fetcher = AgentFetcher(spec.model_agent_socket or "", spec.api, spec.models)
    with in_background(start.is_standby):
        return load(spec, start.catalogue, fetcher, ModelEvents(channel), start.also, metrics)


def _serve(
    spec: ReplicaSpec,
    predictor: BoundPredictor,
    loop: asyncio.AbstractEventLoop,
    channel: Channel,
    cells: Cells,
    file: MetricFile | None,
    estate: Estate,
) -> Orphan:
    kinds = {method.kind for method in predictor.methods.values()}
    if any(method.needs_headers or method.needs_query_params for method in predictor.methods.values()):
        make_headers(())  # imports starlette, which the first request would otherwise wait for
    shares_loop = bool(kinds & {"async", "async_generator"})
    slots = max(spec.threads, spec.max_concurrency) if shares_loop else spec.threads
    # Any call may find its model cold, or be the first of a process that took over, and would keep those waiting that
    # other threads could run.
    waits_for_models = spec.threads > 1 and spec.models is not None
    runner = Runner(loop, spec.threads, always_threads="generator" in kinds or waits_for_models)
    app = App(spec, predictor, runner, loop, slots, file, _tracker(spec, file))

    def stop() -> None:
        loop.remove_reader(channel.fileno())
        runner.stop()

    orphan = Orphan(app, loop, estate.output, lambda: connections.take_waiting(estate.listener), stop)
    on_catalogue = partial(_update_models, predictor)
    connections = Connections(app, cells, loop, channel, on_catalogue, orphan.on_channel_lost)
    outlive_supervisor()
    channel.sock.setblocking(False)
    loop.add_reader(channel.fileno(), partial(connections.on_message, stop))
    # While one batch runs, the next one has to be able to come, or nobody knows whether it is worth waiting for.
    room = (spec.threads + 1) * spec.max_batch_size if batched_method(spec, predictor) else 0
    channel.send("ready", slots=max(slots, room), shares_loop=shares_loop)
    runner.run()
    app.shutdown()
    return orphan


def _tracker(spec: ReplicaSpec, file: MetricFile | None) -> Tracker | None:
    return Tracker(spec, file) if spec.tracker_type is not None and file is not None else None


def _update_models(predictor: BoundPredictor, catalogue_file: str) -> None:
    if predictor.registry is not None:
        predictor.registry.update(Catalogue.from_json(Path(catalogue_file).read_bytes()))
