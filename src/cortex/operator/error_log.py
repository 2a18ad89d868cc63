"""Error log of a control loop: a database outage is logged once, not with every failed pass."""

from __future__ import annotations

from cortex.errors import DatabaseUnavailableError
from cortex.telemetry import Logger


class LoopErrorLog:
    """Logs the failures of one loop. Any error but a database outage is logged each time, with its traceback."""

    def __init__(self, logger: Logger, message: str) -> None:
        self._logger = logger
        self._message = message
        self._in_outage = False

    def failed(self, error: Exception, **fields: object) -> None:
        """Log a failed pass."""
        if not isinstance(error, DatabaseUnavailableError):
            self._logger.error(self._message, exc_info=error, **fields)
        elif not self._in_outage:
            self._in_outage = True
            self._logger.warning(f"{self._message}: the database is unavailable", error=error, **fields)

    def succeeded(self) -> None:
        """Log the end of an outage, if there was one."""
        if self._in_outage:
            self._in_outage = False
            self._logger.info(f"{self._message}: resolved, the database is back")
