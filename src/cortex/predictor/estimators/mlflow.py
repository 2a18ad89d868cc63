"""MLflow models with the flavor python_function. Imports mlflow, which takes seconds.

mlflow loads the model, so that its answers are those of `mlflow models serve`. Inputs are those of its schema: one for
each column, or its tensors.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import yaml
from mlflow.exceptions import MlflowException

from cortex.models.formats.mlflow_model import DATATYPES
from cortex.payloads.inference_tensors import datatype_of
from cortex.payloads.signature import TensorSignature
from cortex.predictor.estimators.estimator import PREDICTION, Array, Columns, Estimator, Matrix, Table, texts
from cortex.predictor.estimators.importing import load_with_modules
from cortex.predictor.estimators.loader import LoadContext

#: The forms of ISO 8601 with a day, and a time in it that may have an offset.
_DATE = re.compile(
    r"(?P<day>\d{4}-\d{2}-\d{2}|\d{8})"
    r"([Tt ](?P<time>\d{2}(:?\d{2}(:?\d{2})?)?)([.,](?P<part>\d{1,9}))?(?P<zone>[Zz]|[+-]\d{2}(:?\d{2})?)?)?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN_CHARACTERS = 60
_SAMPLES = {"datetime": "2000-01-01T00:00:00", "binary": b""}


def load(context: LoadContext) -> Estimator:
    """Load a folder that the caller trusts, or that runs no code. Raises: ModelFormatError, MlflowException."""
    folder = context.detection.path
    if not context.detection.needs_trust:
        # Mlflow trusts its own lists of types in a skops file: check the file as one without a folder.
        from cortex.predictor.estimators.sklearn import load_skops  # noqa: PLC0415 - needs scikit-learn

        for file in sorted(Path(folder).iterdir()):
            if file.is_file() and zipfile.is_zipfile(file):
                load_skops(context, str(file))
    code = _code_folders(Path(folder)) if context.detection.needs_trust else ()
    model = load_with_modules(context.request, code, lambda: mlflow.pyfunc.load_model(folder, suppress_warnings=True))
    inputs, outputs = model.metadata.get_input_schema(), model.metadata.get_output_schema()
    if inputs is None or not inputs.inputs:
        raise context.error("it has no signature; save it with `signature=infer_signature(inputs, predictions)`")
    table = _tensors(context, inputs) if inputs.is_tensor_spec() else _columns(context, inputs)
    declared = _declared(outputs)
    name = declared[0].name if len(declared) == 1 else PREDICTION
    functions = {"": _predict(model, name)}
    return Estimator(context.request.model, "mlflow", context.detection.reason, table, functions, (), declared)


def _code_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of code of a model, and of the models among its artifacts."""
    for file in sorted(folder.rglob("MLmodel")):
        try:
            document = yaml.safe_load(file.read_text())
        except (yaml.YAMLError, UnicodeDecodeError):
            continue
        flavors = document.get("flavors") if isinstance(document, dict) else None
        for flavor in flavors.values() if isinstance(flavors, dict) else ():
            if isinstance(flavor, dict) and (code := flavor.get("code")):
                yield file.parent / str(code)


def _predict(model: Any, name: str) -> Callable[[Any], dict[str, Any]]:
    def predict(argument: Any) -> dict[str, Any]:
        try:
            found = model.predict(argument)
        except MlflowException as exc:  # the input does not fit the schema
            raise ValueError(str(exc)) from exc
        if hasattr(found, "columns"):  # a data frame
            return {str(column): found[column].to_numpy() for column in found.columns}
        return dict(found) if isinstance(found, Mapping) else {name: found}

    return predict


# Columns.


def _columns(context: LoadContext, schema: Any) -> Table:
    kinds = [getattr(column.type, "name", None) or str(column.type) for column in schema.inputs]
    unknown = next((kind for kind in kinds if kind not in DATATYPES), None)
    if unknown:
        raise context.error(f"its signature has a column of type {unknown}; write a class that loads it with mlflow")
    names = [str(column.name) if column.name is not None else "" for column in schema.inputs]
    if not all(names) and len(set(kinds)) == 1 and DATATYPES[kinds[0]] != "BYTES":
        return Matrix((), len(names), DATATYPES[kinds[0]], _frame_of_rows)
    has_names = all(names)
    shown = names if has_names else [f"input-{index}" for index in range(len(names))]
    tensors = [
        TensorSignature(name, DATATYPES[kind], (-1, 1), optional=not getattr(column, "required", True))
        for name, kind, column in zip(shown, kinds, schema.inputs, strict=True)
    ]
    samples = {name: _SAMPLES[kind] for name, kind in zip(shown, kinds, strict=True) if kind in _SAMPLES}
    dates, binary, strings = (
        {name for name, kind in zip(shown, kinds, strict=True) if kind == each}
        for each in ("datetime", "binary", "string")
    )

    def frame(columns: dict[str, Array]) -> Any:
        import pandas as pd  # noqa: PLC0415 - slow to import; mlflow has done so already

        of_texts = pd.Series(["text"]).dtype  # a column without any text would have another one
        found = {
            name: _dates(array, name)
            if name in dates
            else pd.Series(array, dtype=of_texts)
            if name in strings
            else array
            for name, array in columns.items()
        }
        made = pd.DataFrame(found)
        return made if has_names else made.set_axis(range(len(names)), axis=1)

    return Columns(tensors, samples, frame, binary)


