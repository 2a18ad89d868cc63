"""What a replica is told and what it tells: plain data that crosses processes as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cortex.lifecycle import DeathCause, ProcessState
from cortex.models.spec import ModelSource, Problem


@dataclass(frozen=True)
class Limits:
    """What a replica enforces on requests; a change of it reaches running replicas and restarts nothing."""

    timeout_s: float
    max_body_bytes: int


@dataclass(frozen=True)
class ReplicaSpec:
    """Everything that a supervisor needs to run one replica; nothing is looked up elsewhere."""

    id: str  #: `<api>-<8 hex of the revision>-<6 random hex>`, unique for ever
    api: str
    revision: str  #: hash of all that, when changed, needs new processes
    interface: str  #: key of `predictor.interface.GENERATIONS`: "functions", "predictor" or "handler"
    project_dir: str  #: the unpacked project; the process's working directory
    path: str  #: the user's file, relative to `project_dir`
    python: str  #: interpreter of the project's environment
    run_dir: str  #: this replica's folder under `run/replicas`: spec.json, supervisor.json
    sockets: tuple[str, ...]  #: unix socket path of each process; its length is the number of processes
    control_socket: str  #: unix socket on which the supervisor answers the engine
    log_path: str
    python_path: str | None = None  #: relative to `project_dir`
    config: dict[str, Any] = field(default_factory=dict)
    model_path: str | None = None  #: local path handed to `init(model_path, …)`
    env: dict[str, str] = field(default_factory=dict)  #: `env:` and `.env`, already merged
    threads: int = 1
    max_concurrency: int = 1024  #: calls that one process may hold at once when the user's methods are `async def`
    timeout_s: float = 60.0
    max_body_bytes: int = 100 * 1024 * 1024
    mem_limit_bytes: int | None = None
    log_level: str = "info"
    type: str = "python"  #: "python", "tensorflow" or "onnx"
    models: ModelSource | None = None  #: None: the API has no models that we load
    model_agent_socket: str | None = None  #: of this machine's model agent; None where another server loads `models`
    tensorflow_serving: str | None = None  #: `host:port` of a server, "local" to start one, None to choose
    gpu: int = 0  #: GPUs that this replica wants for itself
    gpu_ids: tuple[str, ...] = ()  #: those that the engine gave it
    inf: int = 0  #: Inferentia chips that this replica wants for itself
    inf_ids: tuple[int, ...] = ()  #: those that the engine gave it, by the numbers of their devices

    @property
    def limits(self) -> Limits:
        """What can be changed while the replica runs."""
        return Limits(self.timeout_s, self.max_body_bytes)

    def with_limits(self, limits: Limits) -> ReplicaSpec:
        """Return a copy with other limits."""
        return replace(self, timeout_s=limits.timeout_s, max_body_bytes=limits.max_body_bytes)

    def to_json(self) -> str:
        """Return one JSON object; `from_json` is its inverse."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ReplicaSpec:
        """Read what `to_json` wrote; unknown keys of a newer version are ignored."""
        data = json.loads(text)
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        models = data.get("models")
        return cls(
            **{
                **known,
                "sockets": tuple(data["sockets"]),
                "gpu_ids": tuple(data.get("gpu_ids", ())),
                "inf_ids": tuple(data.get("inf_ids", ())),
                "models": ModelSource.from_data(models) if models else None,
            }
        )

    @classmethod
    def read(cls, path: Path) -> ReplicaSpec:
        """Read a spec file."""
        return cls.from_json(path.read_text())


@dataclass(frozen=True)
class Failure:
    """Why a process could not become ready: the user's exception, or ours."""

    message: str  #: one line, `ValueError: bad weights`
    traceback: str = ""  #: the user's frames


@dataclass(frozen=True)
class Death:
    """How a process of the user's code ended."""

    cause: DeathCause
    message: str  #: the words for callers: `out of memory`, `exited with code 3`, `killed (SIGKILL)`
    at: float  #: UNIX time, seconds


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a replica."""

    index: int
    socket: str
    state: ProcessState
    pid: int | None = None
    restarts: int = 0  #: deaths since the supervisor started
    failed_starts: int = 0  #: starts in a row that did not become ready
    lent: int = 0  #: connections held by slow clients only: no call of theirs runs, so the gateway may send others
    death: Death | None = None  #: the last one
    failure: Failure | None = None  #: of the last start, if it did not become ready


@dataclass(frozen=True)
class ServedVersion:
    """One version of a model as a replica knows it."""

    model: str
    version: str
    digest: str
    modified_at: float  #: UNIX time, seconds
    is_latest: bool
    is_loaded: bool  #: False: loaded when it is first asked for


@dataclass(frozen=True)
class ModelsStatus:
    """The models of one replica: those its processes serve, and why others are not served."""

    versions: tuple[ServedVersion, ...] = ()  #: sorted by model and version; the first few hundred
    version_count: int = 0  #: how many there are
    problems: tuple[Problem, ...] = ()  #: the first few
    is_loading: bool = False  #: other versions are being loaded beside those


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica as its supervisor reports it."""

    id: str
    api: str
    revision: str
    supervisor_pid: int
    started_at: float  #: UNIX time, seconds
    processes: tuple[ProcessStatus, ...]
    slots: int = 1  #: calls that each process runs at once: threads, or more for async methods (known once ready)
    models: ModelsStatus | None = None

    @property
    def is_ready(self) -> bool:
        """Tell whether every process answers requests."""
        return all(process.state is ProcessState.READY for process in self.processes)

    def to_json(self) -> str:
        """Return one line of JSON; `from_json` is its inverse."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ReplicaStatus:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        processes = tuple(_process(item) for item in data["processes"])
        models = data.get("models")
        return cls(**{**data, "processes": processes, "models": _models(models) if models else None})

    def describe_processes(self) -> list[dict[str, Any]]:
        """Return one JSON object per process, as `cortex status` shows them."""
        return [
            {
                "api": self.api,
                "id": self.id,
                "pid": process.pid,
                "process": process.index,
                "state": process.state.value,
                "revision": self.revision,
                "supervisor_pid": self.supervisor_pid,
                "restarts": process.restarts,
                "last_death": asdict(process.death) if process.death else None,
            }
            for process in self.processes
        ]


def _process(data: dict[str, Any]) -> ProcessStatus:
    death, failure = data["death"], data["failure"]
    return ProcessStatus(
        **{
            **data,
            "state": ProcessState(data["state"]),
            "death": Death(**{**death, "cause": DeathCause(death["cause"])}) if death else None,
            "failure": Failure(**failure) if failure else None,
        }
    )


def _models(data: dict[str, Any]) -> ModelsStatus:
    versions = tuple(ServedVersion(**item) for item in data["versions"])
    return ModelsStatus(**{**data, "versions": versions, "problems": tuple(Problem(**i) for i in data["problems"])})
