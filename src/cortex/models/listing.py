"""What one pass over a prefix found, as data that no layout has judged yet; adds it up without keeping the names.

Memory grows with models and versions, not with files. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from cortex.models.spec import ModelSource
from cortex.storage.objects import StoredObject, printable

#: More is taken for a mistake: a wrong prefix, not a model.
MAX_FILES = 100_000
MAX_MODELS = 100_000

_DIGEST_BYTES = 32
_MODULUS = 1 << (8 * _DIGEST_BYTES)


@dataclass(frozen=True)
class Prefix:
    """A place that is listed. All APIs on a machine that name the same one share its listings."""

    url: str  #: without a trailing slash
    is_dir: bool = False  #: its first-level folders are models; else it is one model itself


def prefixes(source: ModelSource) -> tuple[Prefix, ...]:
    """Return what must be listed for a source."""
    if source.dir is not None:
        return (Prefix(_trimmed(source.dir), is_dir=True),)
    return tuple(dict.fromkeys(model_prefix(path.url) for path in source.paths))


def model_prefix(url: str) -> Prefix:
    """Return what must be listed for one model."""
    return Prefix(_trimmed(url))


class Marks(IntFlag):
    """Which files that layouts ask for are there."""

    SAVED_MODEL = 1
    VARIABLES_INDEX = 2
    VARIABLES_DATA = 4


_DATA_FILE = re.compile(r"variables/variables\.data-00000-of-.+")


@dataclass(frozen=True, slots=True)
class Content:
    """The files of one version, added up."""

    digest: str  #: of names, sizes and ETags, in any order
    files: int
    size_bytes: int
    modified_at: float  #: of the newest file; UNIX time, seconds
    marks: Marks
    onnx_files: int  #: directly in the folder
    example: str  #: the first name in the alphabet
    flaw: str | None  #: a file that can't be downloaded, and why


@dataclass(frozen=True, slots=True)
class Folder:
    """One model: what is in its folders named with digits, and all that is not."""

    versions: Mapping[str, Content]  #: by the folder's name
    rest: Content | None
    is_file: bool = False  #: the prefix is one object


@dataclass(frozen=True)
class Listing:
    """One complete pass over a prefix."""

    prefix: Prefix
    taken_at: float  #: when it began; UNIX time, seconds. No two listings of a prefix have the same
    models: Mapping[str, Folder]  #: by the folder's name; of a prefix that is one model: by ""
    objects: int  #: how many were listed
    is_cut: bool = False  #: there is more than MAX_MODELS; the rest was not looked at


def newest_file(listing: Listing) -> float:
    """Return when the newest file of a listing was modified; UNIX time, 0 if there is none."""
    contents = (
        content
        for folder in listing.models.values()
        for content in (*folder.versions.values(), folder.rest)
        if content is not None
    )
    return max((content.modified_at for content in contents), default=0.0)


class Tally:
    """Adds up the files of one version."""

    __slots__ = ("example", "files", "flaw", "marks", "modified_at", "onnx_files", "size_bytes", "sum")

    def __init__(self) -> None:
        self.sum = 0
        self.files = self.size_bytes = self.onnx_files = 0
        self.modified_at = 0.0
        self.marks = Marks(0)
        self.example = ""
        self.flaw: str | None = None

    def add(self, name: str, item: StoredObject) -> None:
        """Count one file; `name` is relative to the version's folder."""
        line = f"{name}\0{item.size_bytes}\0{item.mark}".encode(errors="surrogatepass")
        # A sum, so that the order in which a store lists doesn't matter.
        self.sum += int.from_bytes(hashlib.blake2b(line, digest_size=_DIGEST_BYTES).digest())
        self.files += 1
        self.size_bytes += item.size_bytes
        self.modified_at = max(self.modified_at, item.modified_at.timestamp())
        if not self.example or name < self.example:
            self.example = name
        if item.flaw and self.flaw is None:
            self.flaw = f"{printable(item.name)}: {item.flaw}"
        if name.endswith(".onnx"):
            self.onnx_files += "/" not in name
        elif name == "saved_model.pb":
            self.marks |= Marks.SAVED_MODEL
        elif name.startswith("variables/"):
            self.marks |= _mark_of_variables(name)

    def content(self) -> Content:
        """Return the sum."""
        digest = hashlib.sha256(f"{self.files} {self.sum % _MODULUS}".encode()).hexdigest()[:32]
        sums = self.files, self.size_bytes, self.modified_at, self.marks, self.onnx_files
        return Content(digest, *sums, printable(self.example), self.flaw)


@dataclass
class FolderTally:
    """Adds up one model."""

    versions: dict[str, Tally] = field(default_factory=dict)
    rest: Tally | None = None
    is_file: bool = False

    def add(self, name: str, item: StoredObject) -> int:
        """Count one file by its name in the model's folder; return how many versions are new with it."""
        first, slash, below = name.partition("/")
        if is_number(first) and slash:
            tally = self.versions.get(first)
            if tally is None:
                tally = self.versions[first] = Tally()
                tally.add(below, item)
                return 1
            tally.add(below, item)
        elif not (is_number(first) and not item.size_bytes):  # the mark of a version's folder, made before its files
            if self.rest is None:
                self.rest = Tally()
            self.rest.add(name, item)
        return 0

    def folder(self) -> Folder:
        """Return the sums."""
        versions = {name: tally.content() for name, tally in self.versions.items()}
        return Folder(versions, self.rest.content() if self.rest else None, self.is_file)


def is_number(name: str) -> bool:
    """Tell whether a folder's name is that of a version."""
    return name.isascii() and name.isdigit()


@dataclass
class ListingTally:
    """Adds up one pass over a prefix."""

    prefix: Prefix
    taken_at: float
    models: dict[str, FolderTally] = field(default_factory=dict)
    objects: int = 0
    versions: int = 0

    def add(self, batch: Iterable[StoredObject]) -> bool:
        """Count some objects; return False once there are too many models to go on."""
        for item in batch:
            self.objects += 1
            model, name = "", item.name
            if self.prefix.is_dir:
                model, slash, name = item.name.partition("/")
                if not slash:
                    continue  # a file beside the models
            elif not name:
                name = item.key.rpartition("/")[2]
            folder = self.models.get(model)
            if folder is None:
                if len(self.models) == MAX_MODELS:
                    return False
                folder = self.models[model] = FolderTally(is_file=not item.name)
            self.versions += folder.add(name, item)
            if self.versions > MAX_MODELS:
                return False
        return True

    def listing(self, is_cut: bool) -> Listing:
        """Return the sums, once: this is empty then."""
        folders: dict[str, Folder] = {}
        for name in list(self.models):  # one after the other, so that there are never two of all
            folders[name] = self.models.pop(name).folder()
        return Listing(self.prefix, self.taken_at, folders, self.objects, is_cut)


def _mark_of_variables(name: str) -> Marks:
    if name == "variables/variables.index":
        return Marks.VARIABLES_INDEX
    return Marks.VARIABLES_DATA if _DATA_FILE.fullmatch(name) else Marks(0)


def _trimmed(url: str) -> str:
    return url.rstrip("/") or "/"
