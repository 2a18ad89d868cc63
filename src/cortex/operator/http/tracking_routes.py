"""The operator's route that takes what was right, of predictions made before."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from cortex.jobs.intake.request_body import read_body
from cortex.operator.monitoring.feedback import MAX_FEEDBACK_BYTES, parse_feedback
from cortex.operator.monitoring.tracking import require_tracker
from cortex.operator.views import Operator
from cortex.replica.tracker import CLASSIFICATION


def tracking_routes(operator: Operator) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/apis")

    @router.post("/{api}/feedback")
    async def feedback(api: str, request: Request) -> dict[str, Any]:
        """Take the truth about predictions: `{"request_id", "truth"}`, a list of such, or one such object per line."""
        record = operator.require(api)
        counts_classes = require_tracker(record).model_type == CLASSIFICATION
        body = await read_body(request, MAX_FEEDBACK_BYTES, fix="post it in parts")
        told = await asyncio.to_thread(parse_feedback, body, counts_classes)
        return await asyncio.to_thread(operator.tracking.tell, record, told)

    return router
