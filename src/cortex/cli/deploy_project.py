"""Deployment of a project at the start of a container: `cortex up --foreground --stop-all --deploy FILE`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TypeVar

from cortex.cli.output import located
from cortex.client.client import Client
from cortex.client.packaging import Package, find_config, pack_file
from cortex.errors import ConfigError, CortexError, NotFoundError, OperatorUnavailableError
from cortex.operator.deploy.diagnose import diagnose
from cortex.payloads.json_object import Json

T = TypeVar("T")
#: `write(level, message, **fields)` of `LogOutput`.
Write = Callable[..., None]

_POLL_S = 0.1
_LONG_POLL_S = 30.0
_REFUSED = 1


@dataclass(frozen=True)
class StartDeployment:
    """A packed project without mistakes, and the operator that will get it."""

    file: Path
    package: Package
    client: Client

    @classmethod
    def prepare(cls, path: Path, client: Client) -> StartDeployment:
        """Check and pack the project of the configuration file at `path`. Raises: InputError, ConfigError."""
        file = find_config(path)
        try:
            package = pack_file(file)
            diagnose(file, file.name)
        except ConfigError as error:
            raise located(error, file.parent) from None
        return cls(file, package, client)

    def run(self, write: Write, is_stopping: Event) -> int:
        """Deploy once the operator answers, and log which APIs become live, until `is_stopping` is set.

        Return the exit code: not 0 if the operator refuses the project. An API that can't start is logged only,
        because other APIs, and its previous revision, may serve.
        """
        try:
            results = self._retry(lambda: self.client.upload(self.package, force=True), is_stopping)
            refused = [result for result in results or () if result["error"]]
            for result in results or ():
                if not result["error"]:
                    write("info", result["message"], api=result["api"])
                    self._log_outcome(result["api"], write, is_stopping)
        except CortexError as error:
            if is_stopping.is_set():
                return 0
            error = located(error, self.file.parent) if isinstance(error, ConfigError) else error
            write("error", f"{self.file} was not deployed: {error}")
            return error.exit_code
        for result in refused:
            write("error", f"{self.file} was not deployed: {result['error']}", api=result["api"])
        return _REFUSED if refused else 0

    def _log_outcome(self, name: str, write: Write, is_stopping: Event) -> None:
        api: Json | None = None
        while api is None or api["status"]["status_code"] == "updating":
            try:
                api = self._retry(lambda: self.client.wait_api(name, _LONG_POLL_S), is_stopping)
            except NotFoundError:  # deleted meanwhile
                return
            if api is None:
                return
        status = api["status"]
        if status["status_code"] == "live":
            write("info", f"{name} is live", api=name, endpoint=api["endpoint"])
            return
        reason = (status.get("failure") or {}).get("message") or status["message"]
        write("error", f"{name} failed to become live: {reason}", api=name)

    def _retry(self, call: Callable[[], T], is_stopping: Event) -> T | None:
        """Call until the operator answers: it may still start, or start again. Return None at the end."""
        while not is_stopping.wait(_POLL_S):
            try:
                return call()
            except OperatorUnavailableError:
                continue
        return None
