"""Monitor the model source of one API: turn listings into catalogues and publish them to the connected clients.

    listings ──debounce──▶ confirmed and candidate catalogue ──download──▶ content store ──▶ CatalogueUpdate

**Debounce.** A change counts once two successive listings agree on it. Each version of a model has one of these states
(`PrefixState` holds them for all versions below one prefix):

               seen               seen again              other content
        GONE ────────▶ NEW ────────────────▶ SERVED ───────────────────▶ CHANGED
        ▲  ▲            │ not seen            │  │ ▲       seen again       │
        │  └────────────┘           not seen  │  │ └────────────────────────┘
        │   not seen again                    │  │ invalid files
        └────────────────── MISSING ◀─────────┘  └──────────▶ INVALID

| the newest listing has ▶ | same content as the last one | other content | invalid files | nothing |
|---|---|---|---|---|
| GONE    not served                     | –       | NEW     | GONE    | GONE    |
| NEW     not served, seen once          | SERVED  | NEW     | GONE    | GONE    |
| SERVED  served as listed               | SERVED  | CHANGED | INVALID | MISSING |
| CHANGED old content served             | SERVED  | CHANGED | INVALID | MISSING |
| INVALID old content served             | –       | CHANGED | INVALID | MISSING |
| MISSING old content served             | –       | CHANGED | INVALID | GONE    |

CHANGED is SERVED if the new content is the one that is already served. A version that a truncated listing lacks counts
as INVALID: it may still exist. In a prefix's first listing, versions are SERVED at once if all files are older than two
poll intervals, else NEW. A prefix never loses all of its served versions: a listing without any valid version changes
nothing, because a volume may not be mounted, or a bucket was emptied by mistake. After a restart, the versions of the
saved catalogue count as served. Nothing is confirmed before every prefix of the source has been listed: a model must
not disappear because its bucket is unreachable. The **confirmed** catalogue holds the served contents; the
**candidate** is the catalogue that the next listing confirms if nothing changes, so that replicas can prepare for it.

**Pins.** A pinned version was confirmed by another machine, which may have listed the source later: it is served once
one listing has it, and counts as gone only after two listings since the start of the monitor.

**Download and publish.** Without caching, the latest versions of both catalogues are downloaded before they are
published; until then a model keeps its previously published version. The first catalogue waits for all downloads,
later ones for one poll interval at most. The last published catalogue is saved on disk and published again if the
source can't be listed after a restart of the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from cortex.errors import CortexError, StorageError
from cortex.models.agent.content_store import ContentRequest, ContentStore, FillFolder
from cortex.models.agent.layout import CheckedListing, check_listing, source_entries
from cortex.models.agent.listing import Listing, Prefix, newest_modification, prefixes
from cortex.models.agent.poller import Poller
from cortex.models.loaded_models import VersionKey
from cortex.models.protocol import CatalogueUpdate
from cortex.models.spec import Catalogue, Model, ModelProblem, ModelSource, Pin, Version
from cortex.processes.backoff import Backoff
from cortex.processes.codec import decode, encode
from cortex.telemetry import Logger

# Debounce: pure functions from one state and a listing to the next state.

#: At the first listing, files older than this many poll intervals are considered complete.
_OLD_INTERVALS = 2
#: After this many changes in successive listings, a version is not a candidate until it stops changing.
_MAX_CHANGES = 3
_QUICK_S = 1.0
#: A pinned version is gone if so many new listings lack it: the first one may have begun before it was uploaded.
_PIN_LISTINGS = 2

_STILL_CHANGING = "its files still change; it is served once two successive listings find the same files"


@dataclass(frozen=True)
class PrefixState:
    """The states of all versions below one prefix."""

    taken_at: float  #: of the newest listing
    is_confirmed: bool  #: False: only one listing so far, with recently modified files
    confirmed: Mapping[VersionKey, Version]
    newest: Mapping[VersionKey, Version]  #: the valid versions in the newest listing
    invalid: frozenset[VersionKey]  #: known versions that are invalid, or possibly cut off, in the newest listing
    changes: Mapping[VersionKey, int]  #: the number of successive listings, up to the newest, with a change
    problems: tuple[ModelProblem, ...]
    beside: Mapping[str, str] = field(default_factory=dict)  #: by model: digest of what is beside its versions

    def fingerprint(self, key: VersionKey) -> str | None:
        """Return a value that differs between two listings if the version does; None if the version is absent."""
        if key in self.invalid:
            return "invalid"
        version = self.newest.get(key)
        return version.digest if version else None

    def candidates(self) -> dict[VersionKey, Version]:
        """Return the versions that the next listing confirms if it equals the newest one."""
        if not self.newest:
            return dict(self.confirmed)
        unchanged = {key for key, count in self.changes.items() if count > _MAX_CHANGES} | self.invalid
        found = {key: version for key, version in self.newest.items() if key not in unchanged}
        return found | {key: self.confirmed[key] for key in unchanged if key in self.confirmed}


@dataclass(frozen=True)
class SourceState:
    """The debounced state of a source, initially empty."""

    prefixes: Mapping[str, PrefixState] = field(default_factory=dict)  #: by model; for a dir, under ""
    confirmed: Catalogue | None = None  #: None: not known yet
    candidate: Catalogue | None = None  #: None: equal to `confirmed`, or not known yet


def debounce(
    state: SourceState, source: ModelSource, listings: Mapping[Prefix, Listing], saved: Catalogue | None = None
) -> SourceState:
    """Return the state after new listings; `saved` is the catalogue that was published before a restart.

    A prefix without a listing, or with the one already processed, stays unchanged. Versions have no `path`.
    """
    found: dict[str, PrefixState] = {}
    for prefix, name, signature_key in source_entries(source):
        before, listing = state.prefixes.get(name), listings.get(prefix)
        if listing is None or (before is not None and listing.taken_at == before.taken_at):
            if before is not None:
                found[name] = before
            continue
        checked = check_listing(source.layout, name, signature_key, listing, listing.taken_at)
        if before is None:
            of_prefix = [model for model in saved.models if not name or model.name == name] if saved else []
            served = {key: replace(version, path=None) for key, version in _by_key(of_prefix).items()}
            checked, beside = _split_remains(checked, listing, source, served, None)
            found[name] = _first_state(checked, listing, source.poll_interval_s, served, beside)
        else:
            checked, beside = _split_remains(checked, listing, source, before.confirmed, before.beside)
            found[name] = replace(_next_state(before, checked, listing), beside=beside)
    return _combine(found, source)


def relist_delay_s(state: SourceState, source: ModelSource) -> float | None:
    """Return the delay of an extra listing that confirms the first one sooner; None if none is needed."""
    if all(prefix.is_confirmed for prefix in state.prefixes.values()):
        return None
    return min(_QUICK_S, source.poll_interval_s)


def _first_state(
    checked: CheckedListing,
    listing: Listing,
    poll_interval_s: float,
    served: Mapping[VersionKey, Version],
    beside: Mapping[str, str],
) -> PrefixState:
    newest = _by_key(checked.models)
    invalid = frozenset(key for key in served.keys() - newest.keys() if _is_invalid(key, checked))
    is_old = newest_modification(listing) < listing.taken_at - _OLD_INTERVALS * poll_interval_s
    is_lost = bool(served) and not newest
    confirmed = {**{key: served[key] for key in invalid}, **newest} if is_old and not is_lost else served
    problems = _problems(checked, listing, newest, served)
    return PrefixState(listing.taken_at, is_old or is_lost, confirmed, newest, invalid, {}, problems, beside)


def _next_state(before: PrefixState, checked: CheckedListing, listing: Listing) -> PrefixState:
    newest = _by_key(checked.models)
    known = before.confirmed.keys() | before.newest.keys()
    invalid = frozenset(key for key in known - newest.keys() if _is_invalid(key, checked))
    state = PrefixState(listing.taken_at, True, {}, newest, invalid, {}, checked.problems)
    confirmed: dict[VersionKey, Version] = {}
    changes: dict[VersionKey, int] = {}
    for key in known | newest.keys():
        is_same = state.fingerprint(key) == before.fingerprint(key)
        if not is_same:
            changes[key] = before.changes.get(key, 0) + 1
        if is_same and key in newest:
            confirmed[key] = newest[key]
        elif key in before.confirmed and (key in invalid or not is_same or not before.newest):
            confirmed[key] = before.confirmed[key]
    if not newest:
        confirmed = dict(before.confirmed)
    # Right after the start, waiting for another listing is better than publishing an empty catalogue.
    is_confirmed = before.is_confirmed or bool(confirmed) or not newest
    changing = [
        ModelProblem(name, number, _STILL_CHANGING, listing.taken_at)
        for (name, number), times in sorted(changes.items())
        if times > 1
    ]
    problems = _problems(checked, listing, newest, before.confirmed)
    problems = _keep_since(before.problems, (*problems, *changing))
    return replace(state, is_confirmed=is_confirmed, confirmed=confirmed, changes=changes, problems=problems)


def _split_remains(
    checked: CheckedListing,
    listing: Listing,
    source: ModelSource,
    served: Mapping[VersionKey, Version],
    before: Mapping[str, str] | None,
) -> tuple[CheckedListing, dict[str, str]]:
    """Return what was checked without remains, and the digests of what is beside the versions of each model.

    Any file makes a model of this layout valid, also the README beside its versions once they are gone, or an empty
    file below the mount point of a volume. Such remains count as invalid. `before` has the digests of earlier listings;
    None: unknown.
    """
    prefix = listing.prefix
    beside = {
        model or next((entry for each, entry, _ in source_entries(source) if each == prefix), ""): folder.rest.digest
        for model, folder in listing.models.items()
        if folder.versions and folder.rest
    }
    if source.layout != "python":
        return checked, beside
    urls: dict[str, set[str]] = {}
    for (name, _), version in served.items():
        urls.setdefault(name, set()).add(version.url)
    remains = {}
    for model in checked.models:
        folder_url = f"{prefix.url.rstrip('/')}/{model.name}" if prefix.is_dir else prefix.url
        was_versioned = model.name in urls and not {"", folder_url} & urls[model.name]
        only = model.latest
        is_new = before is not None and before.get(model.name) != only.digest and only.size_bytes > 0
        if only.url == folder_url and was_versioned and not is_new:
            remains[model.name] = only
    text = "{} has files, but none of the folders of versions that are served; put files into such a folder, like {}/3/"
    problems = [
        ModelProblem(name, None, text.format(only.url, only.url), listing.taken_at) for name, only in remains.items()
    ]
    checked = replace(
        checked,
        models=tuple(model for model in checked.models if model.name not in remains),
        problems=(*checked.problems, *problems),
        invalid=checked.invalid | {(name, None) for name in remains},
    )
    return checked, {**(before or {}), **beside, **{name: only.digest for name, only in remains.items()}}


def _problems(
    checked: CheckedListing,
    listing: Listing,
    newest: Mapping[VersionKey, Version],
    served: Mapping[VersionKey, Version],
) -> tuple[ModelProblem, ...]:
    """Return the problems of a listing, and that it has no valid version any more, although versions are served."""
    if newest or all(key in checked.invalid for key in served):
        return checked.problems
    text = (
        f"{listing.prefix.url} has no valid model any more; what was served before stays in service: mount the volume, "
        "or put the files back; to end this, add another version, or delete the API"
    )
    others = (each for each in checked.problems if (each.model, each.version) in checked.invalid)
    name = "" if listing.prefix.is_dir else next((each.model for each in checked.problems), "")
    return (ModelProblem(name, None, text, listing.taken_at), *others)


def _is_invalid(key: VersionKey, checked: CheckedListing) -> bool:
    """Return whether a version that isn't valid may still exist."""
    name, number = key
    return checked.is_truncated or (name, None) in checked.invalid or (name, number) in checked.invalid


