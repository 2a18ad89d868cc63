"""Public bug reports as rows of tables: a small project, what is observed when it is called, and the right value."""

from __future__ import annotations

import contextlib
import socket
import textwrap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.installations.installation import Installation
from harness.replicas.replicas import Answer
from harness.wait import PATIENCE_S

REALTIME = """
    - name: t
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
"""


@dataclass(frozen=True)
class ReportedApi:
    """The deployed project of a report, whose first API is `t`."""

    cortex: Installation
    folder: Path  #: of the project

    def post(self, payload: Any = None, path: str = "", **options: Any) -> Answer:
        """Send one request; `options` are those of `Installation.post`: `body`, `method`, headers."""
        return self.cortex.post(f"/t{path}", payload, **options)

    def post_together(self, payloads: list[Any], **options: Any) -> list[Answer]:
        """Send all payloads at once, each on a connection of its own; the answers are in the same order."""
        with ThreadPoolExecutor(len(payloads)) as clients:
            return list(clients.map(lambda payload: self.post(payload, **options), payloads))

    def exchange(self, request: bytes, *, half_close: bool = False) -> bytes:
        """Send bytes on a new connection to the gateway, and return everything that arrives until it ends."""
        with socket.create_connection((self.cortex.host, self.cortex.gateway_port), PATIENCE_S) as connection:
            connection.sendall(request)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@dataclass(frozen=True)
class Report:
    """One report: `observe` calls the API, and returns what must equal `right`."""

    name: str  #: a sentence about the right behaviour
    reference: str  #: of the public issue, such as bentoml#5547
    source: str  #: handler.py
    observe: Callable[[ReportedApi], object]
    right: object
    config: str = REALTIME  #: cortex.yaml
    files: Mapping[str, bytes] = field(default_factory=dict)  #: other files of the project

    def __str__(self) -> str:
        return f"{self.reference} {self.name}"


@contextlib.contextmanager
def deployed_report(report: Report, cortex: Installation, folder: Path) -> Iterator[ReportedApi]:
    """Deploy the project of a report, and delete its APIs afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in report.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "handler.py").write_text(textwrap.dedent(report.source))
    (folder / "cortex.yaml").write_text(textwrap.dedent(report.config))
    try:
        cortex.client.deploy_file(folder, wait=True)
        yield ReportedApi(cortex, folder)
    finally:
        cortex.clear()
