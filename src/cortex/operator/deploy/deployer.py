"""Changes what is wanted: deploy, patch, refresh, delete. Diagnose → diff → store → wake the reconciler.

Starts and stops nothing itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from cortex.config.project import content_hash
from cortex.config.schema import Api
from cortex.errors import ConflictError, InputError, NotFoundError
from cortex.lifecycle import ApiKind
from cortex.operator.deploy.diagnose import Diagnosis, Surroundings, diagnose
from cortex.operator.deploy.patch import diagnose_patch
from cortex.operator.deploy.projects import ProjectFolders
from cortex.state.apis import ApiRecord, ApiStore, Change, Target

_OVERRIDE = "(override with --force)"


@dataclass(frozen=True)
class Result:
    """What became of one API; exactly one of `message` and `error` says something."""

    api: str
    message: str = ""
    error: str = ""


class Deployer:
    """One change at a time; each is stored whole or not at all."""

    def __init__(
        self,
        store: ApiStore,
        projects: ProjectFolders,
        is_updating: Callable[[ApiRecord], bool],
        is_failing: Callable[[ApiRecord], bool],
        on_change: Callable[[], None],
        find_surroundings: Callable[[], Awaitable[Surroundings]] | None = None,
        share: Callable[[str, Path], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._projects = projects
        self._is_updating = is_updating
        self._is_failing = is_failing
        self._on_change = on_change
        self._find_surroundings = find_surroundings
        self._share = share
        self._turn = asyncio.Lock()

    async def deploy(self, archive: bytes, config_name: str, force: bool = False) -> list[Result]:
        """Make the APIs of an uploaded project what is wanted.

        `archive` is a zip of the project, its configuration at `config_name` included.

        Raises: ConfigError with every mistake; then nothing has changed.
        """
        _check_config_name(config_name)
        async with self._turn:
            deployed = [record.spec for record in self._store.records()]
            async with self._projects.unpacked(archive) as folder:
                around = await self._surroundings()
                diagnosis, project_hash = await asyncio.to_thread(_diagnose, folder, config_name, deployed, around)
                (folder / config_name).unlink()  # it is no file of the project
                results, changes, deletions = self._diff(diagnosis.apis, project_hash, force)
                if changes:
                    if self._share is not None:
                        await self._share(project_hash, folder)
                    self._projects.adopt(folder, project_hash)
                self._write(changes, deletions)
            return results

    async def patch(self, config: bytes, force: bool = False) -> list[Result]:
        """Change the configuration of deployed APIs; their projects stay. Raises: ConfigError, NotFoundError."""
        async with self._turn:
            records = {record.name: record for record in self._store.records()}
            around = await self._surroundings()
            diagnosed = await asyncio.to_thread(diagnose_patch, config, records, self._projects, around)
            changes: list[Change] = []
            results: list[Result] = []
            for api in diagnosed:
                if (record := records.get(api.name)) is None:
                    raise NotFoundError(f"{api.name} is not deployed")
                result, change = self._diff_one(api, record, record.target.project_hash, force)
                results.append(result)
                changes += [change] if change else []
            self._write(changes, [])
            return results

    async def refresh(self, name: str, force: bool = False) -> Result:
        """Replace every replica of an API by a new one of the same spec.

        Raises: NotFoundError, ConflictError; InputError if it has no processes.
        """
        async with self._turn:
            record = self._require(name)
            if record.spec.kind is ApiKind.SPLITTER:
                raise InputError(f"{name} is a {record.spec.kind}, which has no replicas; refresh the APIs behind it")
            if self._is_updating(record) and not force:
                raise ConflictError(f"{name} is updating {_OVERRIDE}")
            self._write([_change(record.spec, record.target.project_hash, secrets.token_hex(8))], [])
            return Result(name, f"updating {_label(record.spec)}")

    async def delete(self, name: str, keep_cache: bool = False) -> Result:
        """Delete an API; its replicas finish what is inside them.

        Raises: NotFoundError; ConflictError if a splitter sends requests to it.
        """
        async with self._turn:
            self._require(name)
            if users := _splitters_of(name, [record.spec for record in self._store.records()]):
                raise ConflictError(f"cannot delete {name} {_used_by(users)}; delete or change them first")
            self._store.write([], [name], keep_history=keep_cache)
            self._on_change()
            return Result(name, f"deleting {name}")

    async def _surroundings(self) -> Surroundings | None:
        return await self._find_surroundings() if self._find_surroundings else None

    def _require(self, name: str) -> ApiRecord:
        record = self._store.get(name)
        if record is None:
            raise NotFoundError(f"{name} is not deployed")
        return record

    def _write(self, changes: Sequence[Change], deletions: Sequence[str]) -> None:
        if changes or deletions:
            self._store.write(changes, deletions)
            self._on_change()

    def _diff(
        self, apis: Sequence[Api], project_hash: str, force: bool
    ) -> tuple[list[Result], list[Change], list[str]]:
        """Compare with what is stored: results to show, changes to store, APIs to delete."""
        results: list[Result] = []
        changes: list[Change] = []
        for api in apis:
            result, change = self._diff_one(api, self._store.get(api.name), project_hash, force)
            results.append(result)
            changes += [change] if change else []
        deletions = self._missing_of_deployment(apis)
        deployment = next((api.deployment for api in apis if api.deployment), None)
        if errors := self._uses_of_missing(apis, deletions):
            return [Result(name, error=error) for name, error in errors.items()], [], []
        if deployment and any(result.error for result in results):
            # Such a deployment is one whole: it is not changed in part.
            error = f"previous {deployment} deployment is updating {_OVERRIDE}"
            return [Result(api.name, error=error) for api in apis], [], []
        if deployment and not changes and not deletions:
            results = [replace(result, message=f"{deployment} deployment is up to date") for result in results]
        return results + [Result(name, f"deleting {name} api") for name in deletions], changes, deletions

    def _diff_one(
        self, api: Api, record: ApiRecord | None, project_hash: str, force: bool
    ) -> tuple[Result, Change | None]:
        label = _label(api)
        if record is None:
            return Result(api.name, f"creating {label}"), _change(api, project_hash, secrets.token_hex(8))
        change = _change(api, project_hash, record.nonce)
        is_updating = self._is_updating(record)
        if change.spec_id == record.spec_id:
            if self._is_failing(record):  # what it lacked may be there now: try it anew, not after its back-off
                return Result(api.name, f"updating {label}"), _change(api, project_hash, secrets.token_hex(8))
            state = "is already updating" if is_updating else "is up to date"
            return Result(api.name, f"{label} {state}"), None
        if is_updating and not force:
            return Result(api.name, error=f"{api.name} is updating {_OVERRIDE}"), None
        return Result(api.name, f"updating {label}"), change

    def _missing_of_deployment(self, apis: Sequence[Api]) -> list[str]:
        """Name the APIs that an earlier deploy of the same deployment had and this one has not."""
        deployments = {api.deployment for api in apis if api.deployment}
        names = {api.name for api in apis}
        return [r.name for r in self._store.records() if r.deployment in deployments and r.name not in names]

    def _uses_of_missing(self, apis: Sequence[Api], deletions: Sequence[str]) -> dict[str, str]:
        """Say which of the APIs to delete a splitter sends requests to, as it will be after this deploy."""
        names = {api.name for api in apis}
        wanted = [*apis, *(record.spec for record in self._store.records() if record.name not in names)]
        users = {name: _splitters_of(name, wanted) for name in deletions}
        return {name: f"cannot delete {name} {_used_by(some)}" for name, some in users.items() if some}


def _splitters_of(name: str, apis: Sequence[Api]) -> list[str]:
    return [api.name for api in apis if any(traffic.name == name for traffic in api.apis or ())]


def _used_by(splitters: Sequence[str]) -> str:
    return f"because it is used by the following TrafficSplitter(s): {', '.join(splitters)}"


def revision_of(api: Api, project_hash: str, nonce: str) -> str:
    """Return the hash of all that, when it changes, needs new processes."""
    handler = api.handler.model_dump(mode="json")
    if handler["server_side_batching"] is None:  # as before there was such a key: an upgrade restarts nothing
        del handler["server_side_batching"]
    parts: dict[str, Any] = {
        "name": api.name,
        "handler": handler,
        "compute": api.compute.model_dump(mode="json"),
        "project": project_hash,
        "nonce": nonce,
    }
    if api.tracker is not None:  # of which a process is told no more
        parts["tracker"] = [api.tracker.key, api.tracker.model_type]
    if api.readiness is not None:
        parts["readiness"] = api.readiness
    return _digest(parts)


def _change(api: Api, project_hash: str, nonce: str) -> Change:
    target = Target(revision_of(api, project_hash, nonce), api, project_hash)
    spec_id = _digest({"revision": target.revision, "spec": api.model_dump(mode="json")})
    return Change(target, nonce, spec_id)


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _label(api: Api) -> str:
    return f"{api.name} api" if api.deployment else f"{api.name} ({api.kind})"


def _check_config_name(name: str) -> None:
    if name != PurePosixPath(name).name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise InputError(f"{name!r} is not the name of a file in the project folder")


def _diagnose(
    folder: Path, config_name: str, deployed: Sequence[Api], around: Surroundings | None
) -> tuple[Diagnosis, str]:
    diagnosis = diagnose(folder / config_name, config_name, deployed, around)
    return diagnosis, content_hash(diagnosis.project)