def _keep_since(before: Iterable[ModelProblem], problems: Iterable[ModelProblem]) -> tuple[ModelProblem, ...]:
    """Return the problems; those that existed before keep their start time."""
    since = {(each.model, each.version, each.message): each.since for each in before}
    return tuple(
        replace(each, since=since.get((each.model, each.version, each.message), each.since)) for each in problems
    )


def _combine(found: Mapping[str, PrefixState], source: ModelSource) -> SourceState:
    if len(found) < len(source_entries(source)):
        return SourceState(found)
    problems = tuple(problem for prefix in found.values() for problem in prefix.problems)
    candidate = _catalogue(found, source, problems, PrefixState.candidates)
    if not all(prefix.is_confirmed for prefix in found.values()):
        return SourceState(found, None, candidate)
    confirmed = _catalogue(found, source, problems, lambda prefix: prefix.confirmed)
    return SourceState(found, confirmed, candidate if _digests(candidate) != _digests(confirmed) else None)


def _catalogue(
    found: Mapping[str, PrefixState],
    source: ModelSource,
    problems: tuple[ModelProblem, ...],
    choose: Callable[[PrefixState], Mapping[VersionKey, Version]],
) -> Catalogue:
    signature_keys = {path.name: path.signature_key for path in source.paths}
    versions: dict[str, list[Version]] = {}
    for prefix in found.values():
        for (name, _), version in choose(prefix).items():
            versions.setdefault(name, []).append(version)
    models = tuple(
        Model(
            name, tuple(sorted(of_model, key=lambda each: each.order)), signature_keys.get(name, source.signature_key)
        )
        for name, of_model in sorted(versions.items())
    )
    return Catalogue(models, problems)


