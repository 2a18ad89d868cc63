"""Rules of the JSON files that an API names: the sample of its readiness, the baseline of its predictions.

Reads those files of the project, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from cortex.config.project import ProjectFiles
from cortex.config.schema import Api
from cortex.config.values import quote
from cortex.config.violations import Violation, absent

_READINESS, _BASELINE = "readiness", "tracker.baseline"
_JSON = (".json",)
#: With fewer, drift can't be told from chance.
MIN_BASELINE = 100


def sample_violations(api: Api, project: ProjectFiles) -> Iterator[Violation]:
    """Check that the files are there, and have what is read of them."""
    if api.readiness is not None:
        _, wrong = _read(api.readiness, project)
        if wrong:
            yield Violation((_READINESS,), *wrong)
    if api.tracker is not None and api.tracker.baseline is not None:
        file = api.tracker.baseline
        data, wrong = _read(file, project)
        if wrong := wrong or _baseline_problem(file, data, api.tracker.model_type):
            yield Violation((_BASELINE, "tracker.model_type"), *wrong)


def _read(file: str, project: ProjectFiles) -> tuple[Any, tuple[str, str] | None]:
    """Return what is in a file, or what is wrong with it."""
    if not project.contains(file):
        return None, absent(file, project, _JSON)
    try:
        return json.loads((project.root / file).read_bytes()), None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        return None, (f"{quote(file)} is not JSON: {error.msg} ({where})", "correct the file")
    except (ValueError, RecursionError):  # not UTF-8, or nested beyond what anyone reads
        return None, (f"{quote(file)} is not JSON", "correct the file")


def _baseline_problem(file: str, data: Any, model_type: str) -> tuple[str, str] | None:
    if model_type == "regression":
        if isinstance(data, list) and data and all(map(_is_number, data)):
            return _too_few(file, len(data))
        return f"{quote(file)} must have a list of numbers", "write the predictions for your training data, as [1.5, 2]"
    if isinstance(data, list) and data and all(map(_is_class, data)):
        return _too_few(file, len(data))
    if isinstance(data, dict) and all(map(_is_count, data.values())) and any(data.values()):
        return _too_few(file, sum(data.values()))
    message = f"{quote(file)} must have a list of classes, or a map of each class to its count"
    return message, 'write something like {"cat": 700, "dog": 300}'


def _too_few(file: str, known: int) -> tuple[str, str] | None:
    if known >= MIN_BASELINE:
        return None
    return f"{quote(file)} has {known} predictions; at least {MIN_BASELINE} are needed", "add more, or remove the key"


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _is_class(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
