"""Steps before the operator runs: lock of the home, listening socket, token, identity and settings files."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from cortex import __version__
from cortex.errors import ConflictError, InputError
from cortex.home import Home, write_private
from cortex.installation import Installation, OperatorIdentity
from cortex.operator.settings import OperatorSettings
from cortex.processes.filelock import LockHeldError, hold_lock
from cortex.processes.identity import Identity
from cortex.state.queries.key_values import KeyValueStore
from cortex.telemetry import Logger


def identify(settings: OperatorSettings) -> OperatorIdentity:
    """Return the identity of an operator with these settings in this process."""
    return OperatorIdentity(
        process=Identity.of(os.getpid()),
        url=settings.url(settings.operator_port),
        gateway_url=settings.url(settings.gateway_port),
        address=settings.address,
        tls_cert=str(settings.tls.certificate) if settings.tls else "",
        tls_key=str(settings.tls.key) if settings.tls else "",
        host=settings.host,
        version=__version__,
        started_at=datetime.now(UTC).isoformat(),
    )


@contextlib.contextmanager
def lock_home(home: Home) -> Iterator[None]:
    """Hold the home's lock, which the kernel releases when this process ends.

    Raises: ConflictError if another operator runs for this home.
    """
    path = home.operator_lock
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(hold_lock(path))
        except LockHeldError as error:
            raise ConflictError(f"an operator already runs for {home.path} (pid {path.read_text().strip()})") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def listen(settings: OperatorSettings) -> socket.socket:
    """Open the operator's port. Raises: ConflictError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol, asyncio sets TCP_NODELAY; else each response but a connection's first waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


def ensure_token(home: Home) -> str:
    """Return the operator's token; the first call generates it."""
    try:
        descriptor = os.open(home.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if token := home.token_file.read_text().strip():
            return token
        descriptor = os.open(home.token_file, os.O_WRONLY)  # empty: its first writer was killed before it wrote
    token = secrets.token_hex(32)  # hexadecimal: never starts with "-", which a command line would parse as an option
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def ensure_shared_token(home: Home, facts: KeyValueStore) -> str:
    """Return the token that all operators with this database share, and write it to this home."""
    token = facts.put_if_absent("operator_token", ensure_token(home))
    write_private(home.token_file, f"{token}\n")
    return token


def save_settings(home: Home, settings: OperatorSettings, logger: Logger) -> None:
    """Save the addresses and TLS files in `installation.json`, as defaults for the next operator of this home.

    Call it once the operator is up: settings that failed must not become the defaults.
    """
    try:
        saved = Installation.read(home)
        changed = replace(
            saved,
            gateway_port=settings.gateway_port,
            operator_port=settings.operator_port,
            host=settings.host,
            tls_cert=str(settings.tls.certificate) if settings.tls else None,
            tls_key=str(settings.tls.key) if settings.tls else None,
        )
        if changed != saved:
            changed.write(home)
    except (OSError, InputError) as error:  # such as a full disk: the operator works without
        logger.warning("settings can't be saved", error=error)