def _digests(catalogue: Catalogue) -> dict[VersionKey, str]:
    return {(model.name, version.number): version.digest for model, version in catalogue.versions()}


def _by_key(models: Iterable[Model]) -> dict[VersionKey, Version]:
    return {(model.name, version.number): version for model in models for version in model.versions}


# Publication: pure functions of catalogues and of what is on disk.


def required_versions(source: ModelSource, *catalogues: Catalogue | None) -> dict[str, Version]:
    """Return the versions, by digest, that must be on disk before the catalogues are published."""
    if source.is_cached:
        return {}
    return {model.latest.digest: model.latest for model in _models(catalogues)}


def published_catalogue(
    source: ModelSource,
    catalogue: Catalogue,
    previous: Catalogue | None,
    paths: Mapping[str, str],
    failures: Mapping[str, ModelProblem],
) -> Catalogue:
    """Return the catalogue to publish, given the contents on disk (`paths`, by digest).

    A model whose latest version is not on disk stays as in `previous`, or is left out. Failed downloads (`failures`,
    by digest) are added to the problems.
    """
    if source.is_cached:
        return catalogue
    before = previous.by_name if previous else {}
    models: list[Model] = []
    problems = list(catalogue.problems)
    for model in catalogue.models:
        digest = model.latest.digest
        if digest in paths:
            latest = model.latest
            versions = (replace(each, path=paths[digest]) if each is latest else each for each in model.versions)
            models.append(replace(model, versions=tuple(versions)))
        elif model.name in before:
            models.append(before[model.name])
        if digest in failures and digest not in paths:
            problems.append(replace(failures[digest], model=model.name, version=model.latest.number))
    return Catalogue(tuple(models), tuple(problems))


