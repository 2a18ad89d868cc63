"""Routes of APIs, and their JSON: deploy, patch, roll back, refresh, delete, inspect, logs, scaling, feedback."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from cortex.config.schema import Api
from cortex.errors import DatabaseUnavailableError, GatewayError, InputError, NotFoundError, with_article
from cortex.jobs.http.view import status_json
from cortex.jobs.intake.request_body import read_body
from cortex.lifecycle import ApiKind
from cortex.masking import mask_change, mask_spec
from cortex.operator.access.audit import record_change
from cortex.operator.access.auth import caller_of
from cortex.operator.autoscaling.policy import ScalingPolicy
from cortex.operator.canary.trials import TrialOutcome
from cortex.operator.deploy.deployer import DeployResult
from cortex.operator.deploy.projects import dotenv_of
from cortex.operator.http.log_format import DEFAULT_TAIL, MAX_TAIL, LogForm
from cortex.operator.http.log_streams import stream_access_log, stream_logs
from cortex.operator.http.services import Services
from cortex.operator.jobs.service import NO_JOBS
from cortex.operator.monitoring.feedback import MAX_FEEDBACK_BYTES, parse_feedback
from cortex.operator.monitoring.tracking import require_tracker
from cortex.operator.replicas.plan import wanted_replicas
from cortex.operator.replicas.status import as_metadata, describe_models
from cortex.payloads.json_object import Json
from cortex.projects.archive import MAX_PROJECT_BYTES
from cortex.state.queries.apis import ApiRecord
from cortex.state.queries.history import HistoryEntry
from cortex.telemetry import Logger
from cortex.worker.monitoring.tracker import CLASSIFICATION

_logger = Logger("cortex.operator")
#: Sections of the spec that only APIs with code have.
_CODE_SECTIONS = ("handler", "compute", "autoscaling")
#: A configuration file is a few kilobytes.
_MAX_CONFIG_BYTES = 1024 * 1024
#: The archive has the project's files, their names and the configuration.
_MAX_UPLOAD_BYTES = MAX_PROJECT_BYTES + 16 * 1024 * 1024
_MAX_WAIT_S = 60.0
#: Limit on the wait for the gateway's routes after a deploy or a deletion.
_ROUTES_S = 5.0
_NAME = re.compile(r"[a-z][-a-z0-9]{0,63}")


def deploy_routes(services: Services) -> APIRouter:
    """Return the routes that change APIs."""
    router = APIRouter(prefix="/v1")
    deployer = services.deploys.deployer

    @router.post("/deploy")
    async def deploy(
        request: Request,
        config: str | None = None,
        force: bool = False,
        x_cortex_config: Annotated[str | None, Header()] = None,
    ) -> list[Json]:
        """Deploy the APIs of a project: the body is a zip of it, with the configuration file inside."""
        body = await read_body(request, _MAX_UPLOAD_BYTES)
        name = config or x_cortex_config or "cortex.yaml"
        results = await deployer.deploy(body, name, force, request.state.principal, caller_of(request))
        return await _finish(request, services, results)

    @router.post("/patch")
    async def patch(request: Request, force: bool = False) -> list[Json]:
        """Change the configuration of deployed APIs: the body is a `cortex.yaml`."""
        body = await read_body(request, _MAX_CONFIG_BYTES)
        results = await deployer.patch(body, force, request.state.principal, caller_of(request))
        return await _finish(request, services, results)

    @router.post("/apis/{api}/rollback")
    async def rollback(request: Request, api: str, revision: int | None = None, force: bool = False) -> Json:
        """Deploy a revision of an API's history again; by default the one that was live before."""
        result = await deployer.rollback(api, revision, force, caller_of(request), principal=request.state.principal)
        return (await _finish(request, services, [result]))[0]

    @router.post("/apis/{api}/promote")
    async def promote(request: Request, api: str) -> Json:
        """End the trial of an API's newest revision, so that it replaces the old one."""
        return asdict(promote_revision(services, api, caller_of(request)))

    @router.post("/apis/{api}/refresh")
    async def refresh(api: str, force: bool = False) -> Json:
        """Replace every replica of an API."""
        return asdict(await deployer.refresh(api, force))

    @router.delete("/apis/{api}")
    async def delete(api: str, keep_cache: bool = False, force: bool = False) -> Json:
        """Delete an API with its history; `keep_cache` keeps its jobs, their results and the list of its versions.

        `force` is accepted and ignored: the CLI asks its user.
        """
        result = await deployer.delete(api, keep_cache)
        await services.jobs.service.api_deleted(api, keep_cache)
        await services.replicas.reconciler.settled(api, _ROUTES_S)  # callers rely on it: the endpoint is gone on return
        return asdict(result)

    return router