def _dates(array: Array, name: str) -> Array:
    """Return texts as dates in UTC, each by itself: other rows must not change what it means. Raises: ValueError."""
    return np.array([_date(value, row, name) for row, value in enumerate(array, 1)], "datetime64[ns]")


def _date(text: str | None, row: int, name: str) -> np.datetime64:
    if text is None:
        return np.datetime64("NaT", "ns")
    problem = f"it must be a date of ISO 8601, such as {_SAMPLES['datetime']}"
    try:
        if found := _DATE.fullmatch(text):
            moment = datetime.fromisoformat(f"{found['day']}T{found['time'] or '00'}{(found['zone'] or 'Z').upper()}")
            nanoseconds = (moment - _EPOCH) // timedelta(seconds=1) * 10**9 + int((found["part"] or "").ljust(9, "0"))
            if abs(nanoseconds) < 2**63:
                return np.datetime64(nanoseconds, "ns")
            problem = "dates are of the years 1678 to 2261"
    except (ValueError, OverflowError):
        pass
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    raise ValueError(f"row {row}, column {name!r} is {shown!r}; {problem}")


def _frame_of_rows(array: Array) -> Any:
    import pandas as pd  # noqa: PLC0415 - slow to import; mlflow has done so already

    return pd.DataFrame(array)


# Tensors.


class _Tensors:
    """Inputs of a schema of tensors: one array without a name, or arrays by name."""

    def __init__(self, tensors: tuple[TensorSignature, ...], dtypes: Mapping[str, Any], is_named: bool) -> None:
        self.tensors = tensors
        self._dtypes = dtypes
        self._is_named = is_named

    def read(self, inputs: Mapping[str, Array]) -> Any:
        """Return the array, or a dictionary. Raises: ValueError."""
        given = {
            name: texts(inputs[name], name).astype(dtype) if dtype.kind in "OU" else inputs[name].astype(dtype)
            for name, dtype in self._dtypes.items()
        }
        return given if self._is_named else next(iter(given.values()))

    def sample(self) -> dict[str, Array]:
        """Return zeros and "", with 1 for open sizes."""
        return {
            each.name: np.full([max(size, 1) for size in each.shape], "" if each.datatype == "BYTES" else 0, dtype)
            for each, dtype in zip(self.tensors, self._dtypes.values(), strict=True)
        }

    def explain(self, inputs: Mapping[str, Array]) -> str:
        """Return "": mlflow names the tensor."""
        return ""


def _tensors(context: LoadContext, schema: Any) -> Table:
    for spec in schema.inputs:
        if np.dtype(spec.type).kind not in "OUS" and datatype_of(np.dtype(spec.type)) is None:
            shown = f"{spec.name or 'input'} of type {spec.type}"
            raise context.error(f"its signature has the tensor {shown}; write a class that loads it with mlflow")
    tensors = _tensor_signatures(schema)
    dtypes = {each.name: np.dtype(spec.type) for each, spec in zip(tensors, schema.inputs, strict=True)}
    return _Tensors(tensors, dtypes, all(spec.name is not None for spec in schema.inputs))


def _tensor_signatures(schema: Any, otherwise: str = "input") -> tuple[TensorSignature, ...]:
    return tuple(
        TensorSignature(
            str(spec.name if spec.name is not None else otherwise),
            datatype_of(np.dtype(spec.type)) or "BYTES",
            tuple(spec.shape),
        )
        for spec in schema.inputs
    )


def _declared(schema: Any) -> tuple[TensorSignature, ...]:
    """Return the outputs of a schema; () without one, or with types that are no tensors."""
    if schema is None:
        return ()
    if schema.is_tensor_spec():
        return _tensor_signatures(schema, PREDICTION)
    kinds = [getattr(column.type, "name", "") for column in schema.inputs]
    if not all(kind in DATATYPES for kind in kinds):
        return ()
    return tuple(
        TensorSignature(str(column.name if column.name is not None else PREDICTION), DATATYPES[kind], (-1,))
        for column, kind in zip(schema.inputs, kinds, strict=True)
    )
