"""Parse YAML into plain data that keeps the line and column of every key and value.

The parser accepts exactly what the original's YAML library accepted: no dates, no base-60 numbers. The only key with a
meaning here is `name`, which labels the items of the list in diagnostics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from cortex.config.values import NULL, quote
from cortex.errors import ConfigError, Diagnostic

Scalar = str | int | float | bool | None
Path = tuple[str | int, ...]

MAX_SIZE_BYTES = 512 * 1024
MAX_VALUES = 50_000  #: after alias expansion, as a limit on "billion laughs" files
MAX_DEPTH = 64

_TAG = "tag:yaml.org,2002:"
#: Keys of an API; with one of them, a map is no file of another system.
_KEYS_OF_APIS = frozenset({"kind", "handler", "predictor", "definition"})
_AS_SHOWN_IN = "write a cortex.yaml, as docs/coming-from/"
#: Keys of the files of other systems, and what to do.
_OTHER_FILES = (
    ("apiVersion", "this is a manifest of Kubernetes; pass a cortex.yaml"),
    (
        "service include exclude python conda docker",
        f"this is a bentofile.yaml; {_AS_SHOWN_IN}bentoml.md shows",
    ),
    (
        "applications import_path proxy_location http_options grpc_options",
        f"this is a configuration of Ray Serve; {_AS_SHOWN_IN}ray-serve.md shows",
    ),
)
_TRUE = frozenset({"yes", "true", "on"})


@dataclass(frozen=True, slots=True)
class Node:
    """One value, the positions of the value and of its key (from 1), and the path of keys to it."""

    value: Scalar | tuple[Node, ...] | dict[str, Node]
    line: int
    column: int
    key_line: int
    key_column: int
    path: Path
    text: str = ""  #: of a number or a boolean, as it is written

    def plain(self) -> Any:
        """Return the value without positions."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def at(self, *path: object) -> Node | None:
        """Return the node at `path`, or None."""
        node: Node | None = self
        for part in path:
            if node is None:
                return None
            if isinstance(node.value, dict):
                node = node.value.get(str(part))
            elif isinstance(node.value, tuple) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
            else:
                return None
        return node


@dataclass(frozen=True)
class Document:
    """A file that contains a list of maps; `problems` are mistakes that did not prevent parsing."""

    file: str
    items: tuple[Node, ...]
    problems: tuple[Diagnostic, ...]
    labels: dict[int, str]

    def diagnostic(self, line: int, column: int, path: Path, message: str, fix: str = "") -> Diagnostic:
        """Return a diagnostic whose path starts with the name of its item."""
        return Diagnostic(self.file, line, column, _render(path, self.labels), message, fix)

    def at_value(self, node: Node, message: str, fix: str = "") -> Diagnostic:
        """Return a diagnostic that points at a value."""
        return self.diagnostic(node.line, node.column, node.path, message, fix)

    def at_key(self, node: Node, message: str, fix: str = "") -> Diagnostic:
        """Return a diagnostic that points at the key of a value."""
        return self.diagnostic(node.key_line, node.key_column, node.path, message, fix)

    def wrong_type(self, node: Node, expected: str, fix: str) -> Diagnostic:
        """Return the diagnostic for a value of the wrong type; `expected` includes its article."""
        if node.value is None:
            return self.at_value(node, *NULL)
        return self.at_value(node, f"{node.text or quote(node.plain())}: invalid type (expected {expected})", fix)


def parse(data: bytes, file: str) -> Document:
    """Parse YAML that must be a list of maps.

    Mistakes inside the list are collected in `Document.problems`.
    Raises: ConfigError if the file is not a non-empty list.
    """
    text = _decode(data, file)
    root = _compose(text, file)
    if root is None or not isinstance(root, yaml.SequenceNode) or not root.value:
        line, column = (root.start_mark.line + 1, root.start_mark.column + 1) if root else (1, 1)
        is_text = isinstance(root, yaml.ScalarNode)
        fix = 'write "- name: …" for each API'
        fix = f"is this a configuration file? {fix}" if is_text else fix
        if isinstance(root, yaml.MappingNode):
            fix = _fix_of_map(root)
        raise _config_error(file, line, column, "must contain a list of maps", fix)
    conversion = _NodeBuilder(file)
    nodes = conversion.run(root)
    labels = {index: _label(index, node) for index, node in enumerate(nodes)}
    problems = {
        (line, column, message): Diagnostic(file, line, column, _render(path, labels), message, fix)
        for line, column, path, message, fix in reversed(conversion.problems)
    }
    for node in nodes:
        if not isinstance(node.value, dict):
            message = f"{quote(node.plain())}: invalid type (expected a map)"
            problems[node.line, node.column, message] = Diagnostic(
                file, node.line, node.column, _render(node.path, labels), message, 'write "- name: …"'
            )
    items = tuple(node for node in nodes if isinstance(node.value, dict))
    return Document(file, items, tuple(sorted(problems.values())), labels)


