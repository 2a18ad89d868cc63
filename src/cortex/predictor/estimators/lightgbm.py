"""Boosters of LightGBM. The only module that imports it."""

from __future__ import annotations

import mmap
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightgbm

from cortex.predictor.estimators.estimator import (
    PREDICTION,
    Estimator,
    Functions,
    Matrix,
    binary_probabilities,
    classify_by_most_probable,
)
from cortex.predictor.estimators.loader import LoadContext

_MAX_HEADER_BYTES = 64 * 1024**2
_OBJECTIVE = re.compile(rb"^objective=(\S+)([^\r\n]*)", re.MULTILINE)
_SIZES = re.compile(rb"^tree_sizes=([0-9 ]+)", re.MULTILINE)
_CLASSES = re.compile(rb"num_class:(\d+)")
_DEFAULT_NAME = re.compile(r"Column_\d+")


def load(context: LoadContext) -> Estimator:
    """Load a model that `save_model` wrote. Raises: anything for damaged files."""
    path = context.detection.path
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        header = _checked_header(context, text)
    booster = lightgbm.Booster(model_file=path)
    functions, classes = _functions(booster, header, context.threads)
    names = booster.feature_name()
    if all(_DEFAULT_NAME.fullmatch(name) for name in names):
        names = []
    table = Matrix(names, booster.num_feature(), "FP64", lambda array: array)
    return Estimator(context.request.model, "lightgbm", context.detection.reason, table, functions, classes)


def _checked_header(context: LoadContext, text: mmap.mmap) -> bytes:
    """Return the lines before the trees. LightGBM's parser may crash the process if parts of the text are missing.

    Raises: ModelFormatError.
    """
    start, end = text.find(b"Tree=0"), text.find(b"end of trees")
    header = text[: max(start, 0)]
    sizes = _SIZES.search(header)
    is_whole = (
        sizes is not None
        and len(header) < _MAX_HEADER_BYTES
        and start + sum(map(int, sizes[1].split())) == end
        and text.find(b"\0") < 0
        and (text.find(b"\nparameters:", end) < 0 or text.find(b"\nend of parameters", end) > 0)
    )
    if not is_whole:
        raise context.error("it is a truncated or damaged LightGBM model; save it again")
    return header


def _functions(booster: Any, header: bytes, threads: int) -> tuple[Functions, list[int]]:
    """Return what computes the outputs, and the classes of a classifier."""
    found = _OBJECTIVE.search(header)
    objective = found[1].decode() if found else ""
    count = _CLASSES.search(found[2]) if found else None

    def predict(argument: Any) -> Any:
        return booster.predict(argument, num_threads=threads)

    if objective == "binary":
        return {"": partial(classify_by_most_probable, lambda x: binary_probabilities(predict(x)))}, [0, 1]
    if objective in ("multiclass", "multiclassova") and count:
        return {"": partial(classify_by_most_probable, predict)}, list(range(int(count[1])))
    return {PREDICTION: predict}, []
