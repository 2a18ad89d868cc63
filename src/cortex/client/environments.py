"""Environments: named operators with their URL and token, stored in `cli.json`.

The environment `local` is the operator of `CORTEX_HOME`, which writes its identity and URLs to `run/operator.json`.
"""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cortex.client.transport import CONNECT_TIMEOUT_S, SYSTEM_TRUST, Transport, Trust
from cortex.errors import CortexError, InputError, NotFoundError, OperatorUnavailableError
from cortex.home import Home
from cortex.installation import OperatorIdentity, read_operator

LOCAL = "local"
_FILE_NAME = "cli.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Environment:
    """A named operator."""

    name: str
    operator_endpoint: str  #: those of several operators have commas between; "" for `local` while none runs
    connect: Callable[[], Transport] = field(repr=False)  #: raises OperatorUnavailableError
    gateway_host: str = ""  #: host of the APIs, if it is not that of the operator

    def describe(self) -> dict[str, str]:
        """Return name and endpoint, without the token."""
        return {"name": self.name, "operator_endpoint": self.operator_endpoint}

    def check_host(self, url: str) -> str:
        """Return the URL of an API, which the operator named, if it may receive payloads and keys. Raises: InputError.

        Its host must be that of the operator or the gateway of this environment, or have an address of one of them.
        """
        host = _host_of(url)
        own = map(_host_of, self.operator_endpoint.split(","))
        known = [each for each in (*own, self.gateway_host.lower()) if each]
        if self.name == LOCAL or host in known or any(_addresses(host) & _addresses(each) for each in known):
            return url
        raise InputError(
            f"the operator of environment {self.name!r} says that the API is at {url}, on another host than its own; if"
            f" that is right, run `cortex env configure {self.name} --gateway-host {host or 'HOST'}`"
        )


@dataclass(frozen=True)
class Environments:
    """Environments of one user: those in `file`, and `local`, the operator of `home`."""

    file: Path
    home: Home

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Environments:
        """Read `CORTEX_HOME` and, for the folder of the file, `CORTEX_CLI_CONFIG_DIR`."""
        home = Home.from_environ(dict(environ))
        folder = environ.get("CORTEX_CLI_CONFIG_DIR")
        return cls((Path(folder).expanduser().absolute() if folder else home.path) / _FILE_NAME, home)

    @property
    def default(self) -> str:
        """Name of the environment that is used if none is given."""
        return str(self._load().get("default", LOCAL))

    def get(self, name: str | None = None) -> Environment:
        """Return an environment; without a name, the default one. Raises: NotFoundError."""
        data = self._load()
        name = name or str(data.get("default", LOCAL))
        if name == LOCAL:
            return self._local()
        entry = data["environments"].get(name)
        if entry is None:
            raise NotFoundError(f"no environment {name!r}; add it with `cortex env configure {name}`")
        return _remote(name, entry)

    def known(self) -> list[Environment]:
        """Return `local`, then the other environments sorted by name."""
        entries = self._load()["environments"]
        return [
            self._local(),
            *(_remote(name, entries[name]) for name in sorted(entries)),
        ]

    def configure(
        self,
        name: str,
        operator_endpoint: str | None = None,
        token: str | None = None,
        ca: str | Path | None = None,
        gateway_host: str = "",
    ) -> Environment:
        """Store an environment. Without an endpoint, the one of this name keeps what is not given.

        `operator_endpoint`: the address of the operator, or those of several with one database and commas between.
        `ca`: a file of CA certificates to trust instead of those of the system. `gateway_host`: host of the APIs, if it
        is not that of the operator. Raises: InputError; NotFoundError if there is none to keep.
        """
        self._check_name(name)
        if operator_endpoint is None:
            self.get(name)
            entry = dict(self._load()["environments"][name])
            entry |= {} if token is None else {"token": token}
        else:
            endpoints = ",".join(_checked_endpoint(each.strip()) for each in operator_endpoint.split(","))
            entry = {"operator_endpoint": endpoints, "token": token or ""}
        if gateway_host:
            if _host_of(f"http://{gateway_host}") != gateway_host.lower():
                raise InputError(f"{gateway_host!r} is not a host; write its name or address, without a port")
            entry["gateway_host"] = gateway_host
        if ca:
            entry["ca"] = _checked_ca(Path(ca), entry["operator_endpoint"])
        data = self._load()
        data["environments"][name] = entry
        self._store(data)
        return _remote(name, entry)

    def set_default(self, name: str) -> None:
        """Set the default environment. Raises: NotFoundError."""
        self.get(name)
        self._store(self._load() | {"default": name})

    def rename(self, old: str, new: str) -> None:
        """Rename an environment. Raises: NotFoundError; InputError if the name is taken or reserved."""
        data = self._load()
        if old == LOCAL:
            raise InputError(f"the environment {LOCAL!r} can't be renamed")
        self.get(old)
        self._check_name(new)
        if new in data["environments"]:
            raise InputError(f"environment {new!r} already exists; delete it first")
        data["environments"][new] = data["environments"].pop(old)
        if data.get("default") == old:
            data["default"] = new
        self._store(data)

    def delete(self, name: str) -> None:
        """Delete an environment. If it was the default, `local` becomes the default. Raises: NotFoundError."""
        if name == LOCAL:
            raise InputError(f"the environment {LOCAL!r} can't be deleted")
        self.get(name)
        data = self._load()
        del data["environments"][name]
        if data.get("default") == name:
            data["default"] = LOCAL
        self._store(data)

    def _local(self) -> Environment:
        self.home.check()
        operator = read_operator(self.home)
        return Environment(LOCAL, operator.url if operator else "", lambda: connect_local(self.home))

    def _check_name(self, name: str) -> None:
        if name == LOCAL:
            raise InputError(f"the name {LOCAL!r} is reserved for the operator of this machine; choose another")
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{name!r} is not a valid name of an environment: use letters, digits, dots, dashes, underscores"
            )

    def _load(self) -> dict[str, Any]:
        if self.file.parent == self.home.path:
            self.home.check()
        try:
            data = json.loads(self.file.read_text())
        except FileNotFoundError:
            data = {}
        except (OSError, ValueError) as error:
            raise InputError(f"{self.file}: can't be read ({error}); correct or delete it") from None
        if not isinstance(data, dict) or not isinstance(data.setdefault("environments", {}), dict):
            raise InputError(f"{self.file}: does not contain environments; correct or delete it")
        return data

    def _store(self, data: dict[str, Any]) -> None:
        """Replace the file atomically. It contains tokens, so it is never readable by other users."""
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".cli-", dir=self.file.parent)  # made with mode 0600
        except OSError as error:
            if self.file.parent == self.home.path:
                raise self.home.unusable(error) from None
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"CORTEX_CLI_CONFIG_DIR={self.file.parent} can't be written: {reason}") from None
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(data, stream, indent=2)
            temporary.replace(self.file)
        finally:
            temporary.unlink(missing_ok=True)


