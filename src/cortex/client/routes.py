"""Paths of the operator's routes."""

from __future__ import annotations

from urllib.parse import quote

from cortex.errors import InputError


def api_path(api: str) -> str:
    """Return the path of an API. Raises: InputError."""
    if not api:
        raise InputError("the name of the API is empty")
    return f"/v1/apis/{quote(api, safe='')}"


def jobs_path(api: str) -> str:
    """Return the path of an API's jobs. Raises: InputError."""
    return f"{api_path(api)}/jobs"


def job_path(api: str, job: str) -> str:
    """Return the path of a job. Raises: InputError."""
    if not job:
        raise InputError("the id of the job is empty")
    return f"{jobs_path(api)}/{quote(job, safe='')}"
