"""A batch API in a real installation, whose items are instructions to its code, and its jobs."""

from __future__ import annotations

import json
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex.client.client import Client
from harness.installations.installation import Installation, write_project
from harness.replicas.replicas import Answer
from harness.wait import wait_until

#: An item is returned with a note of the process that had it; an object is an instruction carried out first.
HANDLER = """
    import ctypes, json, os, pathlib, time

    VERSION = "{version}"

    class Handler:
        def __init__(self, config, job_spec):
            self.folder = pathlib.Path(config["folder"])
            self.job_id = job_spec["job_id"]
            self.note("constructed")
            if config.get("broken") or (self.folder / (self.job_id + ".broken")).exists():
                raise RuntimeError("no weights")

        def handle_batch(self, payload, batch_id):
            self.note("called " + batch_id)
            for item in payload:
                if isinstance(item, dict):
                    self.act(item)
            return [{{"item": item, "version": VERSION, "pid": os.getpid()}} for item in payload]

        def act(self, item):
            do = item.get("do")
            if do == "raise" and VERSION in item.get("until", VERSION):
                raise ValueError("can't do " + str(item["number"]))
            elif do == "exit":
                os._exit(3)
            elif do == "close descriptors":
                os.closerange(3, 4096)
            elif do == "null dereference":
                ctypes.string_at(0)
            elif do == "sleep":
                if "unless" not in item or not (self.folder / item["unless"]).exists():
                    time.sleep(item["s"])
            elif do == "wait":
                gate = self.folder / item["gate"]
                while not gate.exists():
                    time.sleep(0.01)
            elif do == "print":
                print(item["text"], flush=True)

        def on_job_complete(self):
            self.note("completed")
            end = self.folder / (self.job_id + ".end")
            if end.exists():
                gate = end.read_text()
                if gate == "raise":
                    raise ValueError("the end can't be done")
                while not (self.folder / gate).exists():
                    time.sleep(0.01)

        def note(self, what):
            with open(self.folder / (self.job_id + ".notes"), "a") as notes:
                notes.write(what + " " + str(os.getpid()) + " " + VERSION + "\\n")
"""

CONFIG = """
    - name: {name}
      kind: BatchAPI
      handler:
        type: python
        path: handler.py
        config:
          folder: {notes}
      networking:
        local_paths: [{temporary}]
        buckets: ["s3://models", "s3://bucket", "s3://no-such-bucket"]
        webhook_hosts: [127.0.0.1]
      compute:
        cpu: {cpu}
"""


@dataclass
class BatchApi:
    """One API, with its clients' operations."""

    cortex: Installation
    name: str
    folder: Path  #: of the project, with the notes and gates of its batches in a folder inside

    @classmethod
    def deployed(
        cls, cortex: Installation, folder: Path, name: str, version: str = "1", cpu: str | float = "20m"
    ) -> BatchApi:
        """Deploy it, or a new version of it."""
        api = cls(cortex, name, folder)
        api.notes.mkdir(parents=True, exist_ok=True)
        config = CONFIG.format(name=name, notes=api.notes, cpu=cpu, temporary=tempfile.gettempdir())
        write_project(folder / "project", HANDLER.format(version=version), config)
        cortex.cortex("deploy", folder / "project")
        return api

    @property
    def notes(self) -> Path:
        """The folder of the batches' notes and gates."""
        return self.folder / "notes"

    @property
    def client(self) -> Client:
        """The Python client of this installation."""
        return self.cortex.client

    def post(self, submission: Any, query: str = "", **more: Any) -> Answer:
        """Submit by HTTP, at the gateway."""
        return self.cortex.post(f"/{self.name}{query}", submission, **more)

    def submit(self, items: list[Any], workers: int = 1, batch_size: int = 1, **fields: Any) -> str:
        """Submit a list of items; return the job's id."""
        listed = {"items": items, "batch_size": batch_size}
        return self.accepted({"workers": workers, "item_list": listed, **fields})

    def accepted(self, submission: Any) -> str:
        """Make a submission that must be accepted; return the job's id."""
        reply = self.post(submission)
        assert reply.status == 200, reply
        return str(reply.json["job_id"])

    def status(self, job: str) -> dict[str, Any]:
        """Return a job's `job_status`, from the gateway."""
        reply = self.cortex.post(f"/{self.name}?jobID={job}", method="GET")
        assert reply.status == 200, reply
        status: dict[str, Any] = reply.json["job_status"]
        return status

    def ended(self, job: str, wanted: str = "succeeded", timeout_s: float = 40) -> dict[str, Any]:
        """Wait until a job is over; check the sum of its counts and its status."""

        def over() -> dict[str, Any] | None:
            status = self.status(job)
            return status if status["end_time"] else None

        try:
            status = wait_until(over, timeout_s) or {}
        except AssertionError:
            raise AssertionError(self.trace(job)) from None
        assert status["status"] == wanted, self.trace(job)
        metrics = status["batch_metrics"]
        if wanted in ("succeeded", "completed_with_failures"):
            assert metrics["succeeded"] + metrics["failed"] == status["total_batch_count"], status
            assert (metrics["failed"] > 0) == (wanted == "completed_with_failures"), status
        return status

    def reached(self, job: str, wanted: str, timeout_s: float = 20) -> dict[str, Any]:
        """Wait until a job has a status."""

        def there() -> dict[str, Any] | None:
            status = self.status(job)
            return status if status["status"] == wanted else None

        try:
            return wait_until(there, timeout_s) or {}
        except AssertionError:
            raise AssertionError(self.trace(job)) from None

    def noted(self, job: str, what: str = "") -> list[list[str]]:
        """Return the notes that batches of a job left, word by word."""
        path = self.notes / f"{job}.notes"
        complete = path.read_text().rpartition("\n")[0] if path.exists() else ""  # the last line may be unfinished
        lines = [line.split() for line in complete.splitlines()]
        return [line for line in lines if line and line[0].startswith(what)]

    def wait_for_notes(self, job: str, what: str, count: int = 1, timeout_s: float = 20) -> list[list[str]]:
        """Wait until there are this many notes of a kind."""
        try:
            return wait_until(lambda: len(found := self.noted(job, what)) >= count and found, timeout_s) or []
        except AssertionError:
            raise AssertionError(self.trace(job)) from None

    def open(self, gate: str) -> None:
        """Open the gate that batches wait for."""
        (self.notes / gate).touch()

    def results(self, job: str) -> list[dict[str, Any]]:
        """Return the results, batch by batch."""
        return list(self.client.job_results(self.name, job))

    def dead_letters(self, job: str) -> list[dict[str, Any]]:
        """Return the dead letters."""
        return list(self.client.dead_letters(self.name, job))

    def returned(self, job: str) -> list[Any]:
        """Return the items in the results, which must be in the order of the input, without repetition."""
        lines = self.results(job)
        seqs = [line["seq"] for line in lines]
        assert seqs == sorted(set(seqs))
        return [returned["item"] for line in lines for returned in line["result"]]

    def trace(self, job: str) -> str:
        """Describe a job for the message of a failed test."""
        done = self.cortex.cortex("logs", self.name, job, check=False)
        status = json.dumps(
            self.cortex.post(f"/{self.name}?jobID={job}", method="GET").json.get("job_status"), indent=1
        )
        notes = "\n".join(map(" ".join, self.noted(job)[-20:]))
        return textwrap.indent(f"{status}\n{notes}\n{done.stdout[-3000:]}{done.stderr}\n{self.cortex.log()}", "  ")
