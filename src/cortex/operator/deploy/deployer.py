"""Deploy, patch, roll back, refresh and delete APIs: diagnose → compare with the store → store → wake the reconciler.

Changes only what is desired; the reconciler starts and stops replicas.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakValueDictionary

from cortex.config.document import parse
from cortex.config.rules.cross_api_rules import is_split
from cortex.config.rules.endpoint_rules import describe_foreign_path, gateway_path_owner
from cortex.config.schema import Api, PinnedModel, RecordConfig
from cortex.errors import (
    ConfigError,
    ConflictError,
    Diagnostic,
    ForbiddenError,
    InputError,
    NotFoundError,
    with_article,
)
from cortex.lifecycle import ApiKind
from cortex.operator.access.tokens import Principal
from cortex.operator.deploy.diagnose import Diagnosis, Machine, diagnose, diagnose_project
from cortex.operator.deploy.history import describe_changes, spec_changes
from cortex.operator.deploy.model_pins import pin_models, pins_of, with_pins
from cortex.operator.deploy.projects import ProjectFolders, SharedProjects
from cortex.projects.project import ProjectFiles, content_hash
from cortex.state.queries.apis import ApiChange, ApiRecord, ApiStore
from cortex.state.queries.history import BY_CANARY, HistoryEntry
from cortex.state.revision import Revision

_OVERRIDE = "(override with --force)"
#: Name of the file in diagnostics of a patch.
_PATCH_NAME = "cortex.yaml"


@dataclass(frozen=True)
class DeployResult:
    """Outcome for one API; exactly one of `message` and `error` is set."""

    api: str
    message: str = ""
    error: str = ""
    changes: tuple[str, ...] = ()  #: differences from the revision that was live
    installs: tuple[str, ...] = ()  #: packages that its models need and that are not installed here


class Deployer:
    """Applies one change at a time; each is stored completely or not at all.

    `shared` has the projects in the database, if operators share one.
    """

    def __init__(
        self,
        store: ApiStore,
        projects: ProjectFolders,
        is_updating: Callable[[ApiRecord], bool],
        is_failing: Callable[[ApiRecord], bool],
        on_change: Callable[[], None],
        inspect_machine: Callable[[], Awaitable[Machine]] | None = None,
        shared: SharedProjects | None = None,
    ) -> None:
        self._store = store
        self._projects = projects
        self._is_updating = is_updating
        self._is_failing = is_failing
        self._on_change = on_change
        self._inspect_machine = inspect_machine
        self._shared = shared
        self._lock = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  #: by API

    async def deploy(
        self,
        archive: bytes,
        config_name: str,
        force: bool = False,
        principal: Principal | None = None,
        by: str = "",
    ) -> list[DeployResult]:
        """Deploy the APIs of an uploaded project.

        `archive` is a zip of the project, its configuration at `config_name` included. `by` names the caller in the
        history.

        Raises: ConfigError with every mistake; ForbiddenError if `principal` may not change all of the APIs. Then
        nothing has changed.
        """
        _check_config_name(config_name)
        async with (
            self._projects.unpacked(archive) as folder,
            self._turn_of(await asyncio.to_thread(_read, folder / config_name)),
        ):
            deployed, machine = self._targets(), await self._machine()
            diagnosis, project_hash = await asyncio.to_thread(_diagnose, folder, config_name, _specs(deployed), machine)
            apis = await self._pinned(diagnosis.apis, machine)
            async with self._lock:
                if (now := self._targets()) != deployed:
                    # Without the machine: the models were checked above, and only the other APIs have changed.
                    await asyncio.to_thread(_diagnose, folder, config_name, _specs(now), None)
                (folder / config_name).unlink()  # not a file of the project: it must not change the project's hash
                results, changes, deletions = self._compare(apis, project_hash, force)
                if principal is not None:
                    principal.check_apis({api.name for api in apis} | set(deletions), config_name)
                    self._check_paths(apis, principal)
                changes = await self._describe(changes, folder, "deploy", by)
                if changes:
                    if self._shared is not None:
                        await self._shared.save(project_hash, folder)
                    self._projects.adopt(folder, project_hash)
                results = self._write(results, changes, deletions)  # no await since adopt: or the project is deleted
                changed = {change.target.spec.name for change in changes}
                installs = {name: lines for name, lines in diagnosis.installs.items() if name in changed}
                return [replace(result, installs=installs.get(result.api, ())) for result in results]

    async def patch(
        self, config: bytes, force: bool = False, principal: Principal | None = None, by: str = ""
    ) -> list[DeployResult]:
        """Change the configuration of deployed APIs; their projects stay.

        Raises: ConfigError, NotFoundError; ForbiddenError if `principal` may not change all of the APIs.
        """
        async with self._turn_of(config):
            deployed, machine = self._targets(), await self._machine()
            apis = await asyncio.to_thread(_diagnose_patch, config, deployed, self._projects, machine)
            if principal is not None:
                principal.check_apis({api.name for api in apis}, _PATCH_NAME)
            apis = await self._pinned(apis, machine)
            async with self._lock:
                if principal is not None:
                    self._check_paths(apis, principal)
                if (now := self._targets()) != deployed:
                    await asyncio.to_thread(_diagnose_patch, config, now, self._projects, None)
                records = {record.name: record for record in self._store.records()}
                changes: list[ApiChange] = []
                results: list[DeployResult] = []
                for api in apis:
                    if (record := records.get(api.name)) is None:
                        raise NotFoundError(f"{api.name} is not deployed")
                    result, change = self._compare_one(api, record, record.target.project_hash, force)
                    results.append(result)
                    changes += [change] if change else []
                return self._write(results, await self._describe(changes, None, "patch", by), [])

    async def rollback(
        self,
        name: str,
        number: int | None = None,
        force: bool = False,
        by: str = "",
        only_from: str = "",
        principal: Principal | None = None,
    ) -> DeployResult:
        """Deploy an entry of an API's history again; without `number`, the one that was live before the newest.

        During an update, `force` is required unless the entry is the one that serves: then this cancels the update.
        Raises: NotFoundError; ConflictError if it is updating, clashes with the other APIs of today, or its newest
        revision is not `only_from`, if that is given; ForbiddenError if `principal` may not take its endpoint.
        """
        async with self._lock:
            record = self._require(name)
            if only_from and record.revision != only_from:  # a deploy had the lock until now
                raise ConflictError(f"{name} was deployed again")
            entry = _choose(record, self._store.history(name), number)
            revision = Revision(entry.revision, entry.spec, entry.project_hash)
            label = _label(entry.spec)
            if revision == record.target:
                return DeployResult(name, f"{label} already has the files and configuration of revision {entry.number}")
            if self._is_updating(record) and not force and revision != record.serving:
                raise ConflictError(f"{name} is updating {_OVERRIDE}")
            self._check_clashes(entry.spec, record.spec)
            if principal is not None:
                self._check_paths([entry.spec], principal)
            await self._restore_project(entry)
            result = DeployResult(name, f"rolling back {label} from revision {record.number} to {entry.number}")
            change = ApiChange(revision, entry.nonce, _spec_id(revision))
            described = await self._describe([change], None, f"rollback to {entry.number}", by)
            return self._write([result], described, [])[0]

    async def deploy_models(self, name: str, pins: Sequence[PinnedModel], only_from: str) -> None:
        """Deploy an API with other versions of its models. Its newest revision must be `only_from`.

        Raises: ConflictError if it is another one by now.
        """
        async with self._lock:
            record = self._store.get(name)
            if record is None or record.revision != only_from:
                raise ConflictError(f"{name} was deployed again")
            change = _change(with_pins(record.spec, pins), record.target.project_hash, record.nonce)
            self._write([], await self._describe([change], None, "new model version", BY_CANARY), [])

    async def refresh(self, name: str, force: bool = False) -> DeployResult:
        """Replace every replica of an API by a new one with the same spec.

        Raises: NotFoundError; ConflictError if it is updating; InputError if it has no replicas.
        """
        async with self._lock:
            record = self._require(name)
            if record.spec.kind is ApiKind.SPLITTER:
                raise InputError(
                    f"{name} is {with_article(record.spec.kind)}, which has no replicas; refresh the APIs behind it"
                )
            if self._is_updating(record) and not force:
                raise ConflictError(f"{name} is updating {_OVERRIDE}")
            change = _change(record.spec, record.target.project_hash, secrets.token_hex(8))
            self._store.write([replace(change, is_restart=True)])
            self._on_change()
            return DeployResult(name, f"updating {_label(record.spec)}")

    async def delete(self, name: str, keep_cache: bool = False) -> DeployResult:
        """Delete an API; its replicas finish the requests inside them.

        Raises: NotFoundError; ConflictError if a splitter sends requests to it.
        """
        async with self._lock:
            self._require(name)
            if users := _splitters_of(name, [record.spec for record in self._store.records()]):
                raise ConflictError(f"cannot delete {name} {_used_by(users)}; delete or change them first")
            self._store.write([], [name], keep_versions=keep_cache)
            self._on_change()
            return DeployResult(name, f"deleting {name}")

    async def _pinned(self, apis: Sequence[Api], machine: Machine | None) -> list[Api]:
        """Return the APIs, with pinned models if they try new versions. Raises: InputError."""
        environ = machine.environ if machine is not None else os.environ
        known = {record.name: record.spec for record in self._store.records()}
        return [await pin_models(api, known.get(api.name), environ) for api in apis]

    @asynccontextmanager
    async def _turn_of(self, config: bytes) -> AsyncIterator[None]:
        """Wait for the deploys and patches of these APIs that came before.

        The check of a configuration asks buckets, which may not answer: it delays only changes of the same APIs, and
        holds no other lock.
        """
        async with AsyncExitStack() as stack:
            names: list[str] = []
            with suppress(ConfigError):  # the check reports it
                names = await asyncio.to_thread(_api_names, config)
            for name in sorted(names):
                await stack.enter_async_context(self._turns.setdefault(name, asyncio.Lock()))
            yield

    def _targets(self) -> dict[str, Revision]:
        """Return the newest revision of each API."""
        return {record.name: record.target for record in self._store.records()}

    async def _machine(self) -> Machine | None:
        return await self._inspect_machine() if self._inspect_machine else None

    def _require(self, name: str) -> ApiRecord:
        record = self._store.get(name)
        if record is None:
            raise NotFoundError(f"{name} is not deployed")
        return record

    def _write(
        self, results: list[DeployResult], changes: Sequence[ApiChange], deletions: Sequence[str]
    ) -> list[DeployResult]:
        """Store changes; return the results with their differences."""
        if changes or deletions:
            self._store.write(changes, deletions)
            self._on_change()
        differences = {change.target.spec.name: change.differences for change in changes}
        return [replace(result, changes=differences.get(result.api, ())) for result in results]

    async def _describe(
        self, changes: Sequence[ApiChange], folder: Path | None, action: str, by: str
    ) -> list[ApiChange]:
        """Add what the history shows. `folder` has the new project; None if it is stored already.

        Changes are described by their differences from the revision that serves, or else from the newest one.
        """
        described = []
        for change in changes:
            differences: tuple[str, ...] = ()
            if (record := self._store.get(change.target.spec.name)) is not None:
                before, after = record.serving or record.target, change.target
                old, new = (self._projects.path(revision.project_hash) for revision in (before, after))
                new = old if new == old else folder or new
                differences = await asyncio.to_thread(describe_changes, before.spec, after.spec, old, new)
            described.append(replace(change, action=action, by=by, differences=differences))
        return described

    async def _restore_project(self, entry: HistoryEntry) -> None:
        """Fetch the project of an entry from the shared database if its folder is not here. Raises: NotFoundError."""
        if self._shared is not None:
            await self._shared.fetch([entry.project_hash])
        if not self._projects.path(entry.project_hash).is_dir():
            raise NotFoundError(f"the files of revision {entry.number} are gone; deploy them again")

    def _check_paths(self, apis: Sequence[Api], principal: Principal) -> None:
        """Raises: ForbiddenError if `principal` is limited to an API, whose endpoint concerns paths of others."""
        if principal.api is None:
            return
        deployed = [record.spec for record in self._store.records()]
        for api in apis:
            if relation := describe_foreign_path(api, deployed):
                raise ForbiddenError(
                    f"the token {principal.name!r} is limited to the API {principal.api}, and {relation}, so nothing "
                    "was changed: choose another endpoint, or use a token that is not limited"
                )

    def _check_clashes(self, api: Api, before: Api) -> None:
        """Raises: ConflictError if a revision can't replace `before` beside the other APIs of today."""
        others = {record.name: record.spec for record in self._store.records() if record.name != api.name}
        endpoint = api.networking.endpoint
        if endpoint != before.networking.endpoint and (owner := gateway_path_owner(endpoint)):
            raise ConflictError(f"{endpoint} belongs to {owner}; deploy the API with another endpoint")
        for other in others.values():
            if other.networking.endpoint == endpoint and not is_split([api, *others.values()], endpoint, (api, other)):
                raise ConflictError(f"{endpoint} is now the endpoint of {other.name}; delete it or change its endpoint")
        for traffic in api.apis or ():
            if traffic.name not in others or others[traffic.name].kind is not ApiKind.REALTIME:
                raise ConflictError(f"{traffic.name}, to which this revision sends requests, is no RealtimeAPI now")

    def _compare(
        self, apis: Sequence[Api], project_hash: str, force: bool
    ) -> tuple[list[DeployResult], list[ApiChange], list[str]]:
        """Compare with the store; return results to show, changes to store, APIs to delete."""
        results: list[DeployResult] = []
        changes: list[ApiChange] = []
        for api in apis:
            result, change = self._compare_one(api, self._store.get(api.name), project_hash, force)
            results.append(result)
            changes += [change] if change else []
        deletions = self._missing_of_deployment(apis)
        deployment = next((api.deployment for api in apis if api.deployment), None)
        if errors := self._deletion_conflicts(apis, deletions):
            return [DeployResult(name, error=error) for name, error in errors.items()], [], []
        if deployment and any(result.error for result in results):
            # A deployment is changed as a whole or not at all.
            error = f"previous {deployment} deployment is updating {_OVERRIDE}"
            return [DeployResult(api.name, error=error) for api in apis], [], []
        if deployment and not changes and not deletions:
            results = [replace(result, message=f"{deployment} deployment is up to date") for result in results]
        return results + [DeployResult(name, f"deleting {name} api") for name in deletions], changes, deletions

    def _compare_one(
        self, api: Api, record: ApiRecord | None, project_hash: str, force: bool
    ) -> tuple[DeployResult, ApiChange | None]:
        label = _label(api)
        if record is None:
            return DeployResult(api.name, f"creating {label}"), _change(api, project_hash, secrets.token_hex(8))
        change = _change(api, project_hash, record.nonce)
        is_updating = self._is_updating(record)
        # An older version stored the id of a spec without the keys that are new since.
        if change.spec_id == _spec_id(record.target) or _has_equal_values(change.target, record.target):
            if self._is_failing(record):  # the cause may be gone: retry now instead of after the backoff
                retry = replace(_change(api, project_hash, secrets.token_hex(8)), is_restart=True)
                return DeployResult(api.name, f"updating {label}"), retry
            state = "is already updating" if is_updating else "is up to date"
            return DeployResult(api.name, f"{label} {state}"), None
        if is_updating and not force:
            return DeployResult(api.name, error=f"{api.name} is updating {_OVERRIDE}"), None
        return DeployResult(api.name, f"updating {label}"), change

    def _missing_of_deployment(self, apis: Sequence[Api]) -> list[str]:
        """Return the names of APIs that an earlier deploy of the same deployment had and this one has not."""
        deployments = {api.deployment for api in apis if api.deployment}
        names = {api.name for api in apis}
        return [r.name for r in self._store.records() if r.deployment in deployments and r.name not in names]

    def _deletion_conflicts(self, apis: Sequence[Api], deletions: Sequence[str]) -> dict[str, str]:
        """Return an error for each API to delete to which a splitter will send requests after this deploy."""
        names = {api.name for api in apis}
        desired = [*apis, *(record.spec for record in self._store.records() if record.name not in names)]
        users = {name: _splitters_of(name, desired) for name in deletions}
        return {name: f"cannot delete {name} {_used_by(some)}" for name, some in users.items() if some}


