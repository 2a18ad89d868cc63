"""Measure the log lines per second that an operator forwards: `python -m benchmarks.log_lines`.

The node agents are real, each with the log of one replica. The operator's side is its own code without HTTP; the CPU
time is that side's only.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cortex.cluster.node_client import LeaderAddress, NodeClient
from cortex.operator.http.log_streams import stream_logs
from cortex.telemetry import Logger

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from harness.cluster.local_nodes import CREDENTIALS, LocalNode, local_nodes  # noqa: E402

_API = "talks"
_TEXT = "a line of a usual length, with a number of its own and a few words more about what was asked and answered"


class _Nobody:
    """Owner of node connections that are only used for logs."""

    def node_is_up(self, link: NodeClient) -> None: ...

    def node_is_lost(self, link: NodeClient, reason: str) -> None: ...

    def replica_changed(self, link: NodeClient, replica_id: str) -> None: ...

    async def project_archive(self, project_hash: str) -> tuple[Path, str]:
        raise NotImplementedError


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.log_lines", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--lines", type=int, default=100_000, help="number of lines per node")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), options.nodes) as nodes:
        for number, node in enumerate(nodes):
            _write(node, number, options.lines)
        asyncio.run(_measure(nodes, options.lines * options.nodes))


def _write(node: LocalNode, number: int, count: int) -> None:
    folder = node.home.logs_dir / _API
    folder.mkdir(parents=True)
    first = datetime(2026, 1, 1, tzinfo=UTC)
    with (folder / f"{_API}-aaaaaaaa-{number:06x}.log").open("w") as file:
        for line in range(count):
            at = (first + timedelta(milliseconds=line)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            file.write(f"{at} 0 o {line} {_TEXT}\n")


async def _measure(nodes: Sequence[LocalNode], count: int) -> None:
    identity, leader = CREDENTIALS.identity, LeaderAddress("127.0.0.1", 1, 1)
    links = [NodeClient(node.address, identity, leader, _Nobody(), Logger("bench")) for node in nodes]
    for follow in (False, True):
        began, cpu = time.perf_counter(), time.process_time()
        seen = 0
        async for text in stream_logs(links, _API, None, follow, count).body_iterator:
            seen += str(text).count("\n")
            if seen >= count:
                break
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        what = "followed" if follow else "merged"
        print(f"{what}: {seen:,} lines of {len(links)} nodes, {seen / took:,.0f}/s, {cpu / seen * 1e6:.1f} µs CPU each")


if __name__ == "__main__":
    main()