def connect_local(home: Home) -> Transport:
    """Return a transport to the operator of this machine. Raises: OperatorUnavailableError, InputError."""
    home.check()
    operator = read_operator(home)
    if operator is None:
        raise OperatorUnavailableError("no operator runs on this machine; start it with `cortex up`")
    operator.check_not_stopped()
    try:
        token = home.token_file.read_text().strip()
    except OSError as error:
        raise OperatorUnavailableError(f"{home.token_file}: the operator's token can't be read: {error}") from None
    hint = f"its process (pid {operator.pid}) runs, and may be busy: try again, or stop it with `cortex down`"
    return Transport(operator.url, token, hint, local_trust(home, operator))


def local_trust(home: Home, operator: OperatorIdentity) -> Trust:
    """Return the trust for the local operator: only its own certificate, whether or not a CA signed it."""
    if not operator.tls_cert:
        return SYSTEM_TRUST

    def pins() -> list[str]:
        try:
            return home.fingerprints_file.read_text().split()
        except OSError:
            return []

    return Trust(pins=pins, address=operator.address)


def _remote(name: str, entry: Mapping[str, Any]) -> Environment:
    endpoint, token, ca = str(entry["operator_endpoint"]), str(entry["token"]), str(entry.get("ca") or "")
    hint = f"is the address of environment {name!r} right? `cortex env list` shows it"

    def connect() -> Transport:
        if ca and not Path(ca).is_file():
            raise InputError(f"{ca}: does not exist; choose another file with `cortex env configure {name} --ca FILE`")
        operators = [Transport(each, token, hint, Trust(ca)) for each in endpoint.split(",")]
        return operators[0] if len(operators) == 1 else _leader(operators)

    return Environment(name, endpoint, connect, str(entry.get("gateway_host") or ""))


def _leader(operators: Sequence[Transport]) -> Transport:
    """Ask all operators at once which of them leads. Return that one, or else one that answers, or the first."""
    answers: queue.SimpleQueue[tuple[Transport, bool | None]] = queue.SimpleQueue()

    def ask(operator: Transport) -> None:
        try:
            status = operator.call("GET", "/livez", timeout_s=CONNECT_TIMEOUT_S)
            answers.put((operator, bool(status.get("leads", True))))
        except (CortexError, AttributeError):
            answers.put((operator, None))

    for each in operators:  # a machine that is lost must not delay the end of the command
        threading.Thread(target=ask, args=(each,), daemon=True).start()
    standby = None
    for _ in operators:
        operator, leads = answers.get()
        if leads:
            return operator
        standby = operator if leads is False else standby
    return standby or operators[0]


def _host_of(url: str) -> str:
    """Return the host of a URL in lower case; "" if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


def _checked_ca(file: Path, endpoint: str) -> str:
    path = file.expanduser().absolute()
    if not all(each.startswith("https://") for each in endpoint.split(",")):
        raise InputError(f"--ca requires an address that begins with https:// (got {endpoint})")
    try:
        Trust(str(path)).context()
    except ssl.SSLError as error:
        raise InputError(f"{path}: does not contain certificates in PEM format ({error.reason or error})") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read ({(error.strerror or str(error)).lower()})") from None
    return str(path)


def _checked_endpoint(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise InputError(f"{endpoint!r} is not a valid operator address; an example is https://cortex.example.com:8889")
    return endpoint.rstrip("/")
