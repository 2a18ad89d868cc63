"""Read what a pickle names without executing it: its classes, and the version of scikit-learn that saved it.

`pickletools.genops` yields the instructions of a pickle. A small stack machine follows them as far as strings, tuples
and dictionaries go, and never calls or imports anything. joblib puts the raw bytes of an array right behind the
instructions that describe it (`NumpyArrayWrapper`); the machine knows its type and shape, and skips them.

What is found is for messages and requirements only: it can't tell a harmless pickle from a hostile one.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import pickletools
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

_PROTO = 0x80
_MAX_PROTOCOL = 5
_MAX_OPCODES = 200_000
_MAX_BYTES = 256 * 1024**2  #: of instructions; bytes of arrays are skipped
_MAX_UNPACKED_BYTES = 256 * 1024**2  #: read from a compressed pickle, arrays included
_MAX_CLASSES = 1000
_SHOWN_CLASSES = 3
_MAX_DEPTH = 8  #: of arrays of objects, which are pickles themselves
_CHUNK_BYTES = 1024**2
_DICTIONARY_BYTES = 128 * 1024**2  #: of LZMA
_WRAPPER = "joblib.numpy_pickle.NumpyArrayWrapper"
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION_KEY = "_sklearn_version"
_VERSION = re.compile(r"[0-9][0-9a-z.+]{0,40}")
_DTYPE = re.compile(r"[<>=|]?([a-zA-Z?])(\d*)")
#: Modules whose packages have other names; others of `_PACKAGES` are their own.
_PACKAGES = {"sklearn": "scikit-learn", "numpy": "numpy", "scipy": "scipy", "pandas": "pandas"} | {
    name: name for name in ("joblib", "xgboost", "lightgbm", "catboost", "imblearn", "statsmodels")
}
_PACKAGES["imblearn"] = "imbalanced-learn"


@dataclass(frozen=True, slots=True)
class PickleContent:
    """The names and versions in a pickle."""

    protocol: int
    compression: str = ""  #: zlib, gzip, bzip2, LZMA or xz
    classes: tuple[str, ...] = ()  #: classes and functions, in the order in which they are named
    sklearn_version: str = ""  #: "": not found
    is_torch: bool = False

    @property
    def shown_classes(self) -> list[str]:
        """Return the first names for messages."""
        more = ["…"] if len(self.classes) > _SHOWN_CLASSES else []
        return [name[:100] for name in self.classes[:_SHOWN_CLASSES]] + more

    @property
    def packages(self) -> list[str]:
        """Return the packages that provide the named classes, as far as they are known."""
        modules = {name.partition(".")[0] for name in self.classes}
        return sorted(package for module, package in _PACKAGES.items() if module in modules)


def inspect(stream: BinaryIO, size: int) -> PickleContent | None:
    """Return what a pickle names; None if the bytes are none. Reads a limited amount. Never raises ValueError."""
    compression, unpacked = _decompress(stream)
    start = unpacked.peek(2)
    if len(start) < 2 or start[0] != _PROTO or not 1 <= start[1] <= _MAX_PROTOCOL:
        return None
    limit = _MAX_UNPACKED_BYTES if compression else size
    machine = _Machine(_Source(unpacked, limit))
    machine.run()
    return PickleContent(start[1], compression, tuple(machine.names), machine.sklearn_version, machine.is_torch)


class _Peekable:
    """A stream whose first bytes can be read without consuming them; damaged compressed data is its end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._ahead = b""

    def peek(self, size: int) -> bytes:
        self._ahead = self._ahead or self.read(size)
        return self._ahead

    def read(self, size: int) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            return data + (self.read(size - len(data)) if len(data) < size else b"")
        try:
            return cast("bytes", self._stream.read(size))
        except (OSError, EOFError, zlib.error, lzma.LZMAError):
            return b""


def _decompress(stream: BinaryIO) -> tuple[str, _Peekable]:
    head = stream.read(6)
    stream.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return "gzip", _Peekable(gzip.GzipFile(fileobj=stream))
    if head.startswith(b"BZh"):
        return "bzip2", _Peekable(bz2.BZ2File(stream))
    if head.startswith(b"\xfd7zXZ\x00"):
        return "xz", _Peekable(_unpack(stream, lzma.LZMADecompressor(memlimit=_DICTIONARY_BYTES)))
    if head.startswith(b"]\x00\x00"):
        return "LZMA", _Peekable(_unpack(stream, lzma.LZMADecompressor(memlimit=_DICTIONARY_BYTES)))
    if head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0:  # RFC 1950
        return "zlib", _Peekable(_unpack(stream, zlib.decompressobj()))
    return "", _Peekable(stream)


def _unpack(stream: BinaryIO, decompressor: Any) -> io.BufferedReader:
    return io.BufferedReader(_UnpackedFile(stream, decompressor))


