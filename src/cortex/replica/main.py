"""The entry of a worker: load the user's code, say so to the supervisor, serve until told to stop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import os
import sys
import traceback
from functools import partial
from pathlib import Path

import uvloop

from cortex.errors import UserError
from cortex.models.memory import configure_allocator
from cortex.models.priority import enter_background, in_background
from cortex.models.spec import Catalogue
from cortex.predictor.loader import BoundPredictor, load
from cortex.replica.app import App
from cortex.replica.cells import Cells
from cortex.replica.channel import Channel
from cortex.replica.connections import Connections
from cortex.replica.devices import process_environ
from cortex.replica.models import ModelEvents, ModelStart
from cortex.replica.payload import make_headers
from cortex.replica.runner import Runner
from cortex.replica.spec import ReplicaSpec


def run_worker(spec: ReplicaSpec, index: int, channel: Channel, cells: Cells, models: ModelStart | None) -> int:
    """Serve as process `index` of a replica; returns the exit code."""
    faulthandler.enable()
    try:
        _enter_project(spec, index)
        predictor = _load(spec, channel, models)
    except UserError as error:
        sys.stderr.write(f"{error.in_full()}\n")
        channel.send_failure(str(error), error.traceback)
        return 1
    except BaseException as error:  # the edge of the process: ours, or the user's beyond Exception
        text = traceback.format_exc()
        sys.stderr.write(text)
        channel.send_failure(f"{type(error).__name__}: {error}", text)
        return 1
    gc.freeze()  # models stay: no collection has to walk them
    _serve(spec, predictor, channel, cells)
    _run_exit_hooks()
    enter_background()  # giving back the memory of big models takes a while
    return 0


def _load(spec: ReplicaSpec, channel: Channel, start: ModelStart | None) -> BoundPredictor:
    if start is None or spec.models is None:
        return load(spec)
    from cortex.models.fetcher import Fetcher  # noqa: PLC0415 - others start sooner without

    configure_allocator()
    fetcher = Fetcher(spec.model_agent_socket or "", spec.api, spec.models)
    with in_background(start.is_standby):
        return load(spec, start.catalogue, fetcher, ModelEvents(channel), start.also)


def _enter_project(spec: ReplicaSpec, index: int) -> None:
    os.chdir(spec.project_dir)
    paths = [spec.project_dir]
    if spec.python_path:
        paths.append(str(Path(spec.project_dir) / spec.python_path))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["CORTEX_API_NAME"] = spec.api
    os.environ["CORTEX_REPLICA_ID"] = spec.id
    os.environ["CORTEX_PROCESS_INDEX"] = str(index)
    os.environ["CORTEX_LOG_LEVEL"] = spec.log_level
    os.environ |= process_environ(spec, index)


def _serve(spec: ReplicaSpec, predictor: BoundPredictor, channel: Channel, cells: Cells) -> None:
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    kinds = {method.kind for method in predictor.methods.values()}
    if any(method.needs_headers or method.needs_query_params for method in predictor.methods.values()):
        make_headers(())  # imports starlette, which the first request would otherwise wait for
    shares_loop = bool(kinds & {"async", "async_generator"})
    slots = max(spec.threads, spec.max_concurrency) if shares_loop else spec.threads
    # Any call may find its model cold, or be the first of a process that took over, and would keep those waiting that
    # other threads could run.
    waits_for_models = spec.threads > 1 and spec.models is not None
    runner = Runner(loop, spec.threads, always_threads="generator" in kinds or waits_for_models)
    app = App(spec, predictor, runner, loop, slots)
    connections = Connections(app, cells, loop, channel, partial(_update_models, predictor))

    def stop() -> None:
        loop.remove_reader(channel.fileno())
        runner.stop()

    channel.sock.setblocking(False)
    loop.add_reader(channel.fileno(), partial(connections.on_message, stop))
    channel.send("ready", slots=slots, shares_loop=shares_loop)
    runner.run()
    app.shutdown()


def _update_models(predictor: BoundPredictor, catalogue_file: str) -> None:
    if predictor.registry is not None:
        predictor.registry.update(Catalogue.from_json(Path(catalogue_file).read_bytes()))


def _run_exit_hooks() -> None:
    """Do what Python does at exit; the process itself ends by `os._exit`, as a fork must."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
