"""`cortex up`: start the operator of this machine, in the background or in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cortex import __version__
from cortex.cli.session import Session
from cortex.client.environments import LOCAL
from cortex.client.local_operator import (
    ListenOptions,
    foreground_command,
    leader_url,
    lock_start,
    start,
    start_lock_arguments,
)
from cortex.errors import ConflictError, CortexError, InputError, NotFoundError, OperatorUnavailableError
from cortex.installation import Installation, read_operator
from cortex.tls import CertificateFiles
from cortex.worker.monitoring.trace_export import find_problem

if TYPE_CHECKING:
    from cortex.cli.deploy_project import StartDeployment

_STORED = "stored for later starts"
_MAX_DRAIN_S = 86_400
_POLL_S = 0.5


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--foreground", action="store_true", help="run in the foreground, for systemd and other process managers"
    )
    parser.add_argument(
        "--stop-all",
        action="store_true",
        help="with --foreground: print all logs, and at SIGTERM drain and stop everything; for containers",
    )
    parser.add_argument(
        "--drain",
        metavar="SECONDS",
        type=float,
        help="with --stop-all: maximum time that requests in progress have to finish at the end (default: 20)",
    )
    parser.add_argument(
        "--deploy",
        metavar="FILE",
        help="with --stop-all: deploy the project of this configuration file at the start, like `cortex deploy`",
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="do not wait until the deployed APIs can serve, as with --foreground"
    )
    parser.add_argument(
        "--log-format",
        choices=("json", "text"),
        help="with --stop-all: format of the printed logs; default: text on a terminal, otherwise json",
    )
    default = Installation()
    parser.add_argument(
        "--gateway-port",
        metavar="PORT",
        type=int,
        help=f"port of the gateway (default: {default.gateway_port}); {_STORED}",
    )
    parser.add_argument(
        "--operator-port",
        metavar="PORT",
        type=int,
        help=f"port of the operator (default: {default.operator_port}); {_STORED}",
    )
    parser.add_argument(
        "--host", metavar="ADDRESS", help=f"address on which both listen (default: {default.host}); {_STORED}"
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", help=f"serve HTTPS with this certificate and its chain (PEM); {_STORED}"
    )
    parser.add_argument(
        "--tls-key", metavar="FILE", help=f"private key of the certificate (PEM, not encrypted); {_STORED}"
    )
    parser.add_argument("--no-tls", action="store_true", help="serve plain HTTP, even if a certificate was stored")
    parser.add_argument("--engine", metavar="local|ray", help=f"where replicas run (default: local); {_STORED}")
    parser.add_argument("--ray-address", metavar="HOST:PORT", help="address of the Ray head, for --engine ray")
    parser.add_argument(
        "--database",
        metavar="URL",
        help="postgresql://USER:PASSWORD@HOST/NAME, or sqlite for the database in CORTEX_HOME"
        f" (default: CORTEX_DATABASE, or else sqlite); {_STORED}",
    )
    parser.add_argument("--advertise", metavar="ADDRESS", help="address at which the Ray nodes reach this machine")
    parser.add_argument(
        "--node-port",
        metavar="PORT",
        type=int,
        help=f"port for connections from the Ray nodes (default: {default.node_port})",
    )
    parser.add_argument(
        "--gateways",
        metavar="WHERE",
        help=f"Ray nodes that run additional gateways: operator (none), all, group:NAME; {_STORED}",
    )
    parser.add_argument(
        "--connections-per-address",
        metavar="N|default",
        type=_connections,
        help="connections that the gateway accepts from one address, such as a load balancer's (default: a quarter of"
        f" those that fit into half of the memory, 512 to 2500); {_STORED}",
    )
    parser.add_argument(
        "--v2-at-root",
        action=argparse.BooleanOptionalAction,
        help=f"also answer the Open Inference Protocol at /v2, with the names of APIs as models; {_STORED}",
    )


def _connections(text: str) -> int:
    if text == "default":
        return Installation.connections_per_address
    if text.isascii() and text.isdecimal() and 0 < int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be 1 to 65535, or default (got {text})")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Start the operator, or report that it is running."""
    _check_options(arguments)
    deployment = _deployment(arguments.deploy, session) if arguments.deploy else None
    tls = _certificate_files(arguments)
    options = ListenOptions(arguments.gateway_port, arguments.operator_port, arguments.host, tls, arguments.no_tls)
    if tls is not None:
        for warning in tls.warnings(tls.load(), datetime.now(UTC)):
            session.console.note(f"warning: {warning}")
    if (problem := find_problem(session.environ)) is not None:
        session.console.note(f"warning: traces are not exported: {problem}")
    known, wanted = _checked_installation(arguments, options, session)
    start_lock = None
    if arguments.foreground:
        start_lock = lock_start(session.home)
        known, wanted = _checked_installation(arguments, options, session)  # another command may have started one
    replaced = _store_installation(session, known, wanted)
    if arguments.stop_all and start_lock is not None:
        code = _run_with_everything(arguments, options, deployment, session, start_lock)
        if code and replaced is not None:
            replaced.write(session.home)
        return code
    if start_lock is not None:
        command = [*foreground_command(session.home, options), *start_lock_arguments(start_lock)]
        os.set_inheritable(start_lock, True)
        session.console.flush()
        # The operator replaces this process, so that a process manager supervises the operator itself.
        os.execve(command[0], command, {**session.environ, "CORTEX_HOME": str(session.home.path)})
    session.home.prepare()
    session.console.begin("starting the operator")
    try:
        operator, is_new = start(session.home, options)
    except CortexError:
        if replaced is not None and read_operator(session.home) is None:  # no later start must repeat the failure
            replaced.write(session.home)
        raise
    session.console.line(
        "the operator is running" if is_new else f"the operator is already running (pid {operator.pid})"
    )
    if operator.version != __version__:
        session.console.note(
            f"warning: it runs version {operator.version}, and this command is of {__version__}; `cortex upgrade` "
            "replaces it while it serves"
        )
    session.console.line(f"  operator: {operator.url}")
    session.console.line(f"  gateway:  {operator.gateway_url}")
    leader = leader_url(session.home, operator)
    if leader is not None:
        session.console.line(f"it is on standby: the operator at {leader} is the leader")
        return 0
    if Installation.read(session.home).engine != "local":
        _warn_about_cluster(session)
    if not arguments.no_wait:
        _wait_until_serving(session)
    return 0