class _UnpackedFile(io.RawIOBase):
    """A file in zlib's format, as joblib writes it, or in LZMA's with a limit of its memory."""

    def __init__(self, stream: BinaryIO, decompressor: Any) -> None:
        self._stream = stream
        self._decompressor = decompressor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressor.eof:
            packed = getattr(self._decompressor, "unconsumed_tail", b"")
            if not packed and getattr(self._decompressor, "needs_input", True):
                packed = self._stream.read(64 * 1024)
                if not packed:
                    break
            data = self._decompressor.decompress(packed, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0


class _SkippedBytes:
    """A long value that was skipped; only its length is known."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class _Source:
    """The file that `pickletools.genops` reads: within limits, and without long values."""

    def __init__(self, stream: _Peekable, limit_bytes: int) -> None:
        self._stream = stream
        self._left = limit_bytes
        self._kept = _MAX_BYTES

    def read(self, size: int) -> Any:
        if size < 0 or size > self._left:
            raise EOFError
        if size > _CHUNK_BYTES:
            self.skip(size)
            return _SkippedBytes(size)
        self._left -= size
        self._kept -= size
        if self._kept < 0:
            raise EOFError
        return self._stream.read(size)

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = self.read(1)
            if not byte or len(line) > _CHUNK_BYTES:
                raise EOFError
            line += byte
        return bytes(line)

    def skip(self, size: int) -> None:
        if size < 0 or size > self._left:
            raise EOFError
        self._left -= size
        while size > 0:
            data = self._stream.read(min(size, _CHUNK_BYTES))
            if not data:
                raise EOFError
            size -= len(data)


_MARK = object()
_UNKNOWN = object()


@dataclass
class _Made:
    """An object that the pickle would construct."""

    name: str
    arguments: Any = None
    state: Any = None


@dataclass
class _Machine:
    """Follows the instructions of a pickle on a stack of strings, numbers, tuples, dictionaries and `_Made`."""

    source: _Source
    names: dict[str, None] = field(default_factory=dict)
    sklearn_version: str = ""
    is_torch: bool = False
    _opcodes: int = 0

    def run(self, depth: int = 0) -> None:
        """Run one pickle until it stops, or until it is no longer understood."""
        stack: list[Any] = []
        memo: dict[int, Any] = {}
        try:
            for opcode, argument, _ in pickletools.genops(cast("Any", self.source)):
                self._opcodes += 1
                if self._opcodes > _MAX_OPCODES:
                    raise EOFError
                self._step(opcode, argument, stack, memo, depth)
        except (ValueError, EOFError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            if depth:
                raise EOFError from None

    def _step(self, opcode: Any, argument: Any, stack: list[Any], memo: dict[int, Any], depth: int) -> None:
        name = opcode.name
        if name == "MARK":
            stack.append(_MARK)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(self._global(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._global(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, made = stack.pop(), stack.pop()
            stack.append(_Made(made.name if isinstance(made, _Made) else "", arguments))
        elif name == "BUILD":
            state, made = stack.pop(), stack[-1]
            if isinstance(made, _Made):
                made.state = state
                if made.name == _WRAPPER:
                    self._skip_array(state, depth)
        elif name in _COLLECTIONS:
            _COLLECTIONS[name](stack)
        elif name in ("SETITEM", "SETITEMS"):
            items = _to_mark(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            self._set_items(stack[-1], items)
        else:
            self._other(opcode, argument, stack)

    def _other(self, opcode: Any, argument: Any, stack: list[Any]) -> None:
        """Apply the effect of an instruction whose values do not matter."""
        if opcode.arg is not None and not opcode.stack_before and len(opcode.stack_after) == 1:
            if argument == _TORCH_MAGIC:
                self.is_torch = True
            stack.append(argument)
            return
        before = opcode.stack_before
        if pickletools.markobject in before:
            _to_mark(stack)
            before = before[: before.index(pickletools.markobject)]
        constants = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
        if opcode.name in constants:
            stack.append(constants[opcode.name])
            return
        kept = stack[-1] if opcode.name in ("DUP", "APPEND", "APPENDS", "ADDITEMS") and stack else _UNKNOWN
        if opcode.name in ("APPEND",):
            kept = stack[-2]
        for _ in before:
            stack.pop()
        stack.extend(kept if each is not None else _UNKNOWN for each in opcode.stack_after)

    def _global(self, module: Any, attribute: Any) -> _Made:
        name = f"{module}.{attribute}" if isinstance(module, str) and isinstance(attribute, str) else ""
        if name and len(self.names) < _MAX_CLASSES and not name.startswith(("joblib.numpy_pickle", "copyreg.")):
            self.names[name] = None
        return _Made(name)

    def _set_items(self, target: Any, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=False):
            if not isinstance(key, str):
                continue
            if isinstance(target, dict):
                target[key] = value
            if key == _VERSION_KEY and isinstance(value, str) and _VERSION.fullmatch(value):
                self.sklearn_version = self.sklearn_version or value

    def _skip_array(self, state: Any, depth: int) -> None:
        """Skip the bytes of an array behind the state of its wrapper, see `joblib.numpy_pickle`."""
        kind, size = _element(state["dtype"])
        if kind == "O":
            if depth >= _MAX_DEPTH:
                raise EOFError
            self.run(depth + 1)
            return
        if state.get("numpy_array_alignment_bytes") is not None:
            self.source.skip(self.source.read(1)[0])
        self.source.skip(math.prod(state["shape"]) * size)


def _element(dtype: Any) -> tuple[str, int]:
    """Return the kind of a pickled dtype and the size of an element in bytes. Raises: TypeError for another object."""
    found = _DTYPE.fullmatch(dtype.arguments[0])
    if found is None:
        raise TypeError
    if found[1] == "O" or (found[1] == "V" and not found[2]):
        return "O", 0
    return found[1], int(found[2] or 1) * (4 if found[1] == "U" else 1)


def _to_mark(stack: list[Any]) -> list[Any]:
    """Remove and return what is above the topmost mark, and the mark."""
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _tuple_of(size: int) -> Callable[[list[Any]], None]:
    def apply(stack: list[Any]) -> None:
        items = [stack.pop() for _ in range(size)][::-1]
        stack.append(tuple(items))

    return apply


_COLLECTIONS: dict[str, Callable[[list[Any]], None]] = {
    "EMPTY_DICT": lambda stack: stack.append({}),
    "EMPTY_TUPLE": lambda stack: stack.append(()),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": lambda stack: stack.append(tuple(_to_mark(stack))),
}
