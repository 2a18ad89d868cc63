"""An installation: its settings besides its path, shared by all its operators, and the identity of the last operator.

Both are files of the home.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cortex.errors import InputError, OperatorUnavailableError
from cortex.home import Home, write_private
from cortex.processes.identity import Identity

#: Folder in a home whose files `cortex restore` moves in place.
RESTORED = "restored"

_FILE = "installation.json"
#: Instead of a database's URL: the database in the home.
_SQLITE = "sqlite"
_ENGINES = ("local", "ray")
#: Modules of the extra `ray`, required by an operator with that engine.
_OF_RAY = ("cryptography", "ray")
_GATEWAYS = re.compile(r"operator|all|group:[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True)
class Installation:
    """The engine, the database, and the addresses of operator and gateway."""

    engine: str = "local"  #: "local" or "ray"
    ray_address: str | None = None  #: `host:port` of Ray's head, or `ray://host:port` of its client server
    database: str | None = None  #: `postgresql://…`, possibly with a password; None: SQLite in the home
    advertise: str | None = None  #: address of this machine for nodes; None: the source address towards Ray's head
    node_port: int = 8890  #: port of the operator for nodes
    gateways: str = "operator"  #: "operator": only this machine; "all": each node too; "group:NAME": a group of nodes
    v2_at_root: bool = False  #: gateways also answer the Open Inference Protocol at `/v2`
    connections_per_address: int = 0  #: limit of gateways for one address; 0: by the memory of their machine
    #: The addresses and certificate of the last operator, stored by itself (`operator/bootstrap.py`).
    gateway_port: int = 8888
    operator_port: int = 8889
    host: str = "127.0.0.1"
    tls_cert: str | None = None  #: absolute path; None: plain HTTP
    tls_key: str | None = None

    @classmethod
    def read(cls, home: Home) -> Installation:
        """Return the stored settings, or the defaults of a single machine. Raises: InputError."""
        path = home.path / _FILE
        if (home.path / RESTORED).exists():
            raise InputError(f"a restore into {home.path} was interrupted; run `cortex restore` again to complete it")
        try:
            return cls._checked(json.loads(path.read_text()))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path} can't be read ({error}); remove it, and run `cortex up` with its flags again"
            ) from None

    @classmethod
    def _checked(cls, data: Any) -> Installation:
        """Validate stored settings. Raises: ValueError."""
        if not isinstance(data, dict):
            raise ValueError("it is not a map")
        found = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name, value in found.items():
            default = getattr(cls, name)
            is_switch = isinstance(default, bool) and isinstance(value, bool)
            is_number = type(default) is int and type(value) is int and (0 < value < 65536 or value == default)
            is_text = not isinstance(default, int) and (isinstance(value, str) or value is default is None)
            if not is_number and not is_text and not is_switch:
                raise ValueError(f"{name} is {value!r}")
        return cls(**found)

    def write(self, home: Home) -> None:
        """Store the settings, readable only by the owner."""
        write_private(home.path / _FILE, json.dumps(asdict(self)))

    def changed(self, **changes: str | int | None) -> Installation:
        """Return a copy with all changes that are not None. Raises: InputError if the result is invalid."""
        if changes.get("engine") == "local" and not changes.get("gateways"):
            changes["gateways"] = "operator"  # stored gateways on nodes no longer apply
        before = self
        if changes.get("database") == _SQLITE:
            before, changes["database"] = replace(self, database=None), None
        made = replace(before, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
        if made.engine not in _ENGINES:
            raise InputError(f"--engine {made.engine}: must be {' or '.join(_ENGINES)}")
        if made.engine == "ray" and not _is_address(made.ray_address):
            raise InputError("--engine ray requires --ray-address HOST:PORT, the address of Ray's head")
        if made.engine == "local" and changes.get("ray_address"):
            raise InputError("--ray-address requires --engine ray")
        if not _GATEWAYS.fullmatch(made.gateways):
            raise InputError(f"--gateways {made.gateways}: must be operator, all, or group:NAME for a group of nodes")
        if made.engine == "local" and made.gateways != "operator":
            raise InputError(f"--gateways {made.gateways} requires --engine ray: there are no other nodes")
        if made.database and not made.database.startswith(("postgresql://", "postgres://")):
            raise InputError(f"--database must be postgresql://USER:PASSWORD@HOST/NAME, or {_SQLITE}")
        return made

    def check_modules(self, is_kept: bool = True) -> None:
        """Check that the modules of the engine are installed. `is_kept`: suggest switching back to the local engine.

        Raises: InputError.
        """
        lacking = [name for name in _OF_RAY if importlib.util.find_spec(name) is None] if self.engine == "ray" else []
        if lacking:
            raise InputError(
                f"--engine ray needs {' and '.join(lacking)} in the environment of the operator: "
                "`pip install 'cortex-serving[ray]'`, in a clone `pip install '.[ray]'`"
                + ("; `cortex up --engine local` switches back to this machine alone" if is_kept else "")
            )


def _is_address(text: str | None) -> bool:
    host, _, port = (text or "").rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


@dataclass(frozen=True)
class OperatorIdentity:
    """Process, version and addresses of an operator: the content of `run/operator.json`."""

    process: Identity
    url: str
    gateway_url: str
    address: str = ""  #: of operator and gateway, as seen from this machine
    tls_cert: str = ""  #: files of certificate and key; "" without TLS
    tls_key: str = ""
    host: str = ""  #: on which operator and gateway listen, as configured; "": unknown
    version: str = ""  #: of cortex, as the operator was started
    started_at: str = ""  #: in the format of ISO 8601

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def command(self) -> list[str]:
        """Command line of the process; empty if it has ended."""
        import psutil  # noqa: PLC0415 - 20 ms, which most commands save

        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).cmdline() if self.is_running() else []
        return []

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables with which the process was started; empty if it has ended."""
        import psutil  # noqa: PLC0415 - as above

        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).environ() if self.is_running() else {}
        return {}

    def is_running(self) -> bool:
        """Return whether this process is alive; another process with the same id does not count."""
        return self.process.is_alive()

    def check_not_stopped(self) -> None:
        """Check that no signal has suspended the process, which then accepts connections but never answers.

        Raises: OperatorUnavailableError.
        """
        if self.process.is_stopped():
            raise OperatorUnavailableError(
                f"the operator (pid {self.pid}) is stopped by a signal, such as SIGSTOP or Ctrl-Z; continue it with "
                f"`kill -CONT {self.pid}`"
            )

    def write(self, home: Home) -> None:
        """Write the file by which commands find this operator."""
        data = asdict(self)
        write_private(operator_file(home), json.dumps({**data.pop("process"), **data}))


def operator_file(home: Home) -> Path:
    """Return the file to which the operator writes its identity."""
    return home.run_dir / "operator.json"


def last_operator(home: Home) -> OperatorIdentity | None:
    """Return the operator that ran last, alive or not; None if everything was stopped, or none ever ran."""
    try:
        data: dict[str, Any] = json.loads(operator_file(home).read_text())
        texts = ("address", "tls_cert", "tls_key", "host", "version", "started_at")
        return OperatorIdentity(
            Identity.from_json(data),
            str(data["url"]).rstrip("/"),
            str(data["gateway_url"]),
            *(str(data.get(name) or "") for name in texts),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_operator(home: Home) -> OperatorIdentity | None:
    """Return the operator if its process is alive; it may still be starting."""
    operator = last_operator(home)
    return operator if operator and operator.is_running() else None
