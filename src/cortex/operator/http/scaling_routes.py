"""The operator's route that says why an API has as many replicas as it has."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from cortex.errors import InputError
from cortex.operator.autoscaling.policy import Policy
from cortex.operator.replicas.plan import wanted_replicas
from cortex.operator.views import Operator


def scaling_routes(operator: Operator) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/apis")

    @router.get("/{api}/scaling")
    async def scaling(api: str) -> dict[str, Any]:
        """Return an API's policy and the last decisions about its number of replicas, the oldest first."""
        record = operator.require(api)
        if not record.spec.kind.has_replicas:
            raise InputError(f"{api} is a {record.kind}: it has no replicas to scale")
        return {
            "api": api,
            "requested": wanted_replicas(record),
            "policy": asdict(Policy.of(record.spec)),
            "decisions": [decision.to_json() for decision in operator.scaling.decisions(api)],
        }

    return router
