"""Build the specs of replicas and job workers: a deployed API in, all settings of a supervisor out."""

from __future__ import annotations

import secrets
from dataclasses import asdict, replace

from cortex.config.api_spec import api_spec
from cortex.config.schema import Api, Compute
from cortex.config.values import fraction
from cortex.engine.environment import Prepared, setup_of
from cortex.home import Home
from cortex.models.source import loads_models, model_source, trusts_pickle
from cortex.state.revision import Revision
from cortex.worker.spec import ReplicaSpec, RequestLimits


def limits_of(api: Api) -> RequestLimits:
    """Return what an API configures for each request, and can change while replicas run."""
    networking = api.networking
    return RequestLimits(
        timeout_s=networking.timeout_s,
        max_body_bytes=networking.max_body_size,
        on_disconnect=networking.on_disconnect,
        websocket_idle_s=networking.websocket_idle_timeout_s,
    )


def replica_spec(home: Home, revision: Revision, prepared: Prepared) -> ReplicaSpec:
    """Return the spec of a new replica of a revision, with its own id and sockets."""
    api = revision.spec
    handler, unique = api.handler, secrets.token_hex(3)
    replica_id = f"{api.name}-{revision.hash[:8]}-{unique}"
    sockets = home.sockets_dir / secrets.token_hex(5)  # short: the limit of socket paths is 104 characters
    processes, batching = handler.processes_per_replica, handler.server_side_batching
    project_dir = home.projects_dir / revision.project_hash
    record = api.networking.record
    return ReplicaSpec(
        id=replica_id,
        api=api.name,
        revision=revision.hash,
        interface=handler.interface,
        project_dir=str(project_dir),
        path=handler.path or "",
        python=prepared.python,
        run_dir=str(home.replicas_dir / replica_id),
        sockets=tuple(f"{sockets}-{index}" for index in range(processes)),
        control_socket=f"{sockets}-c",
        log_path=str(home.logs_dir / api.name / f"{replica_id}.log"),
        python_path=handler.python_path,
        config=handler.config,
        api_spec=api_spec(api),
        model_path=prepared.model_path,
        env=dict(prepared.env),
        threads=handler.threads_per_process,
        pin_processes=handler.pin_processes,
        preload=handler.preload,
        max_concurrency=max(1, api.autoscaling.max_replica_concurrency // processes),
        **asdict(limits_of(api)),
        mem_limit_bytes=api.compute.mem_limit,
        log_level=handler.log_level,
        type=handler.type,
        app=handler.app,
        command=tuple(handler.command or ()),
        endpoint=api.networking.endpoint if api.runs_command else "",
        strip_prefix=handler.strip_prefix,
        start_timeout_s=handler.start_timeout_s,
        protobuf_path=handler.protobuf_path,
        models=model_source(api, project_dir),
        trusts_pickle=trusts_pickle(api),
        model_agent_socket=str(home.model_agent_socket) if loads_models(api) else None,
        tensorflow_serving=handler.tensorflow_serving,
        cpu=api.compute.cpu or 0.0,
        mem_bytes=api.compute.mem or 0,
        gpu=api.compute.gpu,
        inf=api.compute.inf,
        kind=api.kind.value,
        metrics_dir=str(home.metrics_dir / replica_id),
        max_batch_size=batching.max_batch_size if batching else 0,
        batch_interval_s=batching.batch_interval_s if batching else 0.0,
        isolates_failures=batching.isolate_failures if batching else True,
        tracker_key=api.tracker.key if api.tracker else None,
        tracker_type=api.tracker.model_type if api.tracker else None,
        readiness=api.readiness,
        record_share=fraction(record.share) if record else 0.0,
        record_max_cpu=fraction(record.max_cpu) if record else 1.0,
        record_max_bytes=record.max_size if record else 0,
        record_redact=tuple(record.redact or ()) if record else (),
        record_to=(record.to or str(home.recordings_dir)) if record else "",
        node_groups=tuple(api.compute.node_groups or ()),
        setup=setup_of(revision) if not prepared.python else None,
    )


def worker_spec(home: Home, revision: Revision, prepared: Prepared, job_id: str) -> ReplicaSpec:
    """Return the spec of a new job worker. The caller adds the token."""
    spec = replica_spec(home, revision, prepared)
    log_path = home.logs_dir / spec.api / job_id / f"{spec.id}.log"
    cpu = worker_compute(revision.spec).cpu or 0.0
    return replace(spec, cpu=cpu, jobs_socket=str(home.jobs_socket), log_path=str(log_path))


def worker_compute(api: Api) -> Compute:
    """Return the compute of a job worker, which always includes cores, to limit the number of workers."""
    compute = api.compute
    return compute if compute.cpu else compute.model_copy(update={"cpu": Compute().cpu})
