"""Real job workers for tests: a supervisor with a scripted operator."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.replicas.replicas import Replica, complete_lines, running_replica
from harness.replicas.scripted_operator import TOKEN, ScriptedJob, ScriptedOperator, scripted_operator
from harness.wait import wait_until


@dataclass
class JobReplica:
    """A running job worker and its operator."""

    replica: Replica
    operator: ScriptedOperator
    folder: Path

    def submit(self, batches: Sequence[Any], name: str = "job-1", **fields: Any) -> ScriptedJob:
        payloads = [json.dumps(batch).encode() for batch in batches]
        return self.operator.add(ScriptedJob(name, payloads, str(self.log_path(name)), **fields))

    def log_path(self, name: str = "job-1") -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str = "job-1") -> str:
        return complete_lines(self.log_path(name))

    def wait_for(self, condition: Any, timeout_s: float = 10.0) -> Any:
        return wait_until(condition, timeout_s, message=self.replica.log() + self.log())

    def wait_for_next_process(self) -> int:
        """Wait until the process of the second job asks for it; return its pid."""
        joins = self.operator.joins
        self.wait_for(lambda: len(set(joins)) == 2 and self.replica.status().processes[0].pid == joins[-1])
        return joins[-1]

    def wait_over(self, job: ScriptedJob, timeout_s: float = 15.0) -> None:
        self.wait_for(lambda: job.is_over, timeout_s)


@contextlib.contextmanager
def running_job_worker(source: str, interface: str = "handler", **fields: Any) -> Iterator[JobReplica]:
    """Run a job worker of a project of one file. Names are short because paths of Unix sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="cj-") as name:
        folder = Path(name)
        with (
            scripted_operator(folder) as operator,
            running_replica(
                source, interface, kind="BatchAPI", jobs_socket=operator.socket, jobs_token=TOKEN, **fields
            ) as replica,
        ):
            yield JobReplica(replica, operator, folder)
