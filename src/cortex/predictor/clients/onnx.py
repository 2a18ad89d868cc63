"""Load and run ONNX models: the sessions, and the `onnx_client` that users' constructors are given.

The only module that imports onnxruntime; it is imported for `type: onnx` alone. It must not know where models come
from: the registry asks it to load a folder.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import onnxruntime

from cortex.errors import ModelError
from cortex.models.loaded_models import ensure_call_scope
from cortex.models.loader import LoadRequest
from cortex.predictor.clients.onnx_inputs import Inputs
from cortex.predictor.clients.servable import named

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
#: Every session has threads of its own. So many for all models together, then one each: the caller's.
_MAX_THREADS = 64
#: An error's number and name, before what it says.
_PREFIX_PARTS = 3
_FATAL = 4
#: What ONNX Runtime says of a file of another kind, of one that is cut off, and of an empty one.
_NO_MODEL = {"Protobuf parsing failed", "No graph was found in the protobuf"}


class OnnxModel:
    """A model that is loaded."""

    def __init__(self, request: LoadRequest, session: onnxruntime.InferenceSession) -> None:
        self.request = request
        self.session = session
        self.inputs = Inputs(session.get_inputs(), session.get_overridable_initializers(), named(request))

    @property
    def input_signatures(self) -> dict[str, dict[str, Any]]:
        """Return shape and type of each input; sizes that are left open are names or None."""
        return {given.name: {"shape": given.declared_shape, "type": given.type} for given in self.inputs.all}

    def predict(self, model_input: Any) -> list[Any]:
        """Run the model; the outputs are as `session.run` returns them. Raises: ModelError."""
        feed = self.inputs.feed(model_input)
        try:
            return self.session.run(None, feed)  # type: ignore[no-any-return]
        except Exception as exc:  # only ONNX Runtime runs in there, and its errors have no class of their own
            raise ModelError(f"{named(self.request)} can't be run on this input: {_plain(exc)}") from exc

    def warm_up(self) -> None:
        """Run it once on zeros, so that the first request need not wait for what is prepared on first use."""
        zeros = {given.name: given.zeros() for given in self.inputs.all if given.is_required}
        if any(value is None for value in zeros.values()):
            return
        quiet = onnxruntime.RunOptions()
        quiet.log_severity_level = _FATAL
        with contextlib.suppress(Exception):  # what the model makes of zeros is its own affair: it may refuse them
            self.session.run(None, zeros, quiet)


class OnnxLoader:
    """Loads models for the registry."""

    def __init__(self, wants_gpu: bool, threads: int) -> None:
        self._options = _session_options(threads)
        self._providers = choose_providers(wants_gpu, onnxruntime.get_available_providers())
        if wants_gpu and _CUDA not in self._providers:
            _warn(
                "the installed onnxruntime has no CUDA: models run on the CPU; add onnxruntime-gpu to requirements.txt"
            )
        # Weakly: whoever else refers to a model is taken to be using it.
        self._loaded: WeakValueDictionary[int, OnnxModel] = WeakValueDictionary()
        self._turn = threading.Lock()

    def load(self, request: LoadRequest) -> OnnxModel:
        """Load and warm up the model in `request.path`. Raises: ModelError."""
        file = find_model_file(Path(request.path))
        try:
            session = onnxruntime.InferenceSession(str(file), self._options, providers=self._providers)
        except Exception as exc:  # as in predict
            raise ModelError(_unloadable(exc, file)) from exc
        if _CUDA in self._providers and _CUDA not in session.get_providers():
            _warn(f"{named(request)} runs on the CPU: CUDA could not be started, see the lines above")
        model = OnnxModel(request, session)
        model.warm_up()
        with self._turn:
            self._loaded[id(model)] = model
        return model

    def unload(self, model: OnnxModel) -> None:
        """Drop the session; its memory is free once nobody runs it any more."""
        with self._turn:
            self._loaded.pop(id(model), None)
        del model.session

    def loaded(self) -> list[OnnxModel]:
        """List what is loaded just now."""
        with self._turn:
            return list(self._loaded.values())


class Models(Protocol):
    """Where the client gets its models: the registry."""

    def get(self, name: str | None = None, version: str = "latest") -> OnnxModel: ...
    def describe(self) -> Mapping[str, Mapping[str, Any]]: ...


class OnnxClient:
    """Runs ONNX models; any thread may call it."""

    def __init__(self, models: Models, loader: OnnxLoader) -> None:
        self._models = models
        self._loader = loader

    def predict(self, model_input: Any, model_name: str | None = None, model_version: str = "latest") -> list[Any]:
        """Run a model on a dictionary from the names of its inputs to their values, or on its only input's value.

        Values are cast to the inputs' types and brought into their shapes where these are clear. Returns the outputs
        as `InferenceSession.run` does. Raises: ModelError.
        """
        with ensure_call_scope():
            return self._models.get(model_name, model_version).predict(model_input)

    def get_model(self, model_name: str | None = None, model_version: str = "latest") -> dict[str, Any]:
        """Return a model's `session`, its `signatures` as the session has them, and its `input_signatures`.

        Raises: ModelError.
        """
        model = self._models.get(model_name, model_version)
        return {
            "session": model.session,
            "signatures": model.session.get_inputs(),
            "input_signatures": model.input_signatures,
        }

    def describe(self) -> dict[str, Any]:
        """Return `model_metadata` for a GET: versions, timestamps, and the inputs of the newest that is loaded."""
        newest: dict[str, OnnxModel] = {}
        for model in sorted(self._loader.loaded(), key=lambda model: int(model.request.version)):
            newest[model.request.model] = model
        metadata: dict[str, Any] = {}
        for name, entry in self._models.describe().items():
            metadata[name] = {"versions": entry["versions"], "timestamps": entry["timestamps"]}
            if name in newest:
                metadata[name]["input_signatures"] = newest[name].input_signatures
        return metadata


def choose_providers(wants_gpu: bool, available: Sequence[str]) -> list[str]:
    """Return what a session runs on, the best first."""
    return [_CUDA, _CPU] if wants_gpu and _CUDA in available else [_CPU]


def choose_threads(processes: int, models: int) -> int:
    """Return how many threads one session uses: the user's OMP_NUM_THREADS, or a fair share of the processors."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    processors = len(os.sched_getaffinity(0))
    return max(1, min(processors // max(processes, 1), _MAX_THREADS // max(models, 1)))


def find_model_file(path: Path) -> Path:
    """Return the one `*.onnx` file in a folder. Raises: ModelError."""
    if path.is_file():
        return path
    files = sorted(file for file in path.rglob("*.onnx") if file.is_file())
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelError(f"there must be exactly one *.onnx file, but there are {len(files)}: {found}")
    return files[0]


def _session_options(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Threads that wait for work by spinning burn milliseconds of every processor after each short run.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _plain(exc: Exception) -> str:
    """Return the words of an error of ONNX Runtime: `[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : words`."""
    text = " ".join(str(exc).split())
    return text.split(" : ", _PREFIX_PARTS)[-1] if text.startswith("[ONNXRuntimeError]") else text


def _unloadable(exc: Exception, file: Path) -> str:
    """Return why a file can't be loaded: by the name that the user gave it, not where it was downloaded to."""
    said = _plain(exc)
    words = said.removeprefix(f"Load model from {file} failed:").strip().rstrip(".")
    fix = "; is it an ONNX file? export it again" if words in _NO_MODEL else ""
    return f"{file.name}: {words}{fix}"


def _warn(text: str) -> None:
    sys.stderr.write(f"onnx: {text}\n")