def api_routes(services: Services) -> APIRouter:
    """Return the routes that inspect APIs."""
    router = APIRouter(prefix="/v1/apis")

    @router.get("")
    async def list_apis(request: Request) -> list[Json]:
        """Return every API; with a token limited to one API, only that one."""
        return await describe_apis(services, only=request.state.principal.api)

    @router.get("/{api}")
    async def get_api(api: str) -> Json:
        """Return one API, with the memory of its replicas."""
        described = await describe_api(services, services.api(api))
        if services.api(api).spec.kind.has_replicas:
            described["memory"] = await _memory(services, api)
        return described

    @router.get("/{api}/wait")
    async def wait(api: str, timeout: Annotated[float, Query(ge=0, le=_MAX_WAIT_S)] = 30.0) -> Json:
        """Return one API as soon as it is no longer `updating`, or after `timeout` seconds."""
        services.api(api)
        await services.replicas.reconciler.settled(api, timeout)
        return await describe_api(services, services.api(api))

    @router.get("/{api}/history")
    async def history(api: str) -> list[Json]:
        """Return the revisions of an API that a rollback can deploy again, the newest first."""
        record = services.api(api)
        trial = services.replicas.trials.describe(record)
        return describe_history(services.apis.history(api), record, trial)

    @router.get("/{api}/logs")
    async def logs(
        api: str,
        follow: bool = False,
        replica: str | None = None,
        tail: Annotated[int, Query(ge=0, le=MAX_TAIL)] = DEFAULT_TAIL,
        request: str | None = None,
        json: bool = False,
        access: bool = False,
    ) -> StreamingResponse:
        """Stream the log lines of all replicas of an API, including past replicas, in order of time.

        `request` filters by request id, `json` makes each line a JSON object; with `access`
        the lines are the gateway's access log, one per request.
        """
        folder = services.home.logs_dir / api
        if not _NAME.fullmatch(api) or not (services.apis.get(api) or folder.is_dir()):
            raise NotFoundError(f"{api} is not deployed")
        if access:
            return stream_access_log(services.access_log_sources(), api, request, follow, tail, json)
        return stream_logs(services.log_sources(), api, replica, follow, tail, form=LogForm(json, request))

    @router.get("/{api}/scaling")
    async def scaling(api: str) -> Json:
        """Return an API's autoscaling policy, its latest scaling decisions, oldest first, its canary and its status."""
        record = services.api(api)
        if not record.spec.kind.has_replicas:
            raise InputError(f"{api} is {with_article(record.kind)}: it has no replicas to scale")
        return {
            "api": api,
            "requested": wanted_replicas(record),
            "policy": asdict(ScalingPolicy.of(record.spec)),
            "decisions": [decision.to_json() for decision in services.replicas.autoscaler.decisions(api)],
            "canary": services.replicas.trials.describe(record),
            "status": services.replicas.reconciler.state(record).to_json(),
        }

    @router.post("/{api}/feedback")
    async def feedback(api: str, request: Request) -> Json:
        """Store the truth about predictions: `{"request_id", "truth"}`, a list of such, or one such object per line."""
        record = services.api(api)
        counts_classes = require_tracker(record).model_type == CLASSIFICATION
        body = await read_body(request, MAX_FEEDBACK_BYTES, fix="post it in parts")
        truths = await asyncio.to_thread(parse_feedback, body, counts_classes)
        return await asyncio.to_thread(services.monitoring.tracking.add_feedback, record, truths)

    return router


def promote_revision(services: Services, api: str, by: str) -> DeployResult:
    """Promote the canary of an API. Raises: NotFoundError; ConflictError without a trial."""
    record = services.api(api)
    services.replicas.promote(record, by)
    return DeployResult(api, f"promoting revision {record.number} of {api}")


async def _finish(request: Request, services: Services, results: Sequence[DeployResult]) -> list[Json]:
    """Add what a deploy did to each API to the audit log, wait for its routes, and return it as JSON."""
    for result in results:
        record_change(request, result.error or result.message, result.api, is_done=not result.error)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ROUTES_S):
            await services.replicas.reconciler.publish_now()  # callers rely on it: the endpoints exist on return
    return [asdict(result) for result in results]


async def describe_api(services: Services, record: ApiRecord) -> Json:
    """Return one API, with its latest jobs if it runs jobs."""
    described = _describe(services, record, await _metrics(services, [record]))
    if record.spec.kind.runs_jobs:
        jobs = await services.jobs.service.list(record.name)
        described |= (await services.jobs.service.summaries()).get(record.name, NO_JOBS)
        described["schedule"] = await services.jobs.schedules.describe(record)
        name = "task_job_statuses" if record.spec.kind is ApiKind.TASK else "batch_job_statuses"
        described[name] = await asyncio.to_thread(lambda: [status_json(job) for job in jobs])
    if record.spec.kind.has_replicas and (room := services.replicas.autoscaler.room(record)) is not None:
        described["room"] = asdict(room)
    if (recording := await services.monitoring.metrics.recording(record)) is not None:
        described["recording"] = recording
    if record.spec.tracker is not None:
        described["tracker"] = await asyncio.to_thread(services.monitoring.tracking.describe, record)
    return described