def available_pins(source: ModelSource, state: SourceState, on_disk: Collection[str]) -> dict[Pin, Version]:
    """Return the pinned versions that have been listed, if only once, or whose content is on disk (digests)."""
    found: dict[Pin, Version] = {}
    for pin in source.pins:
        of_prefixes = (each for prefix in state.prefixes.values() for each in (prefix.newest, prefix.confirmed))
        listed = (versions.get((pin.model, pin.number)) for versions in of_prefixes)
        version = next((each for each in listed if each is not None and each.digest == pin.digest), None)
        if version is not None:
            found[pin] = version
        elif pin.digest in on_disk:
            found[pin] = Version(pin.number, pin.digest, pin.size_bytes, pin.modified_at)
    return found


def pinned_catalogue(source: ModelSource, catalogue: Catalogue, available: Mapping[Pin, Version]) -> Catalogue:
    """Return the catalogue in which the pinned versions are the latest ones.

    If a pinned version is not available, the highest version of the source is the latest: serving it is better than
    serving nothing.
    """
    models, problems = dict(catalogue.by_name), list(catalogue.problems)
    signature_keys = {path.name: path.signature_key for path in source.paths}
    for pin in source.pins:
        model = models.get(pin.model) or Model(pin.model, (), signature_keys.get(pin.model, source.signature_key))
        version = available.get(pin)
        if version is not None:
            others = (each for each in model.versions if each.number != pin.number)
            versions = tuple(sorted([version, *others], key=lambda each: each.order))
            models[pin.model] = replace(model, versions=versions, pinned=pin.number)
        else:
            text = "the revision was deployed with this version, which is gone: the highest version is served instead"
            problems.append(ModelProblem(pin.model, pin.number, text, pin.modified_at))
    return Catalogue(tuple(model for _, model in sorted(models.items())), tuple(problems))


