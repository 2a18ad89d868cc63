"""List what is below a prefix, aggregated per model version, and download a version exactly as it was listed.

An aggregate keeps counts and a digest instead of names: its memory grows with models and versions, not with files.
Whether the files form a valid model is checked in `layout`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path, PurePosixPath

from cortex.errors import StorageError
from cortex.models.spec import ModelSource
from cortex.storage.client import download_objects, is_remote
from cortex.storage.listing import walk
from cortex.storage.objects import StoredObject, printable

#: Larger numbers are considered a mistake, such as a wrong prefix.
MAX_FILES = 100_000
MAX_MODELS = 100_000
#: Of a version that is downloaded only to detect its format.
MAX_INSPECTED_FILES = 1000

_DIGEST_BYTES = 32
_MODULUS = 1 << (8 * _DIGEST_BYTES)


@dataclass(frozen=True)
class Prefix:
    """A location that is listed. All APIs on a machine with the same prefix share its listings."""

    url: str  #: without a trailing slash
    is_dir: bool = False  #: its direct subfolders are models; otherwise it is one model


def prefixes(source: ModelSource) -> tuple[Prefix, ...]:
    """Return the prefixes of a source."""
    if source.dir is not None:
        return (Prefix(_trimmed(source.dir), is_dir=True),)
    return tuple(dict.fromkeys(model_prefix(path.url) for path in source.paths))


def model_prefix(url: str) -> Prefix:
    """Return the prefix of one model."""
    return Prefix(_trimmed(url))


def _trimmed(url: str) -> str:
    return url.rstrip("/") or "/"


# Listings.


class FileMarks(IntFlag):
    """The presence of files that layouts require."""

    SAVED_MODEL = 1
    VARIABLES_INDEX = 2
    VARIABLES_DATA = 4


_DATA_FILE = re.compile(r"variables/variables\.data-00000-of-.+")


@dataclass(frozen=True, slots=True)
class VersionContent:
    """The aggregated files of one version."""

    digest: str  #: of names, sizes and ETags, independent of their order
    files: int
    size_bytes: int
    modified_at: float  #: of the newest file; UNIX time, seconds
    marks: FileMarks
    onnx_files: int  #: directly in the folder
    example: str  #: the alphabetically first name; of a hidden or incomplete file only if there is no other
    flaw: str | None  #: a file that can't be downloaded, and the reason


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model: its version folders, which have numeric names, and the aggregate of all other files."""

    versions: Mapping[str, VersionContent]  #: by the folder's name
    rest: VersionContent | None
    is_file: bool = False  #: the prefix is a single object


@dataclass(frozen=True)
class Listing:
    """One complete pass over a prefix."""

    prefix: Prefix
    taken_at: float  #: when it began; UNIX time, seconds; unique among the listings of a prefix
    models: Mapping[str, ModelFolder]  #: by the folder's name; under "" if the prefix is one model
    objects: int  #: the number of listed objects
    is_truncated: bool = False  #: there are more than MAX_MODELS; the rest was not listed


def newest_modification(listing: Listing) -> float:
    """Return the modification time of the newest file in UNIX seconds; 0 if there is none."""
    contents = (
        content
        for folder in listing.models.values()
        for content in (*folder.versions.values(), folder.rest)
        if content is not None
    )
    return max((content.modified_at for content in contents), default=0.0)


async def list_models(prefix: Prefix, environ: Mapping[str, str]) -> Listing:
    """List all objects below a prefix; if there are none, the listing has no models.

    Raises: StorageError, also for a local folder that does not exist.
    """
    if not is_remote(prefix.url) and not await asyncio.to_thread(Path(prefix.url).exists):
        # It may be a volume that is not mounted: no reason to stop serving its models.
        raise StorageError(f"{prefix.url} does not exist")
    aggregate = ListingAggregate(prefix, time.time())
    async with aclosing(walk(prefix.url, environ)) as batches:
        async for batch in batches:
            if not aggregate.add(batch):
                return aggregate.listing(is_truncated=True)
            # Local and cached batches may arrive without a real wait: let other tasks run.
            await asyncio.sleep(0)
    return aggregate.listing(is_truncated=False)


async def sample_names(url: str, environ: Mapping[str, str], limit: int = 50, root: str | None = None) -> list[str]:
    """Return the first names below a model's prefix for display; for `root` see `walk`. Raises: StorageError."""
    names: list[str] = []
    async with aclosing(walk(url, environ, root)) as batches:
        async for batch in batches:
            names += [printable(item.name or PurePosixPath(item.key).name) for item in batch]
            if len(names) >= limit:
                break
    return sorted(names[:limit])


async def download_version(
    url: str, expected_digest: str, destination: Path, environ: Mapping[str, str], root: str | None = None
) -> None:
    """Download the version at `url` to the new folder `destination`: all its files as listed, or nothing.

    If `url` is a file, the folder contains that file. `root` is the local folder that was listed, see `walk`.
    Raises: StorageError, also if the digest differs.
    """
    objects: list[StoredObject] = []
    aggregate = ContentAggregate()
    async with aclosing(walk(url, environ, root)) as batches:
        async for batch in batches:
            for item in batch:
                name = item.name or PurePosixPath(item.key).name
                aggregate.add(name, item)
                objects.append(item._replace(name=name))
            if len(objects) > MAX_FILES:
                raise StorageError(f"{url} has more than {MAX_FILES:,} files")
    if not objects:
        raise StorageError(f"{url} was removed before it was downloaded")
    if aggregate.content().digest != expected_digest:
        raise StorageError(f"{url} changed before it was downloaded")
    await download_objects(url, objects, destination, environ)


