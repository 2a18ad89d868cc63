"""`cortex up`: the operator of this machine, in the background or as this very process."""

from __future__ import annotations

import argparse
import os

from cortex.cli.context import Context
from cortex.client.operator_process import GATEWAY_PORT, HOST, OPERATOR_PORT, Settings, foreground_command, start
from cortex.errors import InputError


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground, as systemd wants it")
    parser.add_argument("--gateway-port", metavar="PORT", type=int, help=f"port of the APIs ({GATEWAY_PORT})")
    parser.add_argument("--operator-port", metavar="PORT", type=int, help=f"port of the operator ({OPERATOR_PORT})")
    parser.add_argument("--host", metavar="ADDRESS", help=f"address on which both listen ({HOST})")


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Start it, or say that it runs."""
    for port in (arguments.gateway_port, arguments.operator_port):
        if port is not None and not 0 < port < 65536:
            raise InputError(f"{port} is not a port; ports are 1 to 65535")
    settings = Settings(arguments.gateway_port, arguments.operator_port, arguments.host)
    if arguments.foreground:
        command = foreground_command(context.home, settings)
        context.console.flush()
        # The operator takes this process's place, so that whoever started it watches and stops the operator itself.
        os.execve(command[0], command, {**context.environ, "CORTEX_HOME": str(context.home.path)})
    context.console.progress("starting the operator")
    operator, is_new = start(context.home, settings)
    context.console.line("the operator is up" if is_new else f"the operator already runs (pid {operator.pid})")
    context.console.line(f"  operator: {operator.url}")
    context.console.line(f"  gateway:  {operator.gateway_url}")
    return 0