def retained_digests(source: ModelSource, *catalogues: Catalogue | None) -> frozenset[str]:
    """Return the contents that stay on disk for these catalogues.

    Without caching only the latest versions: older ones are downloaded on request and removed once unused.
    """
    if source.is_cached:
        return frozenset(version.digest for model in _models(catalogues) for version in model.versions)
    return frozenset(model.latest.digest for model in _models(catalogues))


def find_version(model: str, number: str, digest: str, *catalogues: Catalogue | None) -> Version | None:
    """Return the version with this content from the first catalogue that has it."""
    for catalogue in catalogues:
        found = catalogue.find(model, number) if catalogue else None
        if found is not None and found.digest == digest:
            return found
    return None


def _models(catalogues: tuple[Catalogue | None, ...]) -> Iterator[Model]:
    return (model for catalogue in catalogues if catalogue for model in catalogue.models)


class LastCatalogues:
    """The last published catalogue of each API and source, in one file each. I/O errors are ignored: it only helps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, api: str, source: ModelSource) -> Catalogue | None:
        """Return the saved catalogue, None if there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Catalogue.from_json(self._file(api, source).read_bytes())
        return None

    def save(self, api: str, source: ModelSource, catalogue: Catalogue) -> None:
        """Replace the saved catalogue; its problems are not saved."""
        file = self._file(api, source)
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            saved = {"api": api, "source": encode(source), "models": catalogue.models, "problems": ()}
            part.write_bytes(orjson.dumps(saved))
            part.rename(file)

    def keep_only(
        self, watched: Collection[tuple[str, ModelSource]], deployed: Collection[str]
    ) -> dict[str, frozenset[str]]:
        """Delete the catalogues that nobody needs; return the contents of deployed APIs that nobody watches.

        These have no replicas at present. When they have some again, the source may have lost its models.
        """
        files = {self._file(api, source).name for api, source in watched}
        idle = frozenset(deployed) - {api for api, _ in watched}
        contents: dict[str, frozenset[str]] = {}
        with contextlib.suppress(OSError):
            for file in self._folder.iterdir():
                if file.name in files:
                    continue
                api, digests = _saved_contents(file)
                if api in idle:
                    contents[api] = contents.get(api, frozenset()) | digests
                else:
                    file.unlink(missing_ok=True)
        return contents

    def _file(self, api: str, source: ModelSource) -> Path:
        key = orjson.dumps([api, encode(source)], option=orjson.OPT_SORT_KEYS)
        return self._folder / f"{hashlib.sha256(key).hexdigest()[:32]}.json"


def _saved_contents(file: Path) -> tuple[str, frozenset[str]]:
    """Return the API of a saved catalogue, and the contents that it retains; ("", …) if it is not readable."""
    try:
        data = file.read_bytes()
        plain = orjson.loads(data)
        source = decode(ModelSource, plain["source"])
        return str(plain["api"]), retained_digests(source, Catalogue.from_json(data))
    except (OSError, ValueError, KeyError, TypeError):
        return "", frozenset()


# The monitor.

PublishUpdate = Callable[[CatalogueUpdate], None]
#: Downloads the version at a URL, below a listed one, with a digest to a new folder.
DownloadVersion = Callable[[str, str, str | None, Path], Awaitable[None]]

#: A catalogue file is deleted this long after it was replaced.
FILE_GRACE_S = 60.0
_FIRST_RETRY_S = 1.0
_DOWNLOAD_BACKOFF = Backoff(_FIRST_RETRY_S, 30.0)


@dataclass
class _FailedDownload:
    problem: ModelProblem
    times: int
    retry_at: float  #: monotonic


