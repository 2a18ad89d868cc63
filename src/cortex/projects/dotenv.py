"""Parse the `.env` file of a project as a shell with `set -a` would, without running anything.

python-dotenv is not used because it skips bad lines instead of reporting them with line and column, and quotes,
escapes and expands differently from a shell, which the original used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cortex.errors import ConfigError, Diagnostic

DOTENV_NAME = ".env"
RESERVED_PREFIX = "CORTEX_"  #: of variables that only cortex itself sets

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
_EXPORT = re.compile(r"export[ \t]+")
_PLAIN_REFERENCE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
#: `$1`, `$?`, `${name:-default}` and `$(command)`: shell expansions that are not supported.
_SPECIAL_REFERENCE = re.compile(r"\$[({0-9@*#?$!'\"-]")
_METACHARACTERS = frozenset(";&|<>()")


def check_dotenv(root: Path) -> None:
    """Check `root`'s `.env`, if there is one. Raises: ConfigError with every bad line and reserved name."""
    read_dotenv(root, allows_reserved=False)


def read_dotenv(
    root: Path, environ: Mapping[str, str] | None = None, *, allows_reserved: bool = True
) -> dict[str, str]:
    """Return the variables of `root`'s `.env`; empty if there is no such file.

    `$NAME` refers to variables of earlier lines, then to `environ`. Reserved names are allowed in projects that were
    deployed before they were checked. Raises: ConfigError with a diagnostic for each bad line.
    """
    file = root / DOTENV_NAME
    if not file.is_file():
        return {}
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError([Diagnostic(DOTENV_NAME, 0, 0, "", "is not UTF-8 text", "save it as UTF-8")]) from None
    except OSError as error:
        raise ConfigError([Diagnostic(DOTENV_NAME, 0, 0, "", f"can't be read: {error.strerror}")]) from None
    return parse_dotenv(text, environ, allows_reserved=allows_reserved)


def parse_dotenv(
    text: str, environ: Mapping[str, str] | None = None, *, allows_reserved: bool = True
) -> dict[str, str]:
    """Return the variables that `text` sets. Raises: ConfigError as `read_dotenv`."""
    # A shell would keep the carriage returns of Windows line endings in the values, which is never intended.
    return _DotenvParser(text.replace("\r\n", "\n"), environ or {}, allows_reserved).read()


