"""Read the folder of an MLflow model: its flavor, its requirements, and whether loading it runs code from it.

mlflow's pyfunc loader imports a module that the file `MLmodel` names, adds folders to `sys.path`, and unpickles. So a
folder needs trust, unless its flavor is one of a few whose data file can't hold code, and nothing else in it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cortex.errors import ModelFormatError
from cortex.models.formats.content import ModelContent, recognize
from cortex.models.formats.detection import Detection
from cortex.models.formats.requirements import ModelRequirement, required_by_file

_MAX_FILE_BYTES = 1024**2
#: Loader modules of mlflow that load a file of one format: the format, and the flavor's key of the file.
_DATA_FLAVORS = {
    "mlflow.sklearn": "skops",
    "mlflow.xgboost": "xgboost",
    "mlflow.lightgbm": "lightgbm",
    "mlflow.onnx": "onnx",
}
_MODEL_CLASSES = {"mlflow.xgboost": "xgboost.", "mlflow.lightgbm": "lightgbm."}


def read_mlflow(folder: Path) -> Detection:
    """Return the detection of a folder with a file `MLmodel`. Raises: ModelFormatError, OSError."""
    pyfunc, flavors = _pyfunc(folder)
    module = str(pyfunc.get("loader_module", ""))
    if not module:
        raise ModelFormatError(f"{folder / 'MLmodel'} names no loader_module; save the model again with mlflow")
    reason = f"{folder.name} is an MLflow model: it has the file MLmodel with the flavor python_function ({module})"
    return Detection("mlflow", str(folder), reason, _code(folder, module, pyfunc, flavors), _requirements(folder))


def _pyfunc(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flavor python_function and all flavors."""
    import yaml  # noqa: PLC0415 - only for MLflow

    file = folder / "MLmodel"
    try:
        document = yaml.safe_load(_read(file))
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ModelFormatError(f"{file} is not YAML; save the model again with mlflow") from None
    flavors = document.get("flavors") if isinstance(document, dict) else None
    pyfunc = flavors.get("python_function") if isinstance(flavors, dict) else None
    if not isinstance(flavors, dict) or not isinstance(pyfunc, dict):
        raise ModelFormatError(f"{file} has no flavor python_function, which serving needs; save the model with one")
    return pyfunc, flavors


def _code(folder: Path, module: str, pyfunc: dict[str, Any], flavors: dict[str, Any]) -> str:
    """Return why loading the folder runs code from it; "" if it does not."""
    wanted = _DATA_FLAVORS.get(module)
    if wanted is None:
        return f"mlflow imports {module} to load it, which may run code from the folder"
    if pyfunc.get("code"):
        return "mlflow adds its folder of code to the import path"
    flavor = flavors.get(module.removeprefix("mlflow."))
    model_class = flavor.get("model_class") if isinstance(flavor, dict) else None
    if model_class is not None and not str(model_class).startswith(_MODEL_CLASSES.get(module, " ")):
        return f"mlflow constructs its class {str(model_class)[:100]}"
    content = _data_content(folder, pyfunc)
    if content is None or content.format != wanted:
        found = content.description if content else "no file that cortex knows"
        return content.code if content and content.code else f"its data is {found}"
    return ""


def _data_content(folder: Path, pyfunc: dict[str, Any]) -> ModelContent | None:
    name = pyfunc.get("model_path") or pyfunc.get("data")
    path = (folder / str(name or "")).resolve()
    if not name or not path.is_relative_to(folder.resolve()):
        raise ModelFormatError(f"{folder / 'MLmodel'} refers to data outside of its folder ({name})")
    if path.is_dir():
        files = sorted(path.glob("*.onnx"))
        path = files[0] if len(files) == 1 else path / "model.onnx"
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
