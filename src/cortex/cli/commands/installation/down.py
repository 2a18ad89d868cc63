"""`cortex down`: stop all processes of this machine's installation, even if its operator has ended, or the operator."""

from __future__ import annotations

import argparse

from cortex.cli.session import Session
from cortex.client.cleanup import stop_all, stop_operator
from cortex.telemetry import configure as configure_logs


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--operator",
        action="store_true",
        help="stop only the operator; gateway and replicas continue to serve, and the next operator adopts them",
    )


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Stop all processes. It is not an error if none is running."""
    session.home.check()
    if session.home.logs_dir.is_dir():
        configure_logs(session.home.logs_dir / "cli.log")
    if arguments.operator:
        session.console.begin("stopping the operator")
        session.console.line("stopped" if stop_operator(session.home) else "no operator was running")
        return 0
    session.console.begin("stopping replicas, gateway and operator")
    session.console.line("stopped" if stop_all(session.home) else "nothing was running")
    return 0