def _fix_of_map(root: yaml.MappingNode) -> str:
    """Return the fix for a map instead of the list: it may be a file of another system."""
    values = {key.value: value for key, value in root.value if isinstance(key, yaml.ScalarNode)}
    if not values.keys() & _KEYS_OF_APIS or "apiVersion" in values:
        for keys, fix in _OTHER_FILES:
            if values.keys() & {*keys.split()}:
                return fix
    if values.keys() == {"apis"} and isinstance(values["apis"], yaml.SequenceNode):
        return 'remove "apis:": the file is a list of APIs'
    return 'put "- " before the first key and indent the others'


def _config_error(file: str, line: int, column: int, message: str, fix: str = "") -> ConfigError:
    return ConfigError([Diagnostic(file, line, column, "", message, fix)])


def _decode(data: bytes, file: str) -> str:
    if len(data) > MAX_SIZE_BYTES:
        raise ConfigError(
            [Diagnostic(file, 1, 1, "", f"is too big: {len(data)} bytes (at most {MAX_SIZE_BYTES})", "split the file")]
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Both `error.start` and `error.object` begin after a byte order mark.
        line, column = _position(error.object[: error.start].decode("utf-8", "replace"))
        message = f"is not UTF-8 text (byte 0x{error.object[error.start]:02x})"
        raise _config_error(file, line, column, message, "save the file as UTF-8") from None


def _position(before: str) -> tuple[int, int]:
    lines = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", before)
    return len(lines), len(lines[-1]) + 1


class _TooDeep(Exception):
    """The nesting exceeds `MAX_DEPTH`."""

    def __init__(self, mark: Any) -> None:
        super().__init__()
        self.mark = mark


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """Composes nodes with marks and resolves scalars as the original did: no dates, no base-60 numbers."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooDeep(self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.add_implicit_resolver(
    f"{_TAG}bool", re.compile(r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)\Z"), None
)
_Loader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)\Z"), None
)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    None,
)
_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)\Z"), None)
_Loader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"<<\Z"), None)


def _compose(text: str, file: str) -> yaml.Node | None:
    end = _position(text.rstrip())
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except ReaderError as error:
        line, column = _position(text[: error.position])
        raise _config_error(
            file, line, column, f"character #x{error.character:04x} is not allowed", "remove it"
        ) from None
    except yaml.MarkedYAMLError as error:
        position, message, fix = _explain(error, text)
        # Report an unexpected end at the end of the text, not on the empty line after it.
        raise _config_error(file, *min(position or end, end), message, fix) from None
    except (ValueError, OverflowError):  # an escape such as "\U7fffffff"
        line, column = min((loader.line + 1, loader.column + 1), end) if loader else end
        raise _config_error(file, line, column, "invalid character escape", "correct it or use single quotes") from None
    except _TooDeep as error:
        raise _config_error(
            file, error.mark.line + 1, error.mark.column + 1, f"is nested deeper than {MAX_DEPTH} levels", "flatten it"
        ) from None


def _label(index: int, node: Node) -> str:
    name = node.value.get("name") if isinstance(node.value, dict) else None
    if name is None or not isinstance(name.value, str) or not name.value.strip():
        return f"resource at index {index}"
    return _key_name(name.value)


def _key_name(key: str) -> str:
    return key if re.fullmatch(r"[^\s\[\]:\"'\x00-\x1f]{1,100}", key) and key.isprintable() else quote(key)


def _render(path: Path, labels: dict[int, str]) -> str:
    if not path:
        return ""
    first, *rest = path
    words = labels.get(first, str(first)) if isinstance(first, int) else first
    for part in rest:
        words += f"[{part}]" if isinstance(part, int) else f".{_key_name(part)}"
    return words


@dataclass
class _NodeBuilder:
    """Converts YAML nodes to `Node`s; expands aliases and counts the values it creates."""

    file: str
    made: int = 0
    problems: list[tuple[int, int, Path, str, str]] = field(default_factory=list)

    def run(self, root: yaml.SequenceNode) -> list[Node]:
        return [self._node(child, child.start_mark, (index,)) for index, child in enumerate(root.value)]

    def _problem(self, mark: Any, path: Path, message: str, fix: str = "") -> None:
        self.problems.append((mark.line + 1, mark.column + 1, path, message, fix))

    def _node(self, node: yaml.Node, key_mark: Any, path: Path) -> Node:
        self.made += 1
        mark = node.start_mark
        if self.made > MAX_VALUES:
            message = f"has more than {MAX_VALUES} values once its aliases are expanded"
            raise _config_error(self.file, mark.line + 1, mark.column + 1, message, "use fewer aliases")
        if len(path) > MAX_DEPTH:
            message = "an alias contains itself, or is nested too deeply"
            raise _config_error(self.file, mark.line + 1, mark.column + 1, message, "write the value out")
        value: Scalar | tuple[Node, ...] | dict[str, Node]
        text = ""
        if isinstance(node, yaml.MappingNode):
            self._check_tag(node, "map", path)
            value = self._map(node, path)
        elif isinstance(node, yaml.SequenceNode):
            self._check_tag(node, "seq", path)
            value = tuple(self._node(child, child.start_mark, (*path, i)) for i, child in enumerate(node.value))
        else:
            value = self._scalar(node, path)
            text = "" if value is None or isinstance(value, str) else str(node.value)
        return Node(value, mark.line + 1, mark.column + 1, key_mark.line + 1, key_mark.column + 1, path, text)

    def _check_tag(self, node: yaml.Node, expected: str, path: Path) -> None:
        if node.tag != _TAG + expected:
            self._problem(node.start_mark, path, f"tag {quote(_short(node.tag))} is not supported", "remove it")

    def _map(self, node: yaml.MappingNode, path: Path, merges: int = 0) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                for source in self._merge_sources(value_node, path, merges):
                    merged = {**self._map(source, path, merges + 1), **merged}
                continue
            key = self._key(key_node, node, path)
            if key is None:
                continue
            value = self._node(value_node, key_node.start_mark, (*path, key))
            if key in own:
                first = own[key]
                message = f"key {quote(key)} is defined twice (first on line {first.key_line})"
                self._problem(key_node.start_mark, value.path, message, "remove one of them")
                continue
            own[key] = value
        return {**merged, **own}

    def _merge_sources(self, node: yaml.Node, path: Path, merges: int) -> Iterator[yaml.MappingNode]:
        self.made += 1
        if merges > MAX_DEPTH or self.made > MAX_VALUES:
            line, column = node.start_mark.line + 1, node.start_mark.column + 1
            raise _config_error(self.file, line, column, "merges too many maps", "merge fewer maps")
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if isinstance(source, yaml.MappingNode):
                yield source
            else:
                self._problem(source.start_mark, (*path, "<<"), "can only merge maps", 'write "<<: *anchor"')

    def _key(self, node: yaml.Node, holder: yaml.Node, path: Path) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}str":
            if all(not "\ud800" <= char <= "\udfff" for char in node.value):
                return str(node.value)
            self._problem(node.start_mark, path, "invalid character in a key", "remove it")
        elif isinstance(node, yaml.ScalarNode):
            quoted = quote(node.value)
            self._problem(node.start_mark, path, f"key {node.value or 'null'} must be a string", f"write {quoted}")
        else:
            message = "a map or list cannot be a key"
            # Point at the start of the map: usually it is an unquoted template such as {{ name }}.
            self._problem(holder.start_mark, path, message, "put text with {{ }} or [ ] in quotes")
        return None

    def _scalar(self, node: yaml.Node, path: Path) -> Scalar:
        kind = _short(node.tag)
        text = str(node.value)
        if kind in ("str", "merge"):
            if any("\ud800" <= char <= "\udfff" for char in text):
                self._problem(
                    node.start_mark, path, "an unpaired surrogate is not a valid character", "remove the escape"
                )
                return text.encode("utf-8", "replace").decode()
            return text
        try:
            return _READERS[kind](text)
        except KeyError:
            self._problem(node.start_mark, path, f"tag {quote(kind)} is not supported", "remove it")
        except _TooBig:
            self._problem(
                node.start_mark, path, f"{quote(text)} is not a number that JSON can represent", "put it in quotes"
            )
        except ValueError:
            self._problem(node.start_mark, path, f"{quote(text)} does not fit its tag {quote(kind)}", "remove the tag")
        return text


def _short(tag: str) -> str:
    return tag.removeprefix(_TAG)


class _TooBig(Exception):
    """The number is outside the range that JSON parsers agree on."""


def _bool(text: str) -> bool:
    if text.lower() not in _TRUE | {"no", "false", "off"}:
        raise ValueError
    return text.lower() in _TRUE


def _int(text: str) -> int:
    digits = text.replace("_", "")
    if len(digits) > 70:
        raise _TooBig
    octal = re.fullmatch(r"([-+]?)0([0-7]+)", digits)
    value = int(f"{octal[1]}0o{octal[2]}" if octal else digits, 0)
    if not -(2**63) <= value < 2**64:
        raise _TooBig
    return value


def _float(text: str) -> float:
    value = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        raise _TooBig
    return value


def _null(text: str) -> None:
    if text.lower() not in ("", "~", "null"):
        raise ValueError


_READERS = {"bool": _bool, "int": _int, "float": _float, "null": _null}


class _ParserError(NamedTuple):
    """Patterns of PyYAML's problem and context, and our message; `opener`: point at the opening token."""

    problem: str
    context: str
    message: str
    fix: str
    opener: bool = False


_PARSER_ERRORS = (
    _ParserError(r"character '\\t'", "", "a tab cannot be used here", "use spaces"),
    _ParserError("end of stream", "quoted scalar", "a quote is never closed", "close it", True),
    _ParserError("document separator", "quoted scalar", "a quote is never closed", "close it", True),
    _ParserError(
        "",
        "flow sequence",
        'a list opened with "[" is not closed properly',
        'separate its items with "," and end it with "]"',
        True,
    ),
    _ParserError(
        "",
        "flow mapping",
        'a map opened with "{" is not closed properly',
        'separate its entries with "," and end it with "}"',
        True,
    ),
    _ParserError(
        "block sequence start|block sequence entr|sequence entries",
        "",
        'a list item ("- ") is not allowed here',
        "check the indentation",
    ),
    _ParserError(
        "block mapping start",
        "",
        "the indentation does not match the lines above",
        "align the key with those beside it",
    ),
    _ParserError(
        "expected <block end>",
        "block collection",
        'a list item ("- ") was expected here',
        'start the line with "- ", or check the indentation',
    ),
    _ParserError("expected <block end>", "", "a key was expected here", 'check the indentation; write "key: value"'),
    _ParserError("expected ':'", "", 'a ":" is missing after the key', 'write "key: value"'),
    _ParserError("undefined alias", "", "the alias has no anchor", "define it before with &"),
    _ParserError("second occurrence", "", "the anchor is defined twice", "rename one of them"),
    _ParserError("another document", "", "must be a single YAML document", 'remove the "---"'),
    _ParserError("cannot start any token", "", "this character cannot start a value", "put the value in quotes"),
    _ParserError(
        "escape",
        "",
        "invalid escape in a quoted string",
        "use single quotes, or write \\\\ for a backslash",
    ),
)


def _explain(error: yaml.MarkedYAMLError, text: str) -> tuple[tuple[int, int] | None, str, str]:
    """Translate a PyYAML error about `text` to its position (from 1), message and fix."""
    problem, context = error.problem or "", error.context or ""
    if error.problem_mark and "mapping values are not allowed" in problem:
        return _explain_colon(text.split("\n"), error.problem_mark.line, error.problem_mark.column)
    key_line = error.context_mark.line if error.context_mark and "expected ':'" in problem else None
    if key_line is not None and (missing := _missing_space(text.split("\n"), key_line)):
        return missing
    for row in _PARSER_ERRORS:
        if re.search(row.problem, problem) and re.search(row.context, context):
            mark = (error.context_mark if row.opener else None) or error.problem_mark or error.context_mark
            return _mark_position(mark), row.message, row.fix
    message = f"is not valid YAML: {problem or context}"
    return _mark_position(error.problem_mark or error.context_mark), message, "put the value in quotes"


def _mark_position(mark: yaml.Mark | None) -> tuple[int, int] | None:
    return (mark.line + 1, mark.column + 1) if mark else None


def _explain_colon(lines: list[str], line: int, column: int) -> tuple[tuple[int, int], str, str]:
    """Distinguish a second colon in a value from a line that PyYAML read as a continuation of the previous one."""
    key = lines[line][:column].lstrip(" -") if line < len(lines) else ":"
    above = next((index for index in range(line - 1, -1, -1) if lines[index].split("#")[0].strip()), None)
    if ": " in key or above is None:
        fix = "check the indentation, or put the value in quotes"
        return (line + 1, column + 1), 'a second ": " is not allowed here', fix
    if missing := _missing_space(lines, above):
        return missing
    indent = len(lines[above]) - len(lines[above].lstrip(" -"))
    if ":" not in lines[above]:
        return (above + 1, indent + 1), 'a ":" is missing after the key', 'write "key: value"'
    message = "the indentation does not match the lines above"
    return (line + 1, column - len(key) + 1), message, "align the key with those beside it"


def _missing_space(lines: list[str], line: int) -> tuple[tuple[int, int], str, str] | None:
    """Return the explanation of a line such as `name:iris`; None for other lines."""
    found = re.match(r"[ -]*(\w+):(?!//)[^\s:]", lines[line]) if line < len(lines) else None
    if found is None or ": " in lines[line].split("#")[0]:
        return None
    fix = f'write "{found[1]}: " with a space'
    return (line + 1, found.end()), "a space is missing after the colon", fix
