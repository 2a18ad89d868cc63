"""The service of a project's `.proto` file, as protoc understands it."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uv

from cortex.errors import ConfigError, Diagnostic, InputError
from cortex.projects.project import ProjectFiles

#: The package that has protoc.
TOOLS = "grpcio-tools"
_TIMEOUT_S = 120.0  #: with a download of protoc
_PROBLEM = re.compile(r"(?P<file>[^:\n]+\.proto):(?:(?P<line>\d+):(?P<column>\d+):)? (?P<message>.+)")
_FIX = "correct the definition"


@dataclass(frozen=True)
class Rpc:
    """One method of a gRPC service."""

    name: str
    request_streams: bool
    response_streams: bool
    line: int
    column: int


@dataclass(frozen=True)
class Service:
    """One gRPC service."""

    name: str
    rpcs: tuple[Rpc, ...]
    line: int
    column: int


@dataclass(frozen=True)
class ProtobufFile:
    """The package and the services of a `.proto` file."""

    package: str
    services: tuple[Service, ...]


def read_protobuf_file(project: ProjectFiles, name: str) -> ProtobufFile:
    """Compile a `.proto` file of a project, and its imports.

    Raises: ConfigError with the errors of protoc; InputError if protoc can't be run.
    """
    texts = [(file, (project.root / file).read_bytes()) for file in project.files if file.endswith(".proto")]
    return _compile(str(project.root), name, tuple(texts))


def has_tools() -> bool:
    """Return whether this interpreter has protoc, without importing it."""
    return importlib.util.find_spec("grpc_tools") is not None


@functools.lru_cache(maxsize=64)
def _compile(root: str, name: str, texts: tuple[tuple[str, bytes], ...]) -> ProtobufFile:
    """Run protoc, at most once while the `texts` of the project's definitions are the same."""
    script = str(Path(__file__).with_name("protobuf_description.py"))
    python = [sys.executable] if has_tools() else [uv.find_uv_bin(), "run", "--no-project", "--with", TOOLS, "python"]
    command = [*python, "-I", script, name]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unavailable(name, str(error)) from error
    if done.returncode == 0:
        return _parse(json.loads(done.stdout))
    problems = [_diagnostic(found) for found in _PROBLEM.finditer(done.stderr)]
    if not problems:
        raise _unavailable(name, done.stderr.strip().rpartition("\n")[2])
    # A file that can't be imported is reported where it is imported, too.
    raise ConfigError([problem for problem in dict.fromkeys(problems) if problem.line] or problems)


def _unavailable(name: str, reason: str) -> InputError:
    return InputError(f'{name} can\'t be compiled: {reason}; install protoc: pip install "cortex-serving[grpc]"')


def _diagnostic(found: re.Match[str]) -> Diagnostic:
    message = found["message"].rstrip().removesuffix(".")
    return Diagnostic(found["file"], int(found["line"] or 0), int(found["column"] or 0), "", message, _FIX)


def _parse(data: dict[str, Any]) -> ProtobufFile:
    services = (
        Service(each["name"], tuple(Rpc(**rpc) for rpc in each["rpcs"]), each["line"], each["column"])
        for each in data["services"]
    )
    return ProtobufFile(data["package"], tuple(services))