async def describe_apis(services: Services, only: str | None = None) -> list[Json]:
    """Return every API, or `only` the one of this name."""
    records = [record for record in services.apis.records() if only in (None, record.name)]
    metrics = await _metrics(services, records)
    jobs = await services.jobs.service.summaries() if any(record.spec.kind.runs_jobs for record in records) else {}
    return [
        _describe(services, record, metrics) | (jobs.get(record.name, NO_JOBS) if record.spec.kind.runs_jobs else {})
        for record in records
    ]


async def _memory(services: Services, api: str) -> list[Json]:
    """Return the memory of each replica. The kernel visits each page for it: not for routes that clients poll."""
    used = {
        replica: each.memory for replica, each in (await services.monitoring.metrics.usage()).items() if each.api == api
    }
    return [
        {
            "replica": replica,
            "proportional_bytes": each.proportional_bytes,
            "shared_bytes": each.shared_bytes,
            "private_bytes": each.private_bytes,
        }
        for replica, each in sorted(used.items())
    ]


async def _metrics(services: Services, records: list[ApiRecord]) -> dict[str, Json]:
    try:
        stats = await services.infrastructure.gateway.stats()
    except GatewayError as error:
        _logger.warning("gateway statistics are unavailable", error=error)
        return {}
    realtime = [record.name for record in records if record.spec.kind is ApiKind.REALTIME]
    try:
        aborted = await services.monitoring.metrics.aborted(realtime)
    except DatabaseUnavailableError:
        aborted = {}
    return {
        name: {
            "requests": {f"{kind}xx": api.responses.get(kind, 0) for kind in range(1, 6)},
            "aborted": aborted.get(name, 0),
            "in_flight": api.in_flight,
            "queued": api.queued,
            "average_ms": api.average_ms,
        }
        for name, api in stats.items()
    }


def _describe(services: Services, record: ApiRecord, metrics: dict[str, Json]) -> Json:
    versions = services.apis.versions(record.name)
    models = describe_models(services.replicas.reconciler.statuses(record.name))
    endpoint = services.identity.gateway_url + record.spec.networking.endpoint
    return {
        "spec": _without_secrets(record.spec, services.home.projects_dir / record.target.project_hash),
        "status": services.replicas.reconciler.state(record).to_json(),
        "metrics": metrics.get(record.name, {}),
        "open_workloads": services.jobs.service.open_workloads(record.name),
        "endpoint": endpoint,
        "needs_key": services.replicas.documentation.needs_key(record),
        "docs": f"{endpoint}/docs" if services.replicas.documentation.has_page(record) else None,
        "deployment": record.deployment,
        "api_id": record.api_id,
        "revision": record.revision,
        "revision_number": record.number,
        "live_revision_number": record.live_number,
        "canary": services.replicas.trials.describe(record),
        "scaling_shortage": services.replicas.autoscaler.shortage(record),
        "models": models,
        "models_without_code": services.replicas.documentation.models_without_code(record),
        "realtime_model_metadata": as_metadata(models) if models else None,
        "last_updated": record.updated_at.isoformat(),
        "api_versions": [
            {"api_id": version.api_id, "last_updated": version.deployed_at.isoformat()} for version in versions
        ],
    }


def describe_history(history: Sequence[HistoryEntry], record: ApiRecord, trial: Json | None) -> list[Json]:
    """Return the entries of an API's history; `trial` is the description of its last one."""
    ended = {entry.number - 1 for entry in history if entry.ends_canary}
    return [_describe_revision(entry, record, trial, entry.number in ended) for entry in history]


def _describe_revision(entry: HistoryEntry, record: ApiRecord, trial: Json | None, was_rolled_back: bool) -> Json:
    return {
        "number": entry.number,
        "revision": entry.revision,
        "api_id": entry.api_id,
        "action": entry.action,
        "deployed_at": entry.deployed_at.isoformat(),
        "deployed_by": entry.deployed_by or None,
        "project": entry.project_hash,
        "changes": [mask_change(line) for line in entry.changes],  # older versions stored secrets
        "live_at": entry.live_at.isoformat() if entry.live_at else None,
        "is_live": entry.number == record.live_number,
        "is_newest": entry.number == record.number,
        "canary": _canary_of(entry, record, trial, was_rolled_back),
    }


def _canary_of(entry: HistoryEntry, record: ApiRecord, trial: Json | None, was_rolled_back: bool) -> str | None:
    """Return the outcome of the trial of a revision that has only been a canary; None for others."""
    if trial is not None and entry.number == trial["revision_number"]:
        return None if trial["outcome"] == TrialOutcome.PROMOTED else str(trial["outcome"])
    was_canary = entry.spec.update_strategy.canary is not None and entry.live_at is None and entry.number > 1
    if not was_canary or entry.number == record.number:
        return None
    return str(TrialOutcome.ROLLED_BACK) if was_rolled_back else "not promoted"


def _without_secrets(spec: Api, project: Path) -> Json:
    data = spec.model_dump(mode="json", exclude={"as_written"})
    if spec.kind is ApiKind.SPLITTER:
        return {name: value for name, value in data.items() if name not in _CODE_SECTIONS}
    return mask_spec(data, dotenv_of(project))
