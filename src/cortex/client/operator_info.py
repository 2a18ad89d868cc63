"""Who the local operator is and whether its process is there, read from `CORTEX_HOME/run`. Changes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex.client.transport import SYSTEM, Trust
from cortex.home import Home
from cortex.processes.identity import Identity


@dataclass(frozen=True)
class OperatorIdentity:
    """The operator that wrote `run/operator.json`."""

    process: Identity
    url: str
    gateway_url: str
    address: str = ""  #: on which both listen, as it is called from this machine
    tls_cert: str = ""  #: files of its certificate and key; "" without TLS
    tls_key: str = ""
    host: str = ""  #: on which both listen, as it was asked for; "": not known

    @property
    def pid(self) -> int:
        """The process's number."""
        return self.process.pid

    def is_running(self) -> bool:
        """Tell whether this very process is there and has not ended."""
        return self.process.is_alive()


def operator_file(home: Home) -> Path:
    """Return the file in which an operator writes who and where it is."""
    return home.run_dir / "operator.json"


def last_operator(home: Home) -> OperatorIdentity | None:
    """Return the operator that ran last, dead or alive; None if none ever did, or if it was stopped in order."""
    try:
        data: dict[str, Any] = json.loads(operator_file(home).read_text())
        return OperatorIdentity(
            Identity.from_json(data),
            str(data["url"]).rstrip("/"),
            str(data["gateway_url"]),
            *(str(data.get(name) or "") for name in ("address", "tls_cert", "tls_key", "host")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_operator(home: Home) -> OperatorIdentity | None:
    """Return the operator if its process is there; it may still be starting."""
    operator = last_operator(home)
    return operator if operator and operator.is_running() else None


def local_trust(home: Home, operator: OperatorIdentity) -> Trust:
    """Return the way to an operator of this machine: to the certificate that it serves, whoever else believes it."""
    if not operator.tls_cert:
        return SYSTEM

    def pins() -> list[str]:
        try:
            return home.fingerprints_file.read_text().split()
        except OSError:
            return []

    return Trust(pins=pins, address=operator.address)
