"""Routes of the operator itself: liveness, status, metrics, shutdown."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from cortex.operator.http.services import Services

Json = dict[str, Any]


def operator_routes(services: Services) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Json:
        """Return 200 while the operator is alive; needs no token."""
        return {"ok": True}

    @router.get("/v1/status")
    async def status() -> Json:
        """Return the operator, the gateway and every process of every replica."""
        return _status(services)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return all metrics in the Prometheus text format."""
        return Response(await services.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.post("/v1/shutdown")
    async def shutdown(all: bool = False) -> Json:
        """Shut down the operator; with `all`, stop the gateway and every replica first."""
        services.shut_down(all)
        return {"stopping": True}

    return router


def _status(services: Services) -> Json:
    identity, cluster, model_agent_pid = services.identity, services.cluster, services.model_agent.pid
    replicas = sorted((status for _, status in services.engine.replicas().values()), key=lambda status: status.id)
    return {
        "operator": {
            "pid": identity.process.pid,
            "url": identity.url,
            "version": identity.version,
            "started_at": identity.started_at.isoformat(),
        },
        "gateway": {"pid": services.gateway.pid, "url": identity.gateway_url},
        "gateways": cluster.fleet.describe() if cluster else [],
        "cluster": cluster and {"problem": cluster.placer.reason, "nodes": _nodes_up(services)},
        "models": {"pid": model_agent_pid} if model_agent_pid else None,
        "replicas": [process for status in replicas for process in status.describe_processes()],
    }


def _nodes_up(services: Services) -> list[str]:
    links = services.cluster.engine.nodes if services.cluster else {}
    return sorted(host for host, link in links.items() if link.is_up)