class _BadLineError(Exception):
    def __init__(self, position: int, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.position, self.message, self.fix = position, message, fix


class _DotenvParser:
    """Parses the text in one pass; continues after a bad line, to report all of them."""

    def __init__(self, text: str, environ: Mapping[str, str], allows_reserved: bool) -> None:
        self._text = text
        self._allows_reserved = allows_reserved
        self._position = 0
        self._environ = environ
        self._variables: dict[str, str] = {}
        self._diagnostics: list[Diagnostic] = []

    def read(self) -> dict[str, str]:
        while self._position < len(self._text):
            try:
                self._read_line()
            except _BadLineError as error:
                self._diagnostics.append(self._diagnostic(error))
                end = self._text.find("\n", max(self._position, error.position))
                self._position = len(self._text) if end < 0 else end + 1
        if self._diagnostics:
            raise ConfigError(self._diagnostics)
        return self._variables

    def _diagnostic(self, error: _BadLineError) -> Diagnostic:
        line = self._text.count("\n", 0, error.position) + 1
        column = error.position - (self._text.rfind("\n", 0, error.position) + 1) + 1
        return Diagnostic(DOTENV_NAME, line, column, "", error.message, error.fix)

    def _read_line(self) -> None:
        """Parse assignments up to and including the end of the line."""
        self._skip_blanks()
        if export := _EXPORT.match(self._text, self._position):
            self._position = export.end()
            self._skip_blanks()
            if self._at_end_of_line():
                raise _BadLineError(export.start(), "has no variable to export", "write export VARIABLE=value")
        while not self._at_end_of_line():
            start = self._position
            match = _ASSIGNMENT.match(self._text, start)
            if not match:
                raise self._not_an_assignment(start)
            if match[1].startswith(RESERVED_PREFIX) and not self._allows_reserved:
                message = f'"{match[1]}" cannot start with {RESERVED_PREFIX} (such names are reserved)'
                self._diagnostics.append(self._diagnostic(_BadLineError(start, message, "rename the variable")))
            self._position = match.end()
            self._variables[match[1]] = self._read_value()
            self._skip_blanks()
        self._position += 1

    def _not_an_assignment(self, start: int) -> _BadLineError:
        is_first = not self._text[self._text.rfind("\n", 0, start) + 1 : start].strip()
        if is_first:
            return _BadLineError(start, "is not an assignment", "write VARIABLE=value")
        return _BadLineError(start, "is after the end of the value", "quote a value that contains spaces")

    def _skip_blanks(self) -> None:
        while self._text.startswith((" ", "\t", "\\\n"), self._position):
            self._position += 2 if self._text[self._position] == "\\" else 1

    def _at_end_of_line(self) -> bool:
        if self._text.startswith("#", self._position):
            end = self._text.find("\n", self._position)
            self._position = len(self._text) if end < 0 else end
        return self._position >= len(self._text) or self._text[self._position] == "\n"

    def _read_value(self) -> str:
        parts: list[str] = []
        start = self._position
        while self._position < len(self._text):
            character = self._text[self._position]
            if character in " \t\n":
                break
            parts.append(self._read_part(character, start))
        value = "".join(parts)
        if "\0" in value:
            raise _BadLineError(start, "contains a NUL character, which no environment variable can hold")
        return value

    def _read_part(self, character: str, start: int) -> str:
        if character == "'":
            return self._read_single_quoted()
        if character == '"':
            return self._read_double_quoted()
        if character in "$`":
            return self._read_reference()
        if character == "\\":
            self._position += 2
            escaped = self._text[self._position - 1 : self._position]
            return "" if escaped == "\n" else escaped or "\\"
        if character in _METACHARACTERS:
            raise _BadLineError(self._position, f"{character!r} has a special meaning in a shell", "quote the value")
        self._position += 1
        if character == "~" and self._is_home(start):
            return self._environ["HOME"]
        return character

    def _is_home(self, start: int) -> bool:
        before, after = self._position - 2, self._position
        opens = self._position - 1 == start or self._text[before] == ":"
        closes = after >= len(self._text) or self._text[after] in " \t\n/:"
        return opens and closes and "HOME" in self._environ

    def _read_single_quoted(self) -> str:
        end = self._text.find("'", self._position + 1)
        if end < 0:
            raise _BadLineError(self._position, "the quote is never closed", "end it with '")
        value = self._text[self._position + 1 : end]
        self._position = end + 1
        return value

    def _read_double_quoted(self) -> str:
        opening = self._position
        parts: list[str] = []
        self._position += 1
        while self._position < len(self._text):
            character = self._text[self._position]
            if character == '"':
                self._position += 1
                return "".join(parts)
            if character in "$`":
                parts.append(self._read_reference(quoted=True))
                continue
            self._position += 1
            following = self._text[self._position : self._position + 1]
            if character == "\\" and following and following in '$`"\\\n':
                self._position += 1
                character = "" if following == "\n" else following
            parts.append(character)
        self._position = opening
        raise _BadLineError(opening, "the quote is never closed", 'end it with "')

    def _read_reference(self, *, quoted: bool = False) -> str:
        if match := _PLAIN_REFERENCE.match(self._text, self._position):
            self._position = match.end()
            name = match[1] or match[2]
            return self._variables.get(name, self._environ.get(name, ""))
        special = _SPECIAL_REFERENCE.match(self._text, self._position)
        closes_quote = quoted and special is not None and special[0] == '$"'
        if self._text[self._position] == "`" or (special and not closes_quote and not (quoted and special[0] == "$'")):
            fix = "write the value itself, in single quotes if it contains $ or `"
            raise _BadLineError(self._position, "only $NAME and ${NAME} are expanded", fix)
        self._position += 1
        return "$"
