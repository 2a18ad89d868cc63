"""Import the user's file, a `.py` module or a `.pickle`; hints for modules that are not installed.

This is the only module that unpickles. The file is code that the user has deployed, and it runs in replicas only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from cortex.errors import UserError, with_article

_FALLBACK_PREFIX = "cortex_user_"


def import_user_file(project: Path, path: str, python_path: str | None) -> ModuleType:
    """Import `path` of the project, with the project and `python_path` on `sys.path`, in this order.

    The module gets the name under which the user's other files import it, so that it is imported once, relative imports
    work, and pickles of its classes load. Exceptions of the user's code propagate.
    """
    roots = [project, *([project / python_path] if python_path else [])]
    roots = [root.resolve() for root in roots]
    wanted = [str(root) for root in roots]
    sys.path[:] = wanted + [entry for entry in sys.path if entry not in wanted]
    importlib.invalidate_caches()
    file = (project / path).resolve()
    if not file.is_file():
        raise UserError(f"{path}: file does not exist in the project")
    if file.suffix == ".pickle":
        return _unpickle(file)
    for name in _module_names(file, roots):
        if _resolves_to(name, file):
            return importlib.import_module(name)
    return _import_alone(_FALLBACK_PREFIX + re.sub(r"\W", "_", file.stem), file)


def _module_names(file: Path, roots: list[Path]) -> list[str]:
    """Return the module names under which `sys.path` may find the file, the shortest (deepest root) first."""
    names = []
    for root in reversed(roots):
        if file.suffix == ".py" and file.is_relative_to(root):
            parts = file.relative_to(root).with_suffix("").parts
            if all(part.isidentifier() for part in parts):
                names.append(".".join(parts))
    return names


def _resolves_to(name: str, file: Path) -> bool:
    """Return whether `import name` finds this file: an installed or imported module may have the same name."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and name.startswith(
            exc.name
        ):  # a parent package is another module without this submodule
            return False
        raise  # a module that the user's package imports is missing
    except ValueError:  # a loaded module without a spec, such as __main__, has this name
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _import_alone(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file.name}: is not a Python file; name it .py or .pickle")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look up the module by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _unpickle(file: Path) -> ModuleType:
    """Load a dill pickle of a class or of a dictionary of functions."""
    try:
        import dill  # noqa: PLC0415 - an optional dependency
    except ModuleNotFoundError as exc:
        raise UserError(f"{file.name}: reading a .pickle needs dill; add dill to requirements.txt") from exc
    with file.open("rb") as stream:
        content: Any = dill.load(stream)  # noqa: S301 - code of the user, like a .py file
    module = ModuleType(_FALLBACK_PREFIX + re.sub(r"\W", "_", file.stem))
    if isinstance(content, dict) and all(isinstance(key, str) for key in content):
        vars(module).update(content)
    elif inspect.isclass(content):
        setattr(module, content.__name__, content)
    else:
        raise UserError(
            f"{file.name}: must hold a class or a dictionary of functions, not {with_article(type(content).__name__)}"
        )
    return module


#: Module → package, where their names differ.
_PACKAGES = {
    "Bio": "biopython",
    "Crypto": "pycryptodome",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyOpenSSL",
    "PIL": "Pillow",
    "absl": "absl-py",
    "attr": "attrs",
    "botocore": "boto3",
    "bs4": "beautifulsoup4",
    "cairo": "pycairo",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "PyMuPDF",
    "git": "GitPython",
    "github": "PyGithub",
    "google.cloud.bigquery": "google-cloud-bigquery",
    "google.cloud.storage": "google-cloud-storage",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "igraph": "python-igraph",
    "imblearn": "imbalanced-learn",
    "jose": "python-jose",
    "jwt": "PyJWT",
    "magic": "python-magic",
    "OpenGL": "PyOpenGL",
    "paho": "paho-mqtt",
    "pkg_resources": "setuptools<81",
    "psycopg2": "psycopg2-binary",
    "pythoncom": "pywin32",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "slugify": "python-slugify",
    "snowflake": "snowflake-connector-python",
    "socks": "PySocks",
    "tensorflow_serving": "tensorflow-serving-api",
    "umap": "umap-learn",
    "usb": "pyusb",
    "whisper": "openai-whisper",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}

#: Module → extra of cortex-serving that installs it in compatible versions.
_EXTRAS = {
    "torch": "torch",
    "torchvision": "torch",
    "tensorflow": "tensorflow",
    "tensorflow_hub": "tensorflow",
    "tensorflow_serving": "tensorflow",
    "keras": "tensorflow",
    "xgboost": "xgboost",
    "onnxruntime": "onnx",
    **dict.fromkeys(
        (
            "PIL",
            "boto3",
            "botocore",
            "cloudpickle",
            "cv2",
            "dill",
            "joblib",
            "msgpack",
            "nltk",
            "np_utils",
            "numpy",
            "pandas",
            "requests",
            "scipy",
            "six",
            "skimage",
            "sklearn",
            "statsmodels",
            "sympy",
        ),
        "predictors",
    ),
}
#: The smaller build, without CUDA.
_ALTERNATIVES = {"tensorflow": "tensorflow-cpu"}


def suggest_requirement(module: str) -> str:
    """Return a one-line hint on how to install `module`, which may be dotted."""
    top = module.partition(".")[0]
    package = _PACKAGES.get(module) or _package_of_prefix(module) or _ALTERNATIVES.get(top) or top.replace("_", "-")
    hint = f"add {package} to requirements.txt"
    if extra := _EXTRAS.get(top):
        hint += f", or install cortex-serving[{extra}] for all APIs"
    return hint


def suggest_import(module: str) -> str:
    """Return a one-line hint on a module that the user's code imports: it may be a file that the project lacks."""
    hint = suggest_requirement(module)
    if module.partition(".")[0] in _EXTRAS or _package_of_prefix(module):
        return hint
    return f"{hint}, or {module.replace('.', '/')}.py to the project"


def _package_of_prefix(module: str) -> str | None:
    while module:
        if module in _PACKAGES:
            return _PACKAGES[module]
        module = module.rpartition(".")[0]
    return None
