"""Compare installations of two revisions of cortex in turn: `python -m benchmarks.revisions BEFORE AFTER`.

Both serve the same no-op. Each argument is the `cortex` command of an environment in which the revision is installed,
for example that of a `git worktree`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint
from benchmarks.tools.load import require_wrk
from benchmarks.tools.processes import adopt_orphans, tree
from benchmarks.tools.side_by_side import Case, compare, table
from benchmarks.tools.workloads import NOOP


@dataclass(frozen=True)
class _Revision(Cortex):
    executable: str = ""

    def command(self, *arguments: str) -> list[str]:
        return [self.executable, *arguments]

    def serving(self) -> list[psutil.Process]:
        status = self.status()
        return tree([status["gateway"]["pid"], *(replica["supervisor_pid"] for replica in status["replicas"])])


def main() -> None:
    """Load both in turn; print requests per second, latency and CPU per request of gateway and replica."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    parser.add_argument("executables", nargs=2, metavar="CORTEX", help="path of a cortex command")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    require_wrk()
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        cases = []
        for name, executable in zip(("before", "after"), options.executables, strict=True):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cortex-bench-"))
            prepared = Cortex.in_folder(Path(folder))
            revision = _Revision(
                prepared.folder, prepared.gateway_port, prepared.operator_port, str(Path(executable).absolute())
            )
            stack.enter_context(revision.up())
            revision.deploy(NOOP.name)
            cases.append(Case(NOOP.name, name, Endpoint(revision.gateway_port, "/noop"), NOOP, revision.serving))
        print(table(compare(cases, options.concurrency, options.rounds, options.seconds)))


if __name__ == "__main__":
    main()