def _wait_until_serving(session: Session) -> None:
    """Wait until each deployed API has a ready replica or is known to get none; print which APIs can't serve."""
    from cortex.cli.commands.installation.status import can_serve  # noqa: PLC0415 - other starts do without

    client = session.client(LOCAL)
    while missing := [api for api in client.list_apis() if not can_serve(api)]:
        starting = [api["spec"]["name"] for api in missing if api["status"]["status_code"] == "updating"]
        if not starting:
            break
        session.console.progress(f"waiting until {', '.join(starting)} can serve; Ctrl-C ends only the wait")
        with contextlib.suppress(NotFoundError):  # it was deleted meanwhile
            client.wait_api(starting[0], _POLL_S)
    for api in missing:
        name, status = api["spec"]["name"], api["status"]
        reason = (status.get("failure") or {}).get("message") or status["message"]
        session.console.note(f"warning: {name} can't serve: {reason}")


def _check_options(arguments: argparse.Namespace) -> None:
    """Check the ports and the options of --stop-all. Raises: InputError."""
    for port in (arguments.gateway_port, arguments.operator_port, arguments.node_port):
        if port is not None and not 0 < port < 65536:
            raise InputError(f"{port} is not a valid port; ports range from 1 to 65535")
    if arguments.stop_all and not arguments.foreground:
        raise InputError("--stop-all requires --foreground")
    for name, value in (
        ("--drain", arguments.drain),
        ("--deploy", arguments.deploy),
        ("--log-format", arguments.log_format),
    ):
        if value is not None and not arguments.stop_all:
            raise InputError(f"{name} requires --foreground --stop-all")
    if arguments.drain is not None and not 0 <= arguments.drain <= _MAX_DRAIN_S:
        raise InputError(f"--drain {arguments.drain:g}: must be 0 to {_MAX_DRAIN_S} seconds")


