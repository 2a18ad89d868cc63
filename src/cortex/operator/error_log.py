"""What a loop says of a pass that failed: while a database is away, that once, and not with each pass."""

from __future__ import annotations

from cortex.errors import DatabaseUnavailableError
from cortex.telemetry import Logger


class Complaint:
    """Whatever else goes wrong is said each time, with its traceback."""

    def __init__(self, logger: Logger, message: str) -> None:
        self._logger = logger
        self._message = message
        self._waits = False

    def failed(self, error: Exception, **fields: object) -> None:
        """Say that something failed, unless that is known."""
        if not isinstance(error, DatabaseUnavailableError):
            self._logger.error(self._message, exc_info=error, **fields)
        elif not self._waits:
            self._waits = True
            self._logger.warning(f"{self._message}: it waits for the database", error=error, **fields)

    def passed(self) -> None:
        """Say that it works again, if it did not."""
        if self._waits:
            self._waits = False
            self._logger.info(f"{self._message} no more: the database is back")
