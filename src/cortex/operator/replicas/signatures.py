"""Signatures of the deployed revisions: what replicas report is stored, so that it is known when none runs."""

from __future__ import annotations

from collections.abc import Iterable

from cortex.payloads.signature import ApiSignature, parse_signature
from cortex.replica.spec import ReplicaStatus
from cortex.state.queries.signatures import SignatureStore
from cortex.state.revision import Target
from cortex.telemetry import Logger


class Signatures:
    """Signatures by API and revision, with those of the running replicas in memory."""

    def __init__(self, store: SignatureStore, logger: Logger) -> None:
        self._store = store
        self._logger = logger
        self._reported: dict[str, str] = {}  #: the last signature of each running replica that was handled
        self._known: dict[tuple[str, str], str] = {}

    def record(self, statuses: Iterable[ReplicaStatus]) -> None:
        """Store the signatures that changed. Raises: DatabaseUnavailableError."""
        reported: dict[str, str] = {}
        for status in statuses:
            if not status.signature:
                continue
            if self._reported.get(status.id) != status.signature:
                self._store_one(status)
                self._reported[status.id] = status.signature
            reported[status.id] = status.signature
        self._reported = reported

    def of(self, target: Target) -> ApiSignature | None:
        """Return the signature of a revision; None if it is not known. Raises: DatabaseUnavailableError."""
        key = (target.spec.name, target.revision)
        text = self._known.get(key) or self._store.get(*key)
        return _parse(text) if text is not None else None

    def in_memory(self, target: Target) -> ApiSignature | None:
        """Return the signature of a revision of which a replica runs; None for others, and until it has reported it."""
        text = self._known.get((target.spec.name, target.revision))
        return _parse(text) if text is not None else None

    def _store_one(self, status: ReplicaStatus) -> None:
        key = (status.api, status.revision)
        if _parse(status.signature) is None:  # another version, or user code, wrote it
            self._logger.warning("signature of an API can't be read", api=status.api, replica=status.id)
            return
        if self._known.get(key) != status.signature:
            self._store.put(*key, status.signature)
            self._known = {other: text for other, text in self._known.items() if other[0] != status.api}
            self._known[key] = status.signature


def _parse(text: str) -> ApiSignature | None:
    try:
        return parse_signature(text)
    except (ValueError, RecursionError):
        return None