def _choose(record: ApiRecord, history: Sequence[HistoryEntry], number: int | None) -> HistoryEntry:
    """Return the entry to roll back to. Raises: NotFoundError."""
    if number is None:
        chosen = next((entry for entry in history if entry.number < record.number and entry.live_at is not None), None)
        message = f"{record.name} has no earlier revision that was live"
    else:
        chosen = next((entry for entry in history if entry.number == number), None)
        kept = ", ".join(str(entry.number) for entry in reversed(history))
        message = f"{record.name} has no revision {number} in its history, which has {kept}"
    if chosen is None:
        raise NotFoundError(f"{message}; `cortex history {record.name}` shows its revisions")
    return chosen


def _splitters_of(name: str, apis: Sequence[Api]) -> list[str]:
    return [api.name for api in apis if any(traffic.name == name for traffic in api.apis or ())]


def _used_by(splitters: Sequence[str]) -> str:
    return f"because it is used by the following TrafficSplitter(s): {', '.join(splitters)}"


def _label(api: Api) -> str:
    return f"{api.name} api" if api.deployment else f"{api.name} ({api.kind})"


def _check_config_name(name: str) -> None:
    if name != PurePosixPath(name).name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise InputError(f"{name!r} is not the name of a file in the project folder")


# Revisions.


