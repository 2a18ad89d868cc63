"""Signatures of the deployed revisions: what replicas report is stored, so that it is known when none runs.

`RoutedApis` finds the revisions whose class has routes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from cortex.errors import DatabaseUnavailableError
from cortex.lifecycle import ApiKind
from cortex.operator.deploy.projects import ProjectFolders
from cortex.payloads.signature import ApiSignature, parse_signature
from cortex.predictor.checks.source_checks import class_routes
from cortex.predictor.interface import GENERATIONS
from cortex.state.queries.apis import ApiRecord
from cortex.state.queries.signatures import SignatureStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.spec import ReplicaStatus


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

    def of(self, revision: Revision) -> ApiSignature | None:
        """Return the signature of a revision; None if it is not known. Raises: DatabaseUnavailableError."""
        key = _key(revision)
        text = self._known.get(key) or self._store.get(*key)
        return _parse(text) if text is not None else None

    def in_memory(self, revision: Revision) -> ApiSignature | None:
        """Return the signature of a revision of which a replica runs; None for others, and until it has reported it."""
        text = self._known.get(_key(revision))
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


class RoutedApis:
    """The APIs whose class has routes, so that the gateway sends them the requests to all paths below their endpoints.

    A revision has routes if its replicas reported some in their signature. Until a process has loaded the code, which
    requests may even wait for, its source decides. The result for each revision is kept.
    """

    def __init__(self, signatures: Signatures, projects: ProjectFolders) -> None:
        self._signatures = signatures
        self._projects = projects
        self._reported: dict[tuple[str, str], bool] = {}
        self._in_source: dict[tuple[str, str], bool] = {}

    def names(self, records: Iterable[ApiRecord]) -> frozenset[str]:
        """Return the names of those APIs of which the newest or the serving revision has routes."""
        revisions = [(record.name, revision) for record in records for revision in record.revisions]
        keys = {_key(revision) for _, revision in revisions}
        self._reported = {key: value for key, value in self._reported.items() if key in keys}
        self._in_source = {key: value for key, value in self._in_source.items() if key in keys}
        return frozenset(name for name, revision in revisions if self._has_routes(revision))

    def _has_routes(self, revision: Revision) -> bool:
        spec, key = revision.spec, _key(revision)
        if spec.kind is not ApiKind.REALTIME or spec.handler.path is None or spec.is_application:
            return False
        if key in self._reported:
            return self._reported[key]
        signature = self._signatures.in_memory(revision)
        if signature is None and key not in self._in_source:
            with contextlib.suppress(DatabaseUnavailableError):  # replicas that run report it again
                signature = self._signatures.of(revision)
        if signature is not None:
            self._reported[key] = bool(signature.routes)
            return self._reported[key]
        if key not in self._in_source:
            self._in_source[key] = self._source_has_routes(revision)
        return self._in_source[key]

    def _source_has_routes(self, revision: Revision) -> bool:
        handler = revision.spec.handler
        row = GENERATIONS.get((revision.spec.kind, handler.interface, handler.type, handler.models is not None))
        if row is None or not row.takes_routes or not row.class_name or handler.path is None:
            return False
        try:
            text = (self._projects.path(revision.project_hash) / handler.path).read_text(errors="replace")
        except OSError:
            return False
        return bool(class_routes(text, row.class_name))


def _key(revision: Revision) -> tuple[str, str]:
    return revision.spec.name, revision.hash


def _parse(text: str) -> ApiSignature | None:
    try:
        return parse_signature(text)
    except (ValueError, RecursionError):
        return None