class SourceMonitor:
    """Watches the source of one API from `start` to `stop`; for one event loop."""

    def __init__(
        self,
        api: str,
        source: ModelSource,
        contents: ContentStore,
        last_catalogues: LastCatalogues,
        download: DownloadVersion,
        write_file: Callable[[bytes], Path],
        logger: Logger,
    ) -> None:
        self.watchers: dict[object, PublishUpdate] = {}
        self.source = source
        self.api = api
        self._contents = contents
        self._download = download
        self._write_file = write_file
        self._logger = logger
        self._pollers: dict[Prefix, Poller] = {}
        self._state = SourceState()
        self._new_listings: Counter[Prefix] = Counter()  #: since the start
        self._has_changed = asyncio.Event()
        self._errors: dict[Prefix, str] = {}
        self._running: dict[str, asyncio.Task[None]] = {}  #: downloads by digest
        self._failed: dict[str, _FailedDownload] = {}  #: by digest
        self._waiting_since: float | None = None  #: when a publication began to wait for downloads; monotonic
        self._last_catalogues = last_catalogues
        self._saved = last_catalogues.load(api, source)  #: published by an earlier agent
        self._confirmed: Catalogue | None = None  #: as published
        self._candidate: Catalogue | None = None  #: as published
        self._files: dict[str, tuple[Catalogue, Path]] = {}
        self._update: CatalogueUpdate | None = None  #: published last
        self._publish_at: asyncio.TimerHandle | None = None

    @property
    def interval_s(self) -> float:
        """Return the interval of listings."""
        return self.source.poll_interval_s if self.source.is_live else math.inf

    def start(self, poller_of: Callable[[Prefix], Poller]) -> None:
        """Subscribe to listings."""
        self._pollers = {prefix: poller_of(prefix) for prefix in prefixes(self.source)}
        for poller in self._pollers.values():
            poller.add(self)
        self._new_listings.clear()  # the first ones were made for earlier monitors

    def stop(self) -> None:
        """Cancel downloads and publish nothing more."""
        for poller in self._pollers.values():
            poller.watchers.discard(self)
        for task in self._running.values():
            task.cancel()
        if self._publish_at is not None:
            self._publish_at.cancel()
        self._contents.retain((self.api, self), None)
        for _, path in self._files.values():
            _unlink_later(path)

    def add_watcher(self, client: object, publish: PublishUpdate) -> None:
        """Publish the current catalogue and all later ones to a client."""
        self.watchers[client] = publish
        if self._update is not None:
            publish(self._update)

    def publish_soon(self, delay_s: float = 0.0) -> None:
        """Schedule a publication; several requests result in one, at the earliest of their times."""
        loop = asyncio.get_running_loop()
        when = loop.time() + delay_s
        if self._publish_at is not None and not self._publish_at.cancelled():
            if self._publish_at.when() <= when:
                return
            self._publish_at.cancel()
        self._publish_at = loop.call_at(when, self._download_and_publish)

    async def fetch(self, model: str, number: str, digest: str) -> Path:
        """Return the folder with a version's content; download it if necessary. Raises: StorageError."""
        size_bytes = 0
        fill: FillFolder = _fail_to_fill
        if self._contents.find(digest) is None:
            version = await self._find_version(model, number, digest)
            size_bytes, fill = version.size_bytes, self._fill(version)
        limit = self.source.disk_cache_size if self.source.is_cached else None
        return await self._contents.fetch(ContentRequest(digest, self.api, size_bytes, fill, limit))

    async def _find_version(self, model: str, number: str, digest: str) -> Version:
        while True:
            state = self._state
            known = (state.confirmed, state.candidate, self._confirmed, self._candidate)
            version = find_version(model, number, digest, *known)
            if version is not None:
                return version
            if state.confirmed is not None:
                raise StorageError("its files have been changed or removed; the new state is served soon")
            if self._errors:
                raise StorageError(next(iter(self._errors.values())))
            self._has_changed.clear()
            await self._has_changed.wait()

    # Listings.

    def on_listing(self, listing: Listing) -> None:
        """Process a listing of one prefix."""
        before, unknown_before = self._state, self._prefixes_with_unknown_pins()
        self._state = debounce(before, self.source, {listing.prefix: listing}, self._saved)
        self._new_listings[listing.prefix] += 1
        unknown = self._prefixes_with_unknown_pins()
        for prefix in unknown:
            self._pollers[prefix].list_soon(0)
        delay_s = relist_delay_s(self._state, self.source)
        if delay_s is not None:
            self._pollers[listing.prefix].list_soon(delay_s)
        was_error = self._errors.pop(listing.prefix, None) is not None
        was, now = ((each.confirmed, each.candidate) for each in (before, self._state))
        if was_error or was != now or unknown != unknown_before:
            self._has_changed.set()
            self.publish_soon()

    def on_error(self, prefix: Prefix, message: str) -> None:
        """Record that a prefix can't be listed."""
        self._errors[prefix] = message
        self._has_changed.set()
        self.publish_soon()

    # Downloads.

    def _download_and_publish(self) -> None:
        """Start missing downloads, then publish what the contents on disk allow."""
        self._publish_at = None
        state = self._pinned_state()
        required = required_versions(self.source, state.confirmed, state.candidate)
        retained = retained_digests(self.source, state.confirmed, state.candidate, self._confirmed, self._candidate)
        self._contents.retain((self.api, self), retained)
        self._failed = {digest: failed for digest, failed in self._failed.items() if digest in required}
        paths = {digest: str(path) for digest in required if (path := self._contents.find(digest)) is not None}
        for digest, version in required.items():
            if digest not in paths:
                self._start_download(version)
        self._choose_catalogues(state, paths)
        try:
            self._publish()
        except StorageError as error:
            self._logger.error("models can't be published", api=self.api, reason=error)
            self.publish_soon(_FIRST_RETRY_S)

    def _start_download(self, version: Version) -> None:
        digest = version.digest
        if digest in self._running:
            return
        failed = self._failed.get(digest)
        if failed is not None and failed.retry_at > time.monotonic():
            self.publish_soon(failed.retry_at - time.monotonic())
            return
        self._running[digest] = asyncio.create_task(self._try_download(version), name=f"get {digest}")

    async def _try_download(self, version: Version) -> None:
        digest = version.digest
        try:
            await self._contents.fetch(ContentRequest(digest, self.api, version.size_bytes, self._fill(version)))
            self._failed.pop(digest, None)
        except Exception as error:
            message = str(error) if isinstance(error, CortexError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, CortexError):
                self._logger.error("download failed", error, api=self.api, url=version.url)
            before = self._failed.get(digest)
            times, since = (before.times + 1, before.problem.since) if before else (1, time.time())
            retry_at = time.monotonic() + _DOWNLOAD_BACKOFF.delay_s(times)
            problem = ModelProblem("", version.number, f"can't be downloaded: {message}", since)
            self._failed[digest] = _FailedDownload(problem, times, retry_at)
            self._logger.warning("model can't be downloaded", api=self.api, url=version.url, reason=message)
            if not self.source.is_live and self._confirmed is None:  # its files may have changed, and no poll is due
                for poller in self._pollers.values():
                    poller.list_soon(_FIRST_RETRY_S)
        finally:
            self._running.pop(digest, None)
        self.publish_soon()

    def _fill(self, version: Version) -> FillFolder:
        urls = (prefix.url for prefix in prefixes(self.source))
        listed = next((url for url in urls if f"{version.url}/".startswith(f"{url.rstrip('/')}/")), None)
        return lambda folder: self._download(version.url, version.digest, listed, folder)

    def _is_downloading(self, catalogue: Catalogue) -> bool:
        """Return whether a first attempt to download a required version is in progress; retries may go on for ever."""
        first_attempts = self._running.keys() - self._failed.keys()
        return not first_attempts.isdisjoint(required_versions(self.source, catalogue))

    # Publication.

    def _pinned_state(self) -> SourceState:
        """Return the state with the pinned versions as the latest ones of both catalogues."""
        state = self._state
        if not self.source.pins or state.confirmed is None:
            return state
        if self._prefixes_with_unknown_pins():
            return SourceState()
        available = self._available_pins()
        confirmed, candidate = (
            catalogue and pinned_catalogue(self.source, catalogue, available)
            for catalogue in (state.confirmed, state.candidate)
        )
        return replace(state, confirmed=confirmed, candidate=candidate)

    def _available_pins(self) -> dict[Pin, Version]:
        on_disk = {pin.digest for pin in self.source.pins if self._contents.find(pin.digest) is not None}
        return available_pins(self.source, self._state, on_disk)

    def _prefixes_with_unknown_pins(self) -> list[Prefix]:
        """Return the prefixes that are to be listed to know whether their pinned versions still exist."""
        missing = {pin.model for pin in set(self.source.pins) - self._available_pins().keys()}
        return [
            prefix
            for prefix, name, _ in source_entries(self.source)
            if self._new_listings[prefix] < _PIN_LISTINGS and (name in missing or (missing and not name))
        ]

    def _choose_catalogues(self, state: SourceState, paths: Mapping[str, str]) -> None:
        source = self.source
        if state.confirmed is None:
            self._fall_back_to_saved()
            return
        if self._must_wait(state.confirmed):
            return
        failures = {digest: failed.problem for digest, failed in self._failed.items()}
        self._confirmed = published_catalogue(source, state.confirmed, self._confirmed or self._saved, paths, failures)
        self._saved = None
        self._candidate = None
        if state.candidate is not None and not self._is_downloading(state.candidate):
            candidate = published_catalogue(source, state.candidate, self._confirmed, paths, failures)
            self._candidate = candidate if candidate.models != self._confirmed.models else None
        retained = retained_digests(source, state.confirmed, state.candidate, self._confirmed, self._candidate)
        self._contents.retain((self.api, self), retained)

    def _fall_back_to_saved(self) -> None:
        """Use the catalogue saved by an earlier agent, as far as it is on disk, while the source can't be listed."""
        if self._saved is None or self._confirmed is not None or not self._errors:
            return
        found = {version.digest: self._contents.find(version.digest) for _, version in self._saved.versions()}
        paths = {digest: str(path) for digest, path in found.items() if path is not None}
        self._confirmed = published_catalogue(self.source, self._saved, None, paths, {})
        self._contents.retain((self.api, self), retained_digests(self.source, self._confirmed))

    def _must_wait(self, confirmed: Catalogue) -> bool:
        """Return whether to wait for downloads: the first time for all, later for one poll interval at most."""
        if not self._is_downloading(confirmed):
            self._waiting_since = None
            return False
        if self._confirmed is None:
            return True
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        left_s = self._waiting_since + self.source.poll_interval_s - now
        if left_s > 0:
            self.publish_soon(left_s)
        return left_s > 0

    def _publish(self) -> None:
        error = next(iter(self._errors.values()), None)
        confirmed, candidate = self._file("confirmed", self._confirmed), self._file("candidate", self._candidate)
        update = CatalogueUpdate(confirmed, candidate, error)
        if update == self._update or update == CatalogueUpdate(None, None, None):
            return
        if confirmed is not None and (self._update is None or confirmed != self._update.confirmed) and self._confirmed:
            count = sum(len(model.versions) for model in self._confirmed.models)
            self._logger.info("models confirmed", api=self.api, versions=count, problems=len(self._confirmed.problems))
            if self._confirmed.models:
                self._last_catalogues.save(self.api, self.source, self._confirmed)
        self._update = update
        for publish in list(self.watchers.values()):
            publish(update)

    def _file(self, kind: str, catalogue: Catalogue | None) -> str | None:
        """Return the file with a catalogue; write a new one if the catalogue has changed."""
        old = self._files.get(kind)
        if catalogue is None:
            if old is not None:
                _unlink_later(self._files.pop(kind)[1])
            return None
        if old is None or old[0] != catalogue:
            self._files[kind] = (catalogue, self._write_file(catalogue.to_json()))
            if old is not None:
                _unlink_later(old[1])
        return str(self._files[kind][1])


async def _fail_to_fill(folder: Path) -> None:
    """Fail the download of a content that was on disk when its fetch began."""
    raise StorageError(f"{folder.name} has just been removed from the disk; try again")


def _unlink_later(path: Path) -> None:
    asyncio.get_running_loop().call_later(FILE_GRACE_S, path.unlink, True)