def revision_of(api: Api, project_hash: str, nonce: str) -> str:
    """Return the hash of everything that requires new processes when it changes."""
    handler = api.handler.model_dump(mode="json")
    if handler["server_side_batching"] is None:  # hash as versions without this field do: an upgrade restarts nothing
        del handler["server_side_batching"]
    for extension in ("app", "protobuf_path", "pin_processes", "preload"):
        if not handler[extension]:
            del handler[extension]
    if not handler["dependencies"]["model_packages"]:
        del handler["dependencies"]["model_packages"]
    if handler["models"] is not None:
        del handler["models"]["canary"], handler["models"]["pinned"]
    if not api.runs_command:
        for name in ("command", "strip_prefix", "start_timeout_s"):
            del handler[name]
    parts: dict[str, Any] = {
        "name": api.name,
        "handler": handler,
        "compute": api.compute.model_dump(mode="json"),
        "project": project_hash,
        "nonce": nonce,
    }
    if api.tracker is not None:  # the fields of a tracker that processes get
        parts["tracker"] = [api.tracker.key, api.tracker.model_type]
    if pins := pins_of(api):
        parts["models"] = [[pin.model, pin.number, pin.digest] for pin in pins]
    if api.readiness is not None:
        parts["readiness"] = api.readiness
    if api.networking.record is not None:
        parts["record"] = api.networking.record.model_dump(mode="json")
        if api.networking.record.max_cpu == RecordConfig.model_fields["max_cpu"].default:
            del parts["record"]["max_cpu"]
    if api.runs_command:  # its environment has the endpoint
        parts["endpoint"] = api.networking.endpoint
    return _digest(parts)


