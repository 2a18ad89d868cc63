"""What an operator takes hold of before it begins: its home, its port, its token."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO

from cortex import __version__
from cortex.errors import ConflictError, InputError
from cortex.home import Home, write_private
from cortex.installation import Installation
from cortex.operator.settings import Settings
from cortex.operator.views import Identity
from cortex.processes.filelock import LockHeldError, hold_lock
from cortex.processes.identity import Identity as ProcessIdentity
from cortex.state.key_values import FactStore
from cortex.telemetry import Logger


def identify(settings: Settings) -> Identity:
    """Return what is kept in the home of the operator that this process is."""
    return Identity(
        process=ProcessIdentity.of(os.getpid()),
        url=settings.url(settings.operator_port),
        gateway_url=settings.url(settings.gateway_port),
        version=__version__,
        started_at=datetime.now(UTC),
        address=settings.address,
        host=settings.host,
        tls_cert=str(settings.tls.certificate) if settings.tls else "",
        tls_key=str(settings.tls.key) if settings.tls else "",
    )


def tell_identity(home: Home, identity: Identity) -> None:
    """Keep who the operator is, for commands that look for it."""
    write_private(home.run_dir / "operator.json", json.dumps(identity.to_json()))


def keep_settings(home: Home, settings: Settings, logger: Logger) -> None:
    """Keep where this operator listens and what it serves, for the next one of its home.

    To be called once it is up: what can't be listened on, or served, must not be what the next one tries again.
    """
    try:
        kept = Installation.read(home)
        wanted = replace(
            kept,
            gateway_port=settings.gateway_port,
            operator_port=settings.operator_port,
            host=settings.host,
            tls_cert=str(settings.tls.certificate) if settings.tls else None,
            tls_key=str(settings.tls.key) if settings.tls else None,
        )
        if wanted != kept:
            wanted.write(home)
    except (OSError, InputError) as error:  # a full disk; this operator runs all the same
        logger.warning("where the operator listens can't be kept", error=error)


def read_token(home: Home) -> str:
    """Return the operator's token; the first call makes it."""
    try:
        descriptor = os.open(home.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if token := home.token_file.read_text().strip():
            return token
        descriptor = os.open(home.token_file, os.O_WRONLY)  # its first writer was killed in between
    token = secrets.token_hex(32)  # nothing that begins with "-", which a command line takes for an option
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def shared_token(home: Home, facts: FactStore) -> str:
    """Return the token of all operators that share a database: the first one's, which is kept in this home, too."""
    token = facts.put_if_absent("operator_token", read_token(home))
    write_private(home.token_file, f"{token}\n")
    return token


@contextlib.contextmanager
def only_one(home: Home) -> Iterator[IO[str]]:
    """Hold the home's lock: two operators would fight over what runs. The kernel frees it when we end."""
    path = home.run_dir / "operator.lock"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(hold_lock(path))
        except LockHeldError as error:
            raise ConflictError(f"an operator already runs for {home.path} (pid {path.read_text().strip()})") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file


def listen(settings: Settings) -> socket.socket:
    """Open the port for clients. Raises: ConflictError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.operator_port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConflictError(
            f"the operator can't listen on {settings.host}:{settings.operator_port}: "
            f"{(error.strerror or str(error)).lower()}; choose another port with `cortex up --operator-port`, "
            "or another address with `--host`"
        ) from error
    return listener
