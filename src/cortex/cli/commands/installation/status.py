"""`cortex status`: show operator, gateway, model agent and replicas of this machine."""

from __future__ import annotations

import argparse
from typing import Any

from cortex.cli.arguments import add_output
from cortex.cli.session import Session
from cortex.client.cleanup import inspect_processes
from cortex.client.environments import LOCAL
from cortex.errors import OperatorUnavailableError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_output(parser)
    parser.add_argument(
        "--ready",
        action="store_true",
        help="only check that APIs are deployed and each of them can serve; otherwise the exit code is 1",
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Show the status from the operator or, if it does not answer, from the processes themselves."""
    if arguments.ready:
        return _check_readiness(session)
    try:
        status = session.client(LOCAL).operator_status()
    except OperatorUnavailableError as error:
        status = inspect_processes(session.home)
        if status["operator"]:
            session.console.note(str(error))
    if arguments.output == "json":
        session.console.json(status)
    else:
        _show(status, session)
    return 0


def _check_readiness(session: Session) -> int:
    """Print which APIs can't serve; return 1 if there are any, or no API at all. Raises: OperatorUnavailableError."""
    apis = session.client(LOCAL).list_apis()
    problems = [f"{api['spec']['name']} is not ready: {api['status']['message']}" for api in apis if not can_serve(api)]
    for problem in problems if apis else ["no API is deployed"]:
        session.console.error(problem)
    return 1 if problems or not apis else 0


def can_serve(api: dict[str, Any]) -> bool:
    """Return True for an API that is live, or that has a ready replica of any revision.

    `api` is a result of `Client.list_apis`.
    """
    counts = api["status"]["replica_counts"]
    return bool(api["status"]["status_code"] == "live" or counts["updated"]["ready"] + counts["stale"]["ready"])


def _show(status: dict[str, Any], session: Session) -> None:
    console = session.console
    rows = [["operator", *_where(status["operator"])]]
    if not status.get("gateways") or (status["gateway"] or {}).get("pid"):
        rows.append(["gateway", *_where(status["gateway"])])
    if status.get("models"):  # it runs only while an API has models
        rows.append(["model agent", *_where(status["models"])])
    if cluster := status.get("cluster"):
        count = len(cluster["nodes"])
        used = f"{count} {'node' if count == 1 else 'nodes'} in use"
        rows.append(["cluster", "not reached" if cluster["problem"] else "running", "-", used])
    console.table(["process", "status", "pid", "url"], rows)
    if warning := cluster_problem(status):
        console.line(f"\n{warning}")
    if refused := (status["gateway"] or {}).get("refused_connections"):
        console.line(
            f"\nthe gateway refused {refused} connections or requests above its limit for one address; "
            "`cortex up --connections-per-address` changes it"
        )
    if status.get("gateways"):
        console.line()
        console.table(["gateway on node", "routes", "url"], [_gateway(gateway) for gateway in status["gateways"]])
    if status["replicas"]:
        console.line()
        headers = ["api", "replica", "process", "state", "pid", "restarts", "last death"]
        rows = [_replica(replica) for replica in status["replicas"]]
        if status.get("cluster"):
            headers.insert(2, "node")
            for row, replica in zip(rows, status["replicas"], strict=True):
                row.insert(2, replica["node"] or "-")
        console.table(headers, rows)


def cluster_problem(status: dict[str, Any]) -> str:
    """Return a message if the cluster can't place replicas; "" if it can or there is no cluster.

    `status` is the result of `Client.operator_status`.
    """
    problem = (status.get("cluster") or {}).get("problem")
    return f"no new replicas can be placed on the cluster: {problem}" if problem else ""


def _where(process: dict[str, Any] | None) -> list[str]:
    if not process or process["pid"] is None:
        return ["not running", "-", "-"]
    state = "running" if process.get("is_answering", True) else "not answering"
    return [state, str(process["pid"]), str(process.get("url") or "-")]


def _gateway(gateway: dict[str, Any]) -> list[str]:
    return [gateway["node"], f"behind: {gateway['reason']}" if gateway["reason"] else "newest", gateway["url"]]


def _replica(replica: dict[str, Any]) -> list[str]:
    death = replica["last_death"]
    return [
        replica["api"],
        replica["id"],
        str(replica["process"]),
        replica["state"],
        str(replica["pid"] or "-"),
        str(replica["restarts"]),
        death["message"] if death else "-",
    ]
