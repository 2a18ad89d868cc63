"""A fake operator with scripted responses for the routes of jobs."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

from cortex.lifecycle import JobStatus
from harness.jobs.job_data import job
from harness.servers.answering import Server, reply

DONE = job(JobStatus.SUCCEEDED, succeeded=100, succeeded_items=1000)
SUBMISSION = {"workers": 2, "item_list": {"items": [1, 2], "batch_size": 1}}


class Operator(Server):
    """Sends the responses of each route in order, and repeats the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, list[Any]] = {}
        self.answering = self.answer

    def respond(self, route: str, *answers: Any) -> None:
        """Set the responses to `METHOD path`: JSON, lines as bytes, or errors as (status, message)."""
        self.answers[route] = list(answers)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        left = self.answers.get(f"{handler.command} {handler.path}")
        if left is None:
            reply(handler, 404, b'{"error": "no such route here", "code": "not_found"}')
            return
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, tuple):
            code = {400: "bad_submission", 404: "not_found", 409: "conflict"}[answer[0]]
            reply(handler, answer[0], json.dumps({"error": answer[1], "code": code}).encode())
        else:
            reply(handler, 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def bodies(self) -> list[bytes]:
        """Return the bodies of all POST requests."""
        return [body for method, _, _, body in self.requests if method == "POST"]