def _deployment(path: str, session: Session) -> StartDeployment:
    """Check and pack the project to deploy at the start. Raises: InputError, ConfigError."""
    from cortex.cli.deploy_project import StartDeployment  # noqa: PLC0415 - other starts do without

    return StartDeployment.prepare(Path(path), session.client(LOCAL))


def _run_with_everything(
    arguments: argparse.Namespace,
    options: ListenOptions,
    deployment: StartDeployment | None,
    session: Session,
    start_lock: int,
) -> int:
    from cortex.cli.foreground import DRAIN_S, run_foreground  # noqa: PLC0415 - other starts do without
    from cortex.cli.log_output import LogOutput  # noqa: PLC0415

    session.console.flush()
    is_json = arguments.log_format == "json" if arguments.log_format else not sys.stdout.isatty()
    drain_s = DRAIN_S if arguments.drain is None else arguments.drain
    output = partial(LogOutput, session.home.logs_dir, sys.stdout, is_json)
    return run_foreground(session.home, options, drain_s, output, deployment, start_lock)


def _warn_about_cluster(session: Session) -> None:
    """Print a warning if the cluster can't place replicas, which the first deploy would report otherwise."""
    from cortex.cli.commands.installation.status import cluster_problem  # noqa: PLC0415 - other starts do without

    with contextlib.suppress(CortexError):
        if problem := cluster_problem(session.client(LOCAL).operator_status()):
            session.console.note(f"warning: {problem}")


def _checked_installation(
    arguments: argparse.Namespace, options: ListenOptions, session: Session
) -> tuple[Installation, Installation]:
    """Return the stored options for starts of the operator, and those of this start, which may be the same.

    Raises: InputError; OperatorUnavailableError if one could not start with them; ConflictError if one is running.
    """
    session.home.check()
    known = Installation.read(session.home)
    wanted = known.changed(
        engine=arguments.engine,
        ray_address=arguments.ray_address,
        database=arguments.database or session.environ.get("CORTEX_DATABASE") or None,
        advertise=arguments.advertise,
        node_port=arguments.node_port,
        gateways=arguments.gateways,
        v2_at_root=arguments.v2_at_root,
        connections_per_address=arguments.connections_per_address,
    )
    options.check_ports(session.home, wanted)
    wanted.check_modules(is_kept=known.engine == "ray")
    if wanted == known:
        return known, wanted
    running = read_operator(session.home)
    if running is not None:
        raise ConflictError(
            f"an operator is already running (pid {running.pid}) with other options; run `cortex down` first"
        )
    try:
        _check_reachable(wanted, known)
    except InputError as error:
        if arguments.foreground:
            raise
        raise OperatorUnavailableError(f"the operator did not start: {error}") from None
    return known, wanted


def _store_installation(session: Session, known: Installation, wanted: Installation) -> Installation | None:
    """Store the options of this start. Return those that they replace; None if nothing changes."""
    if wanted == known:
        return None
    session.home.prepare()
    wanted.write(session.home)
    return known


def _check_reachable(wanted: Installation, known: Installation) -> None:
    # Imports of parts of the operator, which other starts do without.
    if wanted.database and wanted.database != known.database:
        from cortex.state.database import check_address  # noqa: PLC0415

        check_address(wanted.database)
    if wanted.engine == "ray" and (wanted.ray_address, wanted.advertise) != (known.ray_address, known.advertise):
        from cortex.operator.infrastructure import own_address  # noqa: PLC0415

        own_address(wanted)


def _certificate_files(arguments: argparse.Namespace) -> CertificateFiles | None:
    if not arguments.tls_cert and not arguments.tls_key:
        return None
    if not arguments.tls_cert or not arguments.tls_key:
        raise InputError(
            "--tls-cert and --tls-key must be given together; without both, the stored certificate is served"
        )
    if arguments.no_tls:
        raise InputError("--no-tls can't be combined with --tls-cert and --tls-key")
    return CertificateFiles(*(Path(file).expanduser().absolute() for file in (arguments.tls_cert, arguments.tls_key)))
