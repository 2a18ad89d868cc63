"""A Prometheus server that collects the metrics of an installation."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.ports import free_port
from harness.wait import wait_until


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    port: int

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.loads(response.read())

    def query(self, expression: str) -> list[Any]:
        """Return the series of a query. Raises: HTTPError if Prometheus refuses it."""
        return list(self.get("api/v1/query", query=expression)["data"]["result"])


@contextlib.contextmanager
def prometheus(folder: Path, target: str, token: str, rules: Path) -> Iterator[Prometheus]:
    """Start a server that reads `target`, `host:port` of an operator, every second."""
    folder.mkdir()
    (folder / "token").write_text(token)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "cortex",
                "authorization": {"credentials_file": str(folder / "token")},
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    server = Prometheus(free_port())
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{server.port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: _is_ready(server, process))
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(server: Prometheus, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Prometheus ended"
    try:
        return bool(server.get("api/v1/query", query="up")["status"] == "success")
    except OSError:
        return False
