"""Entry point of the operator's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time

from cortex.operator.imports import resume_garbage_collection  # isort: skip - before the imports that it speeds up

from cortex.errors import CortexError, DatabaseAddressError, DatabaseUnavailableError, InputError
from cortex.home import Home
from cortex.installation import Installation
from cortex.operator.bootstrap import ensure_token, identify, listen, lock_home, save_settings
from cortex.operator.certificates import ServedCertificate
from cortex.operator.infrastructure import own_address
from cortex.operator.leader_election import Leadership, consume_restart_mark, restart_process, stand_by
from cortex.operator.operator import Operator
from cortex.operator.settings import OperatorSettings
from cortex.processes.sockets import allow_descriptors
from cortex.state.queries.leader_election import LeaderRecord
from cortex.telemetry import Logger, configure

#: Connections of clients, one socket per replica, log files that are followed.
_DESCRIPTORS = 16_384
#: Options of `client/local_operator.py`, which a restart must not repeat.
_WAIT, _START_LOCK = "--wait-for-input", "--start-lock"
_logger = Logger("cortex.operator")


def main() -> None:
    """Run the operator of `CORTEX_HOME`."""
    resume_garbage_collection()
    if not _may_start():
        return
    start_lock = _inherited_start_lock()
    settings = OperatorSettings.parse(sys.argv[1:])
    allow_descriptors(_DESCRIPTORS)
    home = Home.from_environ(os.environ)
    try:
        home.prepare()
        configure(home.logs_dir / "operator.log")
        with lock_home(home):
            if start_lock is not None:
                os.close(start_lock)
            listener = listen(settings)
            asyncio.run(_run(home, settings, listener))
    except CortexError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _may_start() -> bool:
    """With `--wait-for-input`, wait for a byte from the command that started this process; False if it ends instead.

    `cortex deploy` checks the project meanwhile. `cortex upgrade`, whose input is a socket, gets a byte once all
    modules are imported. A restart must not wait again, so the option is removed.
    """
    if _WAIT not in sys.argv:
        return True
    sys.argv.remove(_WAIT)
    with contextlib.suppress(OSError):  # a pipe
        os.write(sys.stdin.fileno(), b"\n")
    return sys.stdin.read(1) != ""


def _inherited_start_lock() -> int | None:
    """Return the descriptor of the lock that keeps other commands from starting an operator; None without one."""
    if _START_LOCK not in sys.argv:
        return None
    index = sys.argv.index(_START_LOCK)
    descriptor = int(sys.argv[index + 1])
    del sys.argv[index : index + 2]
    os.set_inheritable(descriptor, False)
    return descriptor


async def _run(home: Home, settings: OperatorSettings, listener: socket.socket) -> None:
    installation = Installation.read(home)
    installation.check_modules()  # here, because systemd and `cortex deploy` start operators, too
    is_restarted = consume_restart_mark()
    settings = _with_cluster_address(settings, installation, is_restarted)
    if installation.database is None:
        await Operator(home, settings, installation, None).run(listener)
    else:
        await _run_elected(home, settings, installation, installation.database, is_restarted, listener)


async def _run_elected(
    home: Home,
    settings: OperatorSettings,
    installation: Installation,
    database: str,
    is_restarted: bool,
    listener: socket.socket,
) -> None:
    """Stand by until this operator is elected, then run it while it leads."""
    certificate = ServedCertificate(settings.tls, home.fingerprints_file, _logger)
    identity = identify(certificate.apply_name(settings))
    ensure_token(home)  # commands need one while this operator stands by, too
    identity.write(home)
    me = LeaderRecord(socket.gethostname(), os.getpid(), identity.url, identity.gateway_url, time.time())
    leadership = Leadership(database, me, _logger)
    epoch = await stand_by(leadership, listener, certificate.context, is_patient=is_restarted)
    if epoch is None:
        save_settings(home, settings, _logger)  # it was up, although it never led
        return
    try:
        operator = Operator(home, _with_cluster_address(settings, installation, is_restarted), installation, epoch)
        watch = asyncio.create_task(_restart_when_lost(leadership, operator), name="watch leadership")
        await operator.run(listener)
    except (DatabaseUnavailableError, DatabaseAddressError) as error:
        if isinstance(error, DatabaseAddressError) and not isinstance(error.__cause__, DatabaseUnavailableError):
            raise  # the database answered: a restart would fail in the same way
        _logger.error("the database became unavailable while this operator started to lead", error=error)
        restart_process()
    watch.cancel()
    await leadership.release()


async def _restart_when_lost(leadership: Leadership, operator: Operator) -> None:
    await leadership.wait_until_lost()
    if not operator.is_stopping:
        restart_process()


def _with_cluster_address(settings: OperatorSettings, installation: Installation, is_patient: bool) -> OperatorSettings:
    """Return the settings with the address at which the cluster reaches this machine.

    Raises: InputError if it can't be determined, unless `is_patient`: after a network failure it may be possible later.
    """
    if installation.engine == "local":
        return settings
    try:
        return settings.with_address(own_address(installation))
    except InputError:
        if not is_patient:
            raise
        return settings


if __name__ == "__main__":
    main()
