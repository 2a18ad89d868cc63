"""Find files of a project that have keys: whoever can read the project, or pull its image, could use them."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from cortex.projects.dotenv import DOTENV_NAME
from cortex.projects.project import ProjectFiles

#: Larger files are not searched.
_MAX_BYTES = 1024 * 1024
_STORES = frozenset({".p12", ".pfx", ".jks", ".keystore", ".ppk"})
_AWS_SECRET = rb"(?i)aws_?secret_?access_?key\W{1,5}[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/])"
#: What a file has → a text that is in all such files, and the form of the key.
_FORMS = tuple(
    (what, text, re.compile(form))
    for what, text, form in (
        ("a private key", b"PRIVATE KEY", rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----(\s|\\[nr])+[\w+/:, -]{20}"),
        ("credentials of AWS", b"KIA", rb"\bAKIA[A-Z0-9]{16}\b"),
        ("credentials of AWS", b"ecret", _AWS_SECRET),
        ("credentials of AWS", b"SECRET", _AWS_SECRET),
        ("a key of cortex", b"ck_", rb"\bck_[0-9a-f]{10}_[\w-]{43}"),
        ("a token of cortex", b"ct_", rb"\bct_[0-9a-f]{10}_[\w-]{43}"),
        ("a token of GitHub", b"gh", rb"\b(gh[pousr]_\w{36}|github_pat_\w{22})"),
        ("a token of GitLab", b"glpat-", rb"\bglpat-[\w-]{20}"),
        ("a token of Hugging Face", b"hf_", rb"\bhf_[A-Za-z0-9]{30}"),
    )
)


@dataclass(frozen=True)
class KeyFile:
    """A file of a project that has a key."""

    path: str
    what: str  #: such as "a private key"
    line: int  #: 0: the file as a whole


def find_key_files(project: ProjectFiles) -> Iterator[KeyFile]:
    """Yield the files of a project that have keys, each once. `.env` is for them, and in no image."""
    files = ((path, project.root / path) for path in project.files)
    return _find((path, file.stat().st_size, file.read_bytes) for path, file in files)


def find_packed_key_files(archive: bytes) -> Iterator[KeyFile]:
    """Yield the files of a packed project that have keys, as `find_key_files` does, without reading them again."""
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        yield from _find((file.filename, file.file_size, partial(packed.read, file)) for file in packed.infolist())


def _find(files: Iterable[tuple[str, int, Callable[[], bytes]]]) -> Iterator[KeyFile]:
    for path, size, read in files:
        if path == DOTENV_NAME:
            continue
        if PurePosixPath(path).suffix.lower() in _STORES:
            yield KeyFile(path, "a key store", 0)
            continue
        if size > _MAX_BYTES:
            continue
        content = read()
        for what, text, form in _FORMS:
            if text in content and (found := form.search(content)):
                yield KeyFile(path, what, content.count(b"\n", 0, found.start()) + 1)
                break
