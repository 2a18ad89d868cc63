"""What an installation is made of beside this machine: kept in its home, so that each of its operators is alike."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from cortex.errors import InputError
from cortex.home import Home, write_private

_FILE = "installation.json"
_ENGINES = ("local", "ray")
#: What the extra `ray` installs, and an operator of that engine can't do without.
_OF_RAY = ("cryptography", "ray")
_GATEWAYS = re.compile(r"operator|all|group:[A-Za-z0-9_.-]{1,200}")


@dataclass(frozen=True)
class Installation:
    """Where replicas run, where the state is, and where operator and gateway listen."""

    engine: str = "local"  #: "local" or "ray"
    ray_address: str | None = None  #: `host:port` of Ray's head, or `ray://host:port` of its client server
    database: str | None = None  #: `postgresql://…`, perhaps with a password; None: SQLite in the home
    advertise: str | None = None  #: address by which nodes reach this machine; None: the one that leads to Ray's head
    node_port: int = 8890  #: on which nodes reach the operator
    gateways: str = "operator"  #: where they are: only beside it; "all": on each node too; "group:NAME": on some nodes
    #: Where the operator that came up last listened, and what it served: kept by itself, see `operator/bootstrap.py`.
    gateway_port: int = 8888
    operator_port: int = 8889
    host: str = "127.0.0.1"
    tls_cert: str | None = None  #: absolute path; None: plain HTTP
    tls_key: str | None = None

    @classmethod
    def read(cls, home: Home) -> Installation:
        """Return what `write` kept; without that, an installation of one machine. Raises: InputError."""
        path = home.path / _FILE
        try:
            return cls._checked(json.loads(path.read_text()))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path} can't be read ({error}); remove it, and give `cortex up` its flags again"
            ) from None

    @classmethod
    def _checked(cls, data: Any) -> Installation:
        """Raises: ValueError for what `write` does not write."""
        if not isinstance(data, dict):
            raise ValueError("it is no map")
        found = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name, value in found.items():
            default = getattr(cls, name)
            is_port = isinstance(default, int) and type(value) is int and 0 < value < 65536
            is_text = not isinstance(default, int) and (isinstance(value, str) or value is default is None)
            if not is_port and not is_text:
                raise ValueError(f"{name} is {value!r}")
        return cls(**found)

    def write(self, home: Home) -> None:
        """Keep it, for its owner only."""
        write_private(home.path / _FILE, json.dumps(asdict(self)))

    def changed(self, **changes: str | int | None) -> Installation:
        """Return a copy in which what is not None is changed. Raises: InputError if that makes no sense."""
        if changes.get("engine") == "local" and not changes.get("gateways"):
            changes["gateways"] = "operator"  # there are no nodes any more for those that were kept
        made = replace(self, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
        if made.engine not in _ENGINES:
            raise InputError(f"--engine {made.engine}: there are {' and '.join(_ENGINES)}")
        if made.engine == "ray" and not _is_address(made.ray_address):
            raise InputError("--engine ray wants --ray-address HOST:PORT, the address of Ray's head")
        if made.engine == "local" and changes.get("ray_address"):
            raise InputError("--ray-address is for --engine ray")
        if not _GATEWAYS.fullmatch(made.gateways):
            raise InputError(f"--gateways {made.gateways}: it is operator, all, or group:NAME for a group of nodes")
        if made.engine == "local" and made.gateways != "operator":
            raise InputError(f"--gateways {made.gateways} is for --engine ray: there are no other nodes")
        if made.database and not made.database.startswith(("postgresql://", "postgres://")):
            raise InputError("--database wants postgresql://USER:PASSWORD@HOST/NAME")
        return made

    def check_modules(self, is_kept: bool = True) -> None:
        """Make sure that what its engine imports is installed; `is_kept`: the way back to the other one is named.

        Raises: InputError.
        """
        lacking = [name for name in _OF_RAY if importlib.util.find_spec(name) is None] if self.engine == "ray" else []
        if lacking:
            raise InputError(
                f"--engine ray needs {' and '.join(lacking)} beside the operator, too: "
                "`pip install 'cortex-serving[ray]'`, in a clone `pip install '.[ray]'`"
                + ("; `cortex up --engine local` goes back to this machine alone" if is_kept else "")
            )


def _is_address(text: str | None) -> bool:
    host, _, port = (text or "").rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
