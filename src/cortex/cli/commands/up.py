"""`cortex up`: the operator of this machine, in the background or as this very process."""

from __future__ import annotations

import argparse
import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path

from cortex.cli.commands.status import lack_of_cluster
from cortex.cli.connect import client_of
from cortex.cli.context import Context
from cortex.client.environments import LOCAL
from cortex.client.local_operator import Settings, foreground_command, leader_instead, start
from cortex.client.operator_info import read_operator
from cortex.errors import ConflictError, CortexError, InputError
from cortex.installation import Installation
from cortex.tls import CertificateFiles

_KEPT = "kept for the next time"


def configure(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground, as systemd wants it")
    default = Installation()
    parser.add_argument(
        "--gateway-port", metavar="PORT", type=int, help=f"port of the APIs ({default.gateway_port}); {_KEPT}"
    )
    parser.add_argument(
        "--operator-port", metavar="PORT", type=int, help=f"port of the operator ({default.operator_port}); {_KEPT}"
    )
    parser.add_argument("--host", metavar="ADDRESS", help=f"address on which both listen ({default.host}); {_KEPT}")
    parser.add_argument(
        "--tls-cert", metavar="FILE", help=f"serve HTTPS only, with this certificate and its chain (PEM); {_KEPT}"
    )
    parser.add_argument("--tls-key", metavar="FILE", help=f"its private key (PEM, not encrypted); {_KEPT}")
    parser.add_argument("--no-tls", action="store_true", help="serve plain HTTP, though a certificate was kept")
    parser.add_argument("--engine", metavar="local|ray", help=f"where replicas run (local); {_KEPT}")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="Ray's head, for --engine ray")
    parser.add_argument(
        "--database",
        metavar="URL",
        help="postgresql://USER:PASSWORD@HOST/NAME for the state (SQLite in CORTEX_HOME); CORTEX_DATABASE says it, too",
    )
    parser.add_argument("--advertise", metavar="ADDRESS", help="of this machine, at which Ray's nodes reach it")
    parser.add_argument("--node-port", metavar="PORT", type=int, help=f"port for Ray's nodes ({default.node_port})")
    parser.add_argument(
        "--gateways",
        metavar="WHERE",
        help=f"on which of Ray's nodes gateways run, too: operator (none), all, group:NAME; {_KEPT}",
    )


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Start it, or say that it runs."""
    for port in (arguments.gateway_port, arguments.operator_port, arguments.node_port):
        if port is not None and not 0 < port < 65536:
            raise InputError(f"{port} is not a port; ports are 1 to 65535")
    tls = _certificate_files(arguments)
    settings = Settings(arguments.gateway_port, arguments.operator_port, arguments.host, tls, arguments.no_tls)
    if tls is not None:
        for warning in tls.warnings(tls.load(), datetime.now(UTC)):
            context.console.note(f"warning: {warning}")
    _keep_installation(arguments, settings, context)
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
    leader = leader_instead(context.home, operator)
    if leader is not None:
        context.console.line(f"it stands by: the operator at {leader} leads")
    elif Installation.read(context.home).engine != "local":
        _warn_of_cluster(context)
    return 0


def _warn_of_cluster(context: Context) -> None:
    """Say at once what the first deploy would find out. An operator that has just come to lead answers in a while."""
    with contextlib.suppress(CortexError):
        if problem := lack_of_cluster(client_of(context, LOCAL).operator_status()):
            context.console.note(f"warning: {problem}")


def _keep_installation(arguments: argparse.Namespace, settings: Settings, context: Context) -> None:
    """Keep what the next operator of this home is made of. Raises: InputError; ConflictError while one runs."""
    context.home.check()
    known = Installation.read(context.home)
    wanted = known.changed(
        engine=arguments.engine,
        ray_address=arguments.ray_address,
        database=arguments.database or context.environ.get("CORTEX_DATABASE") or None,
        advertise=arguments.advertise,
        node_port=arguments.node_port,
        gateways=arguments.gateways,
    )
    settings.check_ports(context.home, wanted)
    wanted.check_modules(is_kept=known.engine == "ray")
    if wanted == known:
        return
    running = read_operator(context.home)
    if running is not None:
        raise ConflictError(f"an operator already runs (pid {running.pid}), made otherwise; `cortex down` first")
    context.home.prepare()
    wanted.write(context.home)


def _certificate_files(arguments: argparse.Namespace) -> CertificateFiles | None:
    if not arguments.tls_cert and not arguments.tls_key:
        return None
    if not arguments.tls_cert or not arguments.tls_key:
        raise InputError("--tls-cert and --tls-key belong together: give both, or neither for what was served before")
    if arguments.no_tls:
        raise InputError("--no-tls is for plain HTTP, without --tls-cert and --tls-key")
    return CertificateFiles(*(Path(file).expanduser().absolute() for file in (arguments.tls_cert, arguments.tls_key)))