def _change(api: Api, project_hash: str, nonce: str) -> ApiChange:
    revision = Revision(revision_of(api, project_hash, nonce), api, project_hash)
    return ApiChange(revision, nonce, _spec_id(revision))


def _has_equal_values(one: Revision, other: Revision) -> bool:
    """Return True if two specs differ at most in defaults that an older version did not have, and in notation."""
    values = (each.spec.model_dump(mode="json", exclude={"as_written"}) for each in (one, other))
    return one.hash == other.hash and next(values) == next(values) and not any(spec_changes(one.spec, other.spec))


def _spec_id(revision: Revision) -> str:
    return _digest({"revision": revision.hash, "spec": revision.spec.model_dump(mode="json")})


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# Diagnosis, on a thread.


def _read(file: Path) -> bytes:
    """Return the content of a file; none if it can't be read, which the check reports."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _specs(revisions: Mapping[str, Revision]) -> list[Api]:
    return [revision.spec for revision in revisions.values()]


def _diagnose(
    folder: Path, config_name: str, deployed: Sequence[Api], machine: Machine | None
) -> tuple[Diagnosis, str]:
    diagnosis = diagnose(folder / config_name, config_name, deployed, machine)
    return diagnosis, content_hash(diagnosis.project)


def _diagnose_patch(
    config: bytes, deployed: Mapping[str, Revision], projects: ProjectFolders, machine: Machine | None
) -> list[Api]:
    """Return the APIs of a configuration, each checked against the project that it is deployed with.

    Raises: ConfigError with every mistake; NotFoundError if one of them is not deployed.
    """
    names = _api_names(config)
    for name in names:
        if name not in deployed:
            raise NotFoundError(f"{name} is not deployed")
    hashes = dict.fromkeys(deployed[name].project_hash for name in names)
    specs = _specs(deployed)
    with tempfile.TemporaryDirectory(prefix="cortex-patch-") as folder:
        file = Path(folder) / _PATCH_NAME
        file.write_bytes(config)
        if not hashes:
            return list(diagnose_project(file, _PATCH_NAME, ProjectFiles(Path(folder), ()), specs).apis)
        problems: list[Diagnostic] = []
        apis: list[Api] = []
        for project_hash in hashes:
            project = ProjectFiles.scan(projects.path(project_hash), None)
            own = {name for name in names if deployed[name].project_hash == project_hash}
            try:
                diagnosis = diagnose_project(file, _PATCH_NAME, project, specs, machine)
                apis += [api for api in diagnosis.apis if api.name in own]
            except ConfigError as error:
                problems += [problem for problem in error.diagnostics if _api_of(problem, names) in (None, *own)]
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
    return sorted(apis, key=lambda api: names.index(api.name))


def _api_names(config: bytes) -> list[str]:
    """Return the names of the APIs of a configuration. Raises: ConfigError if it is not a YAML list of maps."""
    names = []
    for item in parse(config, _PATCH_NAME).items:
        name, kind = item.at("name"), item.at("kind")
        if name and isinstance(name.value, str) and not (kind and kind.value == "deployment"):
            names.append(name.value)
    return list(dict.fromkeys(names))


def _api_of(problem: Diagnostic, names: Sequence[str]) -> str | None:
    """Return the name of the API that a diagnostic is about; None if it is about the file or the project."""
    first = problem.path.split(".")[0].split(":")[0]
    return first if first in names else None