async def download_small_files(url: str, destination: Path, environ: Mapping[str, str], max_bytes: int) -> bool:
    """Download the files at `url` that have at most `max_bytes` to a new folder; return whether these are all.

    Raises: StorageError, also if there are too many.
    """
    objects = []
    async with aclosing(walk(url, environ)) as batches:
        async for batch in batches:
            objects += [item._replace(name=item.name or PurePosixPath(item.key).name) for item in batch]
            if len(objects) > MAX_INSPECTED_FILES:
                raise StorageError(f"{url} has more than {MAX_INSPECTED_FILES:,} files")
    small = [item for item in objects if item.size_bytes <= max_bytes and not item.flaw]
    await download_objects(url, small, destination, environ)
    return len(small) == len(objects)


# Aggregation.


class ContentAggregate:
    """Aggregates the files of one version."""

    __slots__ = ("files", "first", "flaw", "marks", "modified_at", "onnx_files", "size_bytes", "sum")

    def __init__(self) -> None:
        self.sum = 0
        self.files = self.size_bytes = self.onnx_files = 0
        self.modified_at = 0.0
        self.marks = FileMarks(0)
        self.first = (True, "")  #: whether it is a stray file, and its name
        self.flaw: str | None = None

    def add(self, name: str, item: StoredObject) -> None:
        """Add one file; `name` is relative to the version's folder."""
        line = f"{name}\0{item.size_bytes}\0{item.mark}".encode(errors="surrogatepass")
        # A sum of hashes does not depend on the order in which a store lists.
        self.sum += int.from_bytes(hashlib.blake2b(line, digest_size=_DIGEST_BYTES).digest())
        self.files += 1
        self.size_bytes += item.size_bytes
        self.modified_at = max(self.modified_at, item.modified_at.timestamp())
        first = (is_stray(name), name)
        if self.files == 1 or first < self.first:
            self.first = first
        if item.flaw and self.flaw is None:
            self.flaw = f"{printable(item.name)}: {item.flaw}"
        if name.endswith(".onnx"):
            self.onnx_files += "/" not in name
        elif name == "saved_model.pb":
            self.marks |= FileMarks.SAVED_MODEL
        elif name == "variables/variables.index":
            self.marks |= FileMarks.VARIABLES_INDEX
        elif name.startswith("variables/") and _DATA_FILE.fullmatch(name):
            self.marks |= FileMarks.VARIABLES_DATA

    def content(self) -> VersionContent:
        """Return the result."""
        digest = hashlib.sha256(f"{self.files} {self.sum % _MODULUS}".encode()).hexdigest()[:32]
        sums = self.files, self.size_bytes, self.modified_at, self.marks, self.onnx_files
        return VersionContent(digest, *sums, printable(self.first[1]), self.flaw)


@dataclass
class ModelAggregate:
    """Aggregates the files of one model."""

    versions: dict[str, ContentAggregate] = field(default_factory=dict)
    rest: ContentAggregate | None = None
    is_file: bool = False

    def add(self, name: str, item: StoredObject) -> int:
        """Add one file, named relative to the model's folder; return the number of new versions."""
        first, slash, below = name.partition("/")
        if is_number(first) and slash:
            version = self.versions.get(first)
            if version is None:
                version = self.versions[first] = ContentAggregate()
                version.add(below, item)
                return 1
            version.add(below, item)
        elif not (is_number(first) and not item.size_bytes):  # an empty object that marks a version's folder
            if self.rest is None:
                self.rest = ContentAggregate()
            self.rest.add(name, item)
        return 0

    def folder(self) -> ModelFolder:
        """Return the result."""
        versions = {name: version.content() for name, version in self.versions.items()}
        return ModelFolder(versions, self.rest.content() if self.rest else None, self.is_file)


#: Names of hidden files, of what tools leave behind, and of uploads in progress.
_STRAY = re.compile(r"\..*|_SUCCESS|_temporary|lost\+found|__MACOSX|.*(~|\.tmp|\.temp|\.part|\.partial)", re.IGNORECASE)


def is_stray(name: str) -> bool:
    """Return whether the first part of a name is one that no model has."""
    return _STRAY.fullmatch(name.partition("/")[0]) is not None


def is_number(name: str) -> bool:
    """Return whether a folder's name is a version number."""
    return name.isascii() and name.removeprefix("-").isdigit()


@dataclass
class ListingAggregate:
    """Aggregates the files below a prefix."""

    prefix: Prefix
    taken_at: float
    models: dict[str, ModelAggregate] = field(default_factory=dict)
    objects: int = 0
    versions: int = 0

    def add(self, batch: Iterable[StoredObject]) -> bool:
        """Add objects; return False if there are too many models to continue."""
        for item in batch:
            self.objects += 1
            model, name = "", item.name
            if self.prefix.is_dir:
                model, slash, name = item.name.partition("/")
                if not slash:
                    continue  # a file beside the models
            elif not name:
                name = item.key.rpartition("/")[2]
            aggregate = self.models.get(model)
            if aggregate is None:
                if len(self.models) == MAX_MODELS:
                    return False
                aggregate = self.models[model] = ModelAggregate(is_file=not item.name)
            self.versions += aggregate.add(name, item)
            if self.versions > MAX_MODELS:
                return False
        return True

    def listing(self, is_truncated: bool) -> Listing:
        """Return the result and empty this aggregate."""
        folders: dict[str, ModelFolder] = {}
        for name in list(self.models):  # one at a time, so that both never exist in full
            folders[name] = self.models.pop(name).folder()
        return Listing(self.prefix, self.taken_at, folders, self.objects, is_truncated)
