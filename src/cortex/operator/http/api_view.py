"""APIs as JSON, as `GET /v1/apis` returns them."""

from __future__ import annotations

import asyncio
from typing import Any

from cortex.config.schema import Api
from cortex.errors import GatewayError
from cortex.jobs.http.view import status_json
from cortex.lifecycle import ApiKind
from cortex.operator.http.services import Services
from cortex.operator.jobs.service import NO_JOBS
from cortex.operator.replicas.status import as_metadata, describe_models
from cortex.state.apis import ApiRecord
from cortex.telemetry import Logger

Json = dict[str, Any]

_logger = Logger("cortex.operator")
#: Sections of the spec that only APIs with code have.
_CODE_SECTIONS = ("handler", "compute", "autoscaling")


async def describe_api(services: Services, record: ApiRecord) -> Json:
    """Return one API, with its latest jobs if it runs jobs."""
    described = _describe(services, record, await _gateway_metrics(services))
    if record.spec.kind.runs_jobs:
        jobs = await services.jobs.list(record.name)
        described |= (await services.jobs.summaries()).get(record.name, NO_JOBS)
        described["schedule"] = await services.schedules.describe(record)
        name = "task_job_statuses" if record.spec.kind is ApiKind.TASK else "batch_job_statuses"
        described[name] = [status_json(job) for job in jobs]
    if record.spec.tracker is not None:
        described["tracker"] = await asyncio.to_thread(services.tracking.describe, record)
    return described


async def describe_apis(services: Services) -> list[Json]:
    """Return every API."""
    metrics, records = await _gateway_metrics(services), services.apis.records()
    jobs = await services.jobs.summaries() if any(record.spec.kind.runs_jobs for record in records) else {}
    return [
        _describe(services, record, metrics) | (jobs.get(record.name, NO_JOBS) if record.spec.kind.runs_jobs else {})
        for record in records
    ]


async def _gateway_metrics(services: Services) -> dict[str, Json]:
    try:
        stats = await services.gateway.stats()
    except GatewayError as error:
        _logger.warning("gateway statistics are unavailable", error=error)
        return {}
    return {
        name: {
            "requests": {f"{kind}xx": api.responses.get(kind, 0) for kind in range(1, 6)},
            "in_flight": api.in_flight,
            "queued": api.queued,
            "average_ms": api.average_ms,
        }
        for name, api in stats.items()
    }


def _describe(services: Services, record: ApiRecord, metrics: dict[str, Json]) -> Json:
    versions = services.apis.versions(record.name)
    models = describe_models(services.reconciler.statuses(record.name))
    return {
        "spec": _without_secrets(record.spec),
        "status": services.reconciler.state(record).to_json(),
        "metrics": metrics.get(record.name, {}),
        "open_workloads": services.jobs.open_workloads(record.name),
        "endpoint": services.identity.gateway_url + record.spec.networking.endpoint,
        "deployment": record.deployment,
        "api_id": record.api_id,
        "revision": record.revision,
        "models": models,
        "realtime_model_metadata": as_metadata(models) if models else None,
        "last_updated": record.updated_at.isoformat(),
        "api_versions": [
            {"api_id": version.api_id, "last_updated": version.deployed_at.isoformat()} for version in versions
        ],
    }


def _without_secrets(spec: Api) -> Json:
    """Return a spec with the values of its environment variables masked: they may be secrets."""
    data = spec.model_dump(mode="json")
    if spec.kind is ApiKind.SPLITTER:
        return {name: value for name, value in data.items() if name not in _CODE_SECTIONS}
    data["handler"]["env"] = dict.fromkeys(data["handler"]["env"], "********")
    return data
