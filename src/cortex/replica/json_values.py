"""JSON for what orjson alone refuses: numpy values, numbers beyond 64 bits, odd keys; or a clear refusal.

It never imports numpy: a value of numpy's can only exist where the user's code has.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from datetime import date, datetime, time
from enum import Enum
from typing import Any
from uuid import UUID

import orjson

from cortex.errors import UserError

_KEYS = orjson.OPT_NON_STR_KEYS

#: What to do about values of these types; the keys are `module.name`, the module without its dotted rest.
_FIXES = {
    "builtins.set": "return a list: list(value)",
    "builtins.frozenset": "return a list: list(value)",
    "builtins.bytes": "decode it, or encode it with base64",
    "builtins.complex": "return its real and imaginary parts",
    "decimal.Decimal": "return float(value) or str(value)",
    "pandas.DataFrame": 'return value.to_dict("records")',
    "pandas.Series": "return value.tolist()",
    "torch.Tensor": "return value.tolist()",
    "tensorflow.EagerTensor": "return value.numpy()",
    "PIL.Image": "save it to bytes and return those",
}
_NUMBERS = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
    + ("bool", "bool_")  # numpy 2 and numpy 1
)
_ITEM_LIMIT = 60


def from_numpy(value: Any) -> orjson.Fragment:
    """Return the JSON of a plain numpy number or array, for orjson's `default`.

    Not orjson's own option for numpy at the outermost call: it writes wrong dates, and text that is not JSON, for
    "not a time" in arrays of datetime64. Raises: TypeError for all else, which `dumps_slowly` then takes up.
    """
    name = type(value).__name__
    if type(value).__module__ != "numpy" or (name != "ndarray" and name not in _NUMBERS):
        raise TypeError
    if name == "ndarray":
        if value.dtype.kind not in "biuf":
            raise TypeError
        value = value if value.flags.c_contiguous else value.copy(order="C")
    return orjson.Fragment(orjson.dumps(value, None, orjson.OPT_SERIALIZE_NUMPY))


def dumps_slowly(value: Any) -> bytes:
    """Return JSON for a value that `orjson.dumps` with `from_numpy` refused; it looks at every value in it.

    Raises: UserError, naming the first value that can't be in JSON by its path in the result.
    """
    try:
        return orjson.dumps(value, from_numpy, _KEYS)
    except TypeError:
        pass
    try:
        plain = _Plain().convert(value, "result")
        try:
            return orjson.dumps(plain)
        except TypeError:  # numbers beyond 64 bits, lone surrogates, deeper than orjson goes
            return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError:
        raise UserError("the result is nested too deeply for JSON") from None


def _describe_type(value: Any) -> str:
    """Return the name of a value's type, with its module unless it is a built-in."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _Plain:
    """Copies a value into plain dicts, lists, strings and numbers."""

    def __init__(self) -> None:
        self._inside: set[int] = set()
        numpy: Any = sys.modules.get("numpy")
        self._numpy: Any = numpy if hasattr(numpy, "ndarray") else None

    def convert(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | str):
            return value.value if isinstance(value, Enum) else value
        if isinstance(value, Enum):
            return self.convert(value.value, path)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        if isinstance(value, dict):
            return self._nested(value, path, self._convert_dict)
        if isinstance(value, list | tuple):
            return self._nested(value, path, self._convert_list)
        return self._convert_other(value, path)

    def _nested(self, value: Any, path: str, convert: Callable[[Any, str], Any]) -> Any:
        if id(value) in self._inside:
            raise UserError(f"{path} contains itself, which JSON can't say")
        self._inside.add(id(value))
        try:
            return convert(value, path)
        finally:
            self._inside.discard(id(value))

    def _convert_dict(self, value: dict[Any, Any], path: str) -> dict[str, Any]:
        return {self._key(key, path): self.convert(item, f"{path}[{_shorten(key)}]") for key, item in value.items()}

    def _convert_list(self, value: list[Any], path: str) -> list[Any]:
        return [self.convert(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def _convert_other(self, value: Any, path: str) -> Any:
        if self._numpy is not None and isinstance(value, self._numpy.ndarray | self._numpy.generic):
            return self._convert_numpy(value, path)
        if isinstance(value, datetime | date | time | UUID):
            return str(value) if isinstance(value, UUID) else value.isoformat()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return self._nested(fields, path, self._convert_dict)
        raise _refusal(value, path)

    def _convert_numpy(self, value: Any, path: str) -> Any:
        numpy = self._numpy
        if value.dtype.kind == "m":
            raise _refusal(value, path)
        if value.dtype.kind == "M":
            unit = numpy.datetime_data(value.dtype)[0]
            shown = "s" if unit in ("Y", "M", "W", "D", "h", "m") else unit  # orjson shows at least seconds, too
            return _nulls(numpy.datetime_as_string(value, unit=None if unit == "generic" else shown).tolist())
        if value.dtype.char == "g":  # longdouble has no Python type of its own
            return self.convert(value.astype(numpy.float64).tolist(), path)
        return self.convert(value.tolist(), path)

    def _key(self, key: Any, path: str) -> str:
        if self._numpy is not None and isinstance(key, self._numpy.generic):
            key = key.item()
        if isinstance(key, Enum):
            key = key.value
        if isinstance(key, str):
            return str(key)
        if key is None or isinstance(key, bool | int | float | datetime | date | time | UUID):
            try:
                return str(next(iter(orjson.loads(orjson.dumps({key: None}, None, _KEYS)))))
            except TypeError:
                return str(key)  # beyond 64 bits
        raise UserError(f"{path} has a key that JSON can't hold: {_shorten(key)} ({_describe_type(key)}); use str(key)")


def _nulls(texts: Any) -> Any:
    """Replace numpy's word for "not a time" by null, in nested lists."""
    if isinstance(texts, list):
        return [_nulls(text) for text in texts]
    return None if texts == "NaT" else texts


def _refusal(value: Any, path: str) -> UserError:
    kind = type(value)
    fix = _FIXES.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}", "return numbers, strings, lists and dicts")
    return UserError(f"{path}: {_describe_type(value)} is not JSON serializable; {fix}")


def _shorten(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= _ITEM_LIMIT else text[: _ITEM_LIMIT - 1] + "…"
