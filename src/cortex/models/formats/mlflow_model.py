"""Read the folder of an MLflow model: its flavor, its requirements, and whether loading it runs code from it.

mlflow's pyfunc loader imports a module that the file `MLmodel` names, adds folders to `sys.path`, and unpickles. So a
folder needs trust, unless its flavor is one of a few whose data file can't hold code, and nothing else in it is used.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cortex.errors import ModelFormatError
from cortex.models.formats.content import ModelContent, recognize
from cortex.models.formats.requirements import ModelRequirement, required_by_file

_MAX_FILE_BYTES = 1024**2
#: More of them, in values of each other, could be gigabytes of text.
_MAX_ALIASES = 10
#: The parser's time grows with the square of the depth.
_MAX_DEPTH = 50
#: Keys of the data file, in the flavor python_function and in the others.
_DATA_KEYS = ("data", "model_path", "pickled_model")
#: Loader modules of mlflow that read one file, and the format that it must have.
_DATA_FLAVORS = {
    "mlflow.sklearn": "skops",
    "mlflow.xgboost": "xgboost",
    "mlflow.lightgbm": "lightgbm",
    "mlflow.onnx": "onnx",
}
#: Settings of these flavors → the values that make mlflow run nothing else; None: it is absent.
_SAFE_SETTINGS: dict[str, dict[str, re.Pattern[str]]] = {
    "mlflow.sklearn": {"serialization_format": re.compile("skops")},
    "mlflow.xgboost": {"model_class": re.compile(r"None|xgboost\.core\.Booster|xgboost\.sklearn\.XGB[A-Za-z]+")},
    "mlflow.lightgbm": {"model_class": re.compile(r"None|lightgbm\.basic\.Booster")},
    "mlflow.onnx": {
        "providers": re.compile(r"None|\[('(CPU|CUDA)ExecutionProvider'(, )?)*\]"),
        "onnx_session_options": re.compile("None"),
    },
}
#: Types of columns that have a JSON form, and their datatypes in the Open Inference Protocol.
DATATYPES = {
    "boolean": "BOOL",
    "integer": "INT32",
    "long": "INT64",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
    "binary": "BYTES",
    "datetime": "BYTES",
}


def read_mlflow(folder: Path) -> ModelContent:
    """Return the content of a folder with a file `MLmodel`. Raises: ModelFormatError, OSError."""
    pyfunc, flavors, signature = _pyfunc(folder)
    module = str(pyfunc.get("loader_module", ""))
    if not module:
        raise ModelFormatError(f"{folder / 'MLmodel'} names no loader_module; save the model again with mlflow")
    description = f"an MLflow model: it has the file MLmodel with the flavor python_function ({module})"
    code, needs_code = _code(folder, module, pyfunc, flavors), _why_code_is_needed(signature)
    return ModelContent("mlflow", description, code, _requirements(folder), needs_code=needs_code)


def _why_code_is_needed(signature: Any) -> str:
    """Return why no request without code around the model can call it; "" if one may."""
    try:
        columns = json.loads(signature["inputs"]) if signature else []
        types = [column["type"] for column in columns]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ""  # mlflow knows better
    if not columns:
        return "has no signature; save it with `signature=infer_signature(inputs, predictions)`"
    unknown = next((each for each in types if each != "tensor" and each not in DATATYPES), None)
    return (
        f"has a column of type {unknown} in its signature; write a class that loads it with mlflow" if unknown else ""
    )


def _pyfunc(folder: Path) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return the flavor python_function, all flavors, and the signature."""
    import yaml  # noqa: PLC0415 - only for MLflow

    file = folder / "MLmodel"
    try:
        text = _read(file)
        aliases = depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):  # the parser reads only as far as it is asked
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if aliases > _MAX_ALIASES or depth > _MAX_DEPTH:
                what = f"{_MAX_ALIASES} YAML aliases" if aliases > _MAX_ALIASES else f"{_MAX_DEPTH} nested values"
                raise ModelFormatError(f"{file} has more than {what}; save the model again with mlflow")
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ModelFormatError(f"{file} is not YAML; save the model again with mlflow") from None
    flavors = document.get("flavors") if isinstance(document, dict) else None
    pyfunc = flavors.get("python_function") if isinstance(flavors, dict) else None
    if not isinstance(flavors, dict) or not isinstance(pyfunc, dict):
        raise ModelFormatError(f"{file} has no flavor python_function, which serving needs; save the model with one")
    return pyfunc, flavors, document.get("signature")


def _code(folder: Path, module: str, pyfunc: dict[str, Any], flavors: dict[str, Any]) -> str:
    """Return why loading the folder runs code from it; "" if it does not."""
    wanted = _DATA_FLAVORS.get(module)
    if wanted is None:
        return f"mlflow imports {module[:100]} to load it, which may run code from the folder"
    if pyfunc.get("code"):
        return "mlflow adds its folder of code to the import path"
    flavor = flavors.get(module.removeprefix("mlflow."))
    settings = flavor if isinstance(flavor, dict) else {}
    for name, safe in _SAFE_SETTINGS[module].items():
        if not safe.fullmatch(str(settings.get(name))):
            return f"mlflow loads it with {name}: {str(settings.get(name))[:100]}"
    names = {str(given) for each in (pyfunc, settings) for key in _DATA_KEYS if (given := each.get(key))}
    if len(names) != 1 or "/" in (name := names.pop()):
        return "its data is not one file next to MLmodel"
    content = _content(folder, name)
    if content is None or content.format != wanted:
        return (content.code or f"its data is {content.description}") if content else "its data is in an unknown format"
    return ""


def _content(folder: Path, name: str) -> ModelContent | None:
    path = folder / name
    if not path.is_file():
        raise ModelFormatError(f"{folder / 'MLmodel'} refers to {name}, which is not there; copy the whole folder")
    try:
        return recognize(path)
    except ModelFormatError:
        return None


def _requirements(folder: Path) -> tuple[ModelRequirement, ...]:
    file = folder / "requirements.txt"
    return required_by_file(_read(file)) if file.is_file() else (ModelRequirement("mlflow", "mlflow"),)


def _read(file: Path) -> str:
    with file.open("rb") as stream:
        data = stream.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ModelFormatError(f"{file} is too large")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ModelFormatError(f"{file} is not text in UTF-8") from None
