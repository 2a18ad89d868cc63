"""What a worker is told of its job: the arguments of the user's constructor. Pure."""

from __future__ import annotations

import copy
from typing import Any

from cortex.config.schema import Api
from cortex.home import Home
from cortex.jobs.http.view import spec_json
from cortex.jobs.spec import Assignment, JobRecord

#: How long a lease holds without being renewed.
LEASE_S = 30.0


def assignment_of(record: JobRecord, worker: str, home: Home) -> Assignment:
    """Return what a worker of a job is given."""
    api = Api.read_stored(record.origin.spec)
    config = merged(api.handler.config, record.options.config or {})
    return Assignment(
        job_id=record.id,
        config=config,
        job_spec=spec_json(record),
        api_spec=_api_spec(api, config),
        log_path=str(home.logs_dir / record.origin.api / record.id / f"{worker}.log"),
        lease_s=LEASE_S,
        batch_timeout_s=record.options.batch_timeout_s,
    )


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge maps into maps; of any other value, that of `over` stays."""
    result = copy.deepcopy(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = merged(below, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _api_spec(api: Api, config: dict[str, Any]) -> dict[str, Any]:
    data = api.model_dump(mode="json")
    handler = {**data["handler"], "config": config}
    section = handler.pop("interface")
    kept = {key: data[key] for key in ("name", "kind", "compute", "networking")}
    return {**kept, section: handler}
