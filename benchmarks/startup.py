"""Measure the time until an API is live, and the memory of an idle system: `python -m benchmarks.startup`.

Each repetition uses a new CORTEX_HOME. It runs `cortex deploy` for an API without requirements while nothing runs, and
for a second one while the operator runs, each until the first correct response. Then it reads the memory (PSS) of the
idle processes; that of the zygote, which ends after ten minutes without a start, is listed apart. The second API
reports the age of its processes at the import of its module: the startup time of a replica before user code. The
default ports, 8888 and 8889, must be free.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.tools import machine, processes, report, results
from benchmarks.tools.cortex_cli import Cortex, groups
from benchmarks.tools.endpoint import Endpoint, NotServingError, is_listening
from benchmarks.tools.workloads import JSON, NOOP, Workload

_LIMIT_S = 60.0
#: Of gateway and operator: a first `cortex deploy` starts both, and takes no others.
DEFAULT_PORTS = (8888, 8889)
_STARTUP = Workload("startup", b"{}", JSON, None)

#: Goal, description and unit of each figure.
GOALS = {
    "cold_s": (0.8, "deploy to first 200, nothing running", "s"),
    "warm_s": (0.2, "deploy to first 200, operator running", "s"),
    "control_mb": (72.0, "idle memory of operator and gateway, PSS", "MB"),
    "replica_mb": (24.0, "idle memory of a no-op replica, PSS of all its processes", "MB"),
    "before_user_code_ms": (80.0, "replica start before user code", "ms"),
}


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    if busy := [port for port in DEFAULT_PORTS if is_listening(port)]:
        raise SystemExit(f"something listens on port {busy[0]}, which a first `cortex deploy` takes; stop it")
    processes.adopt_orphans()
    facts = machine.facts()
    found = []
    for number in range(repeats):
        found.append(_one())
        print(f"{number + 1} of {repeats}: {found[-1]}", flush=True)
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    goals = [
        report.Goal(text, f"≤ {goal:g} {unit}", f"{medians[name]:.2f} {unit}", medians[name] <= goal)
        for name, (goal, text, unit) in GOALS.items()
    ]
    others = "\n".join(f"- {name}: {value:.2f}" for name, value in medians.items() if name not in GOALS)
    text = (
        f"# Start-up and idle cost, medians of {repeats}\n\n{report.goals_table(goals)}\n\nBeside them:\n\n{others}\n"
    )
    results.write("startup", text, {"facts": facts, "medians": medians, "repeats": found})


def _one() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="cortex-bench-", ignore_cleanup_errors=True) as folder:
        cortex = Cortex.in_folder(Path(folder), DEFAULT_PORTS)
        try:
            cold_s, cold_command_s = _deploy(cortex, NOOP)
            warm_s, warm_command_s = _deploy(cortex, _STARTUP)
            status, body = _endpoint(cortex, _STARTUP).ask(_STARTUP)
            ages = json.loads(body) if status == 200 else {}
            cortex.run("delete", "startup", "--force")
            memory = _idle_memory(cortex)
        finally:
            cortex.stop()
    return {
        "cold_s": cold_s,
        "cold_command_s": cold_command_s,
        "warm_s": warm_s,
        "warm_command_s": warm_command_s,
        "before_user_code_ms": ages["supervisor_ms"],
        "process_before_user_code_ms": ages["process_ms"],
        **memory,
    }


def _deploy(cortex: Cortex, workload: Workload) -> tuple[float, float]:
    """Deploy; return the seconds to the first correct response, and to the end of the command."""
    start = time.monotonic()
    command = cortex.command("deploy", str(cortex.project / f"{workload.name}.yaml"), "-o", "json")
    with (cortex.folder / "deploy.log").open("wb") as log:
        deploy = subprocess.Popen(command, env=cortex.environ(), cwd=cortex.folder, stdout=log, stderr=log)
    first = ended = 0.0
    while not (first and ended):
        now = time.monotonic() - start
        if not first and _answers(cortex, workload):
            first = time.monotonic() - start
        if not ended and deploy.poll() is not None:
            ended = now
            if deploy.returncode:
                raise NotServingError((cortex.folder / "deploy.log").read_text()[-3000:])
        if now > _LIMIT_S:
            deploy.kill()
            raise NotServingError(f"{workload.name} was not live within {_LIMIT_S:.0f} s")
        time.sleep(0.005)
    return first, ended


def _answers(cortex: Cortex, workload: Workload) -> bool:
    try:
        status, body = _endpoint(cortex, workload).ask(workload, timeout_s=1.0)
    except OSError:
        return False
    return status == 200 and (workload.expected is None or not workload.mistake(status, body))


def _endpoint(cortex: Cortex, workload: Workload) -> Endpoint:
    return Endpoint(cortex.gateway_port, f"/{workload.name}")


def _idle_memory(cortex: Cortex) -> dict[str, float]:
    """Return the PSS of each part, two seconds after only the no-op API was left."""
    deadline = time.monotonic() + _LIMIT_S
    while len((status := cortex.status())["replicas"]) != 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2.0)
    memory = {f"{name}_mb": processes.pss_mb(members) for name, members in groups(status).items()}
    memory["replica_mb"] = memory.pop("replicas_mb")
    memory["control_mb"] = memory["operator_mb"] + memory["gateway_mb"]
    return memory


if __name__ == "__main__":
    main()
