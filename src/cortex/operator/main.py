"""The operator's process: its entry, and who of several leads."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

from cortex.errors import CortexError, DatabaseUnavailableError, InputError
from cortex.home import Home
from cortex.installation import Installation
from cortex.operator.bootstrap import identify, keep_settings, listen, only_one, read_token, tell_identity
from cortex.operator.certificates import ServedCertificate
from cortex.operator.engine_factory import own_address
from cortex.operator.leader_election import Leadership
from cortex.operator.operator import OperatorProcess
from cortex.operator.settings import Settings
from cortex.operator.standby import begin_anew, has_begun_anew, wait_for_lead
from cortex.processes.sockets import allow_descriptors
from cortex.state.leader_election import Leader
from cortex.state.postgresql import DatabaseAddressError
from cortex.telemetry import Logger, configure

#: Connections of clients, one socket per replica, files of logs that are followed.
_DESCRIPTORS = 16_384
_logger = Logger("cortex.operator")


def main() -> None:
    """Run the operator of `CORTEX_HOME`."""
    settings = Settings.parse(sys.argv[1:])
    allow_descriptors(_DESCRIPTORS)
    home = Home.from_environ(os.environ)
    try:
        home.prepare()
        configure(home.logs_dir / "operator.log")
        with only_one(home):
            listener = listen(settings)
            asyncio.run(_run(home, settings, listener))
    except CortexError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


async def _run(home: Home, settings: Settings, listener: socket.socket) -> None:
    installation = Installation.read(home)
    installation.check_modules()  # whoever starts us: systemd, `cortex deploy`
    is_anew = has_begun_anew()
    settings = _reached(settings, installation, is_anew)
    if installation.database is None:
        await OperatorProcess(home, settings, installation, None).run(listener)
        return
    certificate = ServedCertificate(settings.tls, home.fingerprints_file, _logger)
    identity = identify(certificate.named(settings))
    read_token(home)  # commands find one, whoever leads
    tell_identity(home, identity)
    me = Leader(socket.gethostname(), os.getpid(), identity.url, identity.gateway_url, time.time())
    leadership = Leadership(installation.database, me, _logger)
    epoch = await wait_for_lead(leadership, listener, certificate.context, is_patient=is_anew)
    if epoch is None:
        keep_settings(home, settings, _logger)  # it was up, though it never led
        return
    try:
        process = OperatorProcess(home, _reached(settings, installation, is_anew), installation, epoch)
        watching = asyncio.create_task(_end_with_lead(leadership, process), name="watch the lead")
        await process.run(listener)
    except (DatabaseUnavailableError, DatabaseAddressError) as error:
        if isinstance(error, DatabaseAddressError) and not isinstance(error.__cause__, DatabaseUnavailableError):
            raise  # it answers, and will not answer otherwise
        _logger.error("the database went away while the lead was taken up", error=error)
        begin_anew()
    watching.cancel()
    await leadership.release()


def _reached(settings: Settings, installation: Installation, is_patient: bool) -> Settings:
    """Return the settings with the address at which the cluster reaches this machine.

    Raises: InputError if it can't be found, unless `is_patient`: what took the lead from us may be the network.
    """
    if installation.engine == "local":
        return settings
    try:
        return settings.reached_at(own_address(installation))
    except InputError:
        if not is_patient:
            raise
        return settings


async def _end_with_lead(leadership: Leadership, process: OperatorProcess) -> None:
    await leadership.lost()
    if not process.is_stopping:
        begin_anew()


if __name__ == "__main__":
    main()
