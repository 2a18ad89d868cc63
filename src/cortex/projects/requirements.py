"""Check the syntax of requirements.txt and report lines that no installer can parse. Nothing is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from cortex.errors import Diagnostic
from cortex.spelling import nearest

#: Options of a requirements file, and whether each takes a value.
_OPTIONS = {
    "-r": True,
    "--requirement": True,
    "-c": True,
    "--constraint": True,
    "-e": True,
    "--editable": True,
    "-i": True,
    "--index-url": True,
    "--pypi-url": True,
    "--extra-index-url": True,
    "-f": True,
    "--find-links": True,
    "--no-binary": True,
    "--only-binary": True,
    "--trusted-host": True,
    "--use-feature": True,
    "--no-index": False,
    "--prefer-binary": False,
    "--pre": False,
    "--require-hashes": False,
}
#: Installing one of these would shadow the running `cortex` package.
_OWN_NAMES = frozenset({"cortex", "cortex-serving"})

#: Options that name another file of requirements.
_FILE_OPTIONS = frozenset({"-r", "--requirement", "-c", "--constraint"})

_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTION_OF_REQUIREMENT = re.compile(r"\s--?[a-z].*$", re.DOTALL)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|file:", re.IGNORECASE)
_ARCHIVE = re.compile(r"\.(whl|zip|tar|tar\.gz|tgz|tar\.bz2|tar\.xz)(\[[^\]]*\])?$", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[^\]]*\])?")
_VERSION = re.compile(r"v?\d[\w.!+*-]*")


def parse_requirements(text: str, file: str) -> list[Diagnostic]:
    """Return a diagnostic for each invalid line of a requirements file; they call it `file`."""
    found = []
    for line, column, content in _logical_lines(text):
        if problem := _problem(content):
            found.append(Diagnostic(file, line, column, "", *problem))
    return found


def included_files(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield line, column and path of each file that a requirements file includes by a relative path."""
    for line, column, content in _logical_lines(text):
        option, value = _split_option(content)
        path = value.strip("'\"")
        if option in _FILE_OPTIONS and path and not path.startswith("/") and "$" not in path and not _URL.match(path):
            yield line, column + len(content) - len(value), path


@dataclass(frozen=True, slots=True)
class NamedRequirement:
    """A line of a requirements file that names a package."""

    requirement: Requirement
    line: int
    column: int


def named_requirements(text: str) -> dict[str, NamedRequirement]:
    """Return the lines that name a package, by its normalized name; those of other environments are left out."""
    found = {}
    for line, column, content in _logical_lines(text):
        try:
            requirement = Requirement(_OPTION_OF_REQUIREMENT.sub("", content).strip())
        except InvalidRequirement:  # an option, a URL or a path
            continue
        if requirement.marker is None or requirement.marker.evaluate():
            found[str(canonicalize_name(requirement.name))] = NamedRequirement(requirement, line, column)
    return found


def requirement_lines(text: str) -> dict[str, str]:
    """Return the lines of a requirements file by the name of their package; other lines by themselves."""
    lines: dict[str, str] = {}
    for _, _, content in _logical_lines(text):
        try:
            name: str = canonicalize_name(Requirement(_OPTION_OF_REQUIREMENT.sub("", content).strip()).name)
        except InvalidRequirement:  # an option, a URL or a path
            name = content
        lines[name] = content
    return lines


def _logical_lines(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield line number, column and content of each line that is not blank or a comment; join continued lines."""
    start, parts = 0, []
    for number, raw in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        start = start or number
        # As in pip, a comment ends a continued line, and a backslash in a comment has no effect.
        is_comment = raw.lstrip().startswith("#")
        continues = raw.endswith("\\") and not is_comment
        parts.append((" " if is_comment else "") + (raw[:-1] if continues else raw))
        if continues:
            continue
        joined = "".join(parts)
        if content := _COMMENT.sub("", joined).strip():
            yield start, len(joined) - len(joined.lstrip()) + 1, content
        start, parts = 0, []
    if content := _COMMENT.sub("", "".join(parts)).strip():
        yield start, 1, content


def _problem(content: str) -> tuple[str, str] | None:
    """Return the message and the fix for an invalid line, or None."""
    if content.startswith("-"):
        return _option_problem(content)
    requirement = _OPTION_OF_REQUIREMENT.sub("", content).strip()
    if _is_location(requirement):
        return None
    try:
        name = canonicalize_name(Requirement(requirement).name)
    except InvalidRequirement as error:
        reason = str(error).partition("\n")[0].rstrip(".:")
        return f"{requirement!r} is not a requirement: {reason[:1].lower()}{reason[1:]}", _fix(requirement)
    if name in _OWN_NAMES:
        return f"{name!r} would replace the module cortex that runs your code", "remove the line: it is installed"
    return None


def _split_option(content: str) -> tuple[str, str]:
    option = re.split(r"[\s=]", content, maxsplit=1)[0]
    if not option.startswith("--") and option[:2] in _OPTIONS:
        option = option[:2]  # `-rother.txt`
    return option, content[len(option) :].strip(" \t=")


def _option_problem(content: str) -> tuple[str, str] | None:
    option, value = _split_option(content)
    if option not in _OPTIONS:
        guess = nearest(option, _OPTIONS)
        return f"unknown option {option!r}", f"did you mean {guess}?" if guess else "remove the line"
    if _OPTIONS[option] and not value:
        return f"{option} requires a value", f"write {option} VALUE, or remove the line"
    if not _OPTIONS[option] and value and not value.startswith("-"):
        return f"{option} takes no value", f"write {option}"
    return None


def _is_location(requirement: str) -> bool:
    """Return True if a line is a URL or a path instead of a package name."""
    if _URL.match(requirement):
        return True
    bare = requirement.partition(";")[0].strip()
    is_path = bare.startswith((".", "/", "~")) or ("/" in bare and " @ " not in f" {bare} " and "@" not in bare)
    return is_path or (_ARCHIVE.search(bare) is not None and "@" not in bare)


def _fix(requirement: str) -> str:
    name = _NAME.match(requirement)
    if not name:
        return "write a package's name, such as numpy==2.0.0"
    version = _VERSION.match(requirement[name.end() :].lstrip(" ="))
    return f"write {name[0]}=={version[0]}" if version else "write it as name==version"
