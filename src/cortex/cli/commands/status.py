"""`cortex status`: operator, gateway, model agent and replicas of this machine."""

from __future__ import annotations

import argparse
from typing import Any

from cortex.cli.arguments import add_output
from cortex.cli.connect import environments_of
from cortex.cli.context import Context
from cortex.client.cleanup import observe
from cortex.client.client import Client
from cortex.client.environments import LOCAL
from cortex.errors import OperatorUnavailableError


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    add_output(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Show what the operator says or, where none answers, what can be seen without it."""
    try:
        status = Client(environments_of(context).get(LOCAL)).operator_status()
    except OperatorUnavailableError:
        status = observe(context.home)
    if arguments.output == "json":
        context.console.json(status)
    else:
        _show(status, context)
    return 0


def _show(status: dict[str, Any], context: Context) -> None:
    console = context.console
    rows = [[name, *_where(status[name])] for name in ("operator", "gateway")]
    if status.get("models"):  # there is one only while an API has models
        rows.append(["model agent", *_where(status["models"])])
    if cluster := status.get("cluster"):
        count = len(cluster["nodes"])
        used = f"{count} {'node' if count == 1 else 'nodes'} in use"
        rows.append(["cluster", "not reached" if cluster["problem"] else "running", "-", used])
    console.table(["process", "status", "pid", "url"], rows)
    if warning := lack_of_cluster(status):
        console.line(f"\n{warning}")
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


def lack_of_cluster(status: dict[str, Any]) -> str:
    """Return what users are to know of a cluster that can't place anything; empty while it can, or where there is none.

    `status` is what `Client.operator_status` returns.
    """
    problem = (status.get("cluster") or {}).get("problem")
    return f"nothing new is placed on the cluster: {problem}" if problem else ""


def _where(process: dict[str, Any] | None) -> list[str]:
    if not process or process["pid"] is None:
        return ["not running", "-", "-"]
    return ["running", str(process["pid"]), str(process.get("url") or "-")]


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
