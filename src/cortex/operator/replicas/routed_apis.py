"""The APIs whose class has routes, so that the gateway sends them the requests to all paths below their endpoints.

A revision has routes if its replicas reported some in their signature. Until a process has loaded the code, which
requests may even wait for, its source decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from cortex.errors import DatabaseUnavailableError
from cortex.lifecycle import ApiKind
from cortex.operator.deploy.projects import ProjectFolders
from cortex.operator.replicas.signatures import Signatures
from cortex.predictor.checks.source_checks import class_routes
from cortex.predictor.interface import GENERATIONS
from cortex.state.queries.apis import ApiRecord
from cortex.state.revision import Target


class RoutedApis:
    """Finds them, and remembers the result for each revision."""

    def __init__(self, signatures: Signatures, projects: ProjectFolders) -> None:
        self._signatures = signatures
        self._projects = projects
        self._reported: dict[tuple[str, str], bool] = {}
        self._in_source: dict[tuple[str, str], bool] = {}

    def names(self, records: Iterable[ApiRecord]) -> frozenset[str]:
        """Return the names of those APIs of which the newest or the serving revision has routes."""
        targets = [(record.name, target) for record in records for target in (record.target, record.serving) if target]
        keys = {_key(target) for _, target in targets}
        self._reported = {key: value for key, value in self._reported.items() if key in keys}
        self._in_source = {key: value for key, value in self._in_source.items() if key in keys}
        return frozenset(name for name, target in targets if self._has_routes(target))

    def _has_routes(self, target: Target) -> bool:
        spec, key = target.spec, _key(target)
        if spec.kind is not ApiKind.REALTIME or spec.handler.path is None or spec.is_application:
            return False
        if key in self._reported:
            return self._reported[key]
        signature = self._signatures.in_memory(target)
        if signature is None and key not in self._in_source:
            with contextlib.suppress(DatabaseUnavailableError):  # replicas that run report it again
                signature = self._signatures.of(target)
        if signature is not None:
            self._reported[key] = bool(signature.routes)
            return self._reported[key]
        if key not in self._in_source:
            self._in_source[key] = self._source_has_routes(target)
        return self._in_source[key]

    def _source_has_routes(self, target: Target) -> bool:
        handler = target.spec.handler
        row = GENERATIONS.get((target.spec.kind, handler.interface, handler.type, handler.models is not None))
        if row is None or not row.takes_routes or not row.class_name or handler.path is None:
            return False
        try:
            text = (self._projects.path(target.project_hash) / handler.path).read_text(errors="replace")
        except OSError:
            return False
        return bool(class_routes(text, row.class_name))


def _key(target: Target) -> tuple[str, str]:
    return target.spec.name, target.revision
