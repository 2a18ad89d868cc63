"""What a replica is told and what it tells: plain data that crosses processes as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cortex.lifecycle import ApiKind, DeathCause, ProcessState
from cortex.models.spec import HOME_PATH, ModelProblem, ModelSource

#: For so long a worker takes requests once its supervisor is dead. The route is gone much sooner, if an operator runs.
ORPHAN_SERVES_S = 3.0
_EXIT_HOOKS_S = 2.0
#: Seconds after which the kernel ends such a worker if it did not even come to notice that; see `replica.orphan`.
ORPHAN_UNTENDED_S = 64


@dataclass(frozen=True)
class Limits:
    """What a replica enforces on requests; a change of it reaches running replicas and restarts nothing."""

    timeout_s: float
    max_body_bytes: int


@dataclass(frozen=True)
class Setup:
    """What has to be there before a replica can start, where whoever starts it has to see to that."""

    project_hash: str
    pip: str  #: files of the project that say what to install; any of them may not be there
    conda: str
    shell: str
    env: dict[str, str]  #: the configuration's variables, without those of `.env`
    model: str | None = None  #: a path in the project, or a location in a store, for `init(model_path, …)`


@dataclass(frozen=True)
class ReplicaSpec:
    """Everything that a supervisor needs to run one replica; nothing is looked up elsewhere."""

    id: str  #: `<api>-<8 hex of the revision>-<6 random hex>`, unique for ever
    api: str
    revision: str  #: hash of all that, when changed, needs new processes
    interface: str  #: key of `predictor.interface.GENERATIONS`: "functions", "predictor" or "handler"
    project_dir: str = field(metadata=HOME_PATH)  #: the unpacked project; the process's working directory
    path: str  #: the user's file, relative to `project_dir`
    python: str = field(metadata=HOME_PATH)  #: interpreter of the project's environment
    run_dir: str = field(metadata=HOME_PATH)  #: this replica's folder under `run/replicas`: spec.json, supervisor.json
    sockets: tuple[str, ...] = field(metadata=HOME_PATH)  #: unix socket path of each process
    control_socket: str = field(metadata=HOME_PATH)  #: unix socket on which the supervisor answers the engine
    log_path: str = field(metadata=HOME_PATH)
    python_path: str | None = None  #: relative to `project_dir`
    config: dict[str, Any] = field(default_factory=dict)
    model_path: str | None = field(default=None, metadata=HOME_PATH)  #: local path handed to `init(model_path, …)`
    env: dict[str, str] = field(default_factory=dict)  #: `env:` and `.env`, already merged
    threads: int = 1
    max_concurrency: int = 1024  #: calls that one process may hold at once when the user's methods are `async def`
    timeout_s: float = 60.0
    max_body_bytes: int = 100 * 1024 * 1024
    mem_limit_bytes: int | None = None
    log_level: str = "info"
    type: str = "python"  #: "python", "tensorflow" or "onnx"
    models: ModelSource | None = None  #: None: the API has no models that we load
    model_agent_socket: str | None = field(default=None, metadata=HOME_PATH)  #: None: another server loads `models`
    tensorflow_serving: str | None = None  #: `host:port` of a server, "local" to start one, None to choose
    cpu: float = 0.0  #: cores that were asked for; nothing holds it to them
    mem_bytes: int = 0  #: memory that was asked for; `mem_limit_bytes` is the limit
    gpu: int = 0  #: GPUs that this replica wants for itself
    gpu_ids: tuple[str, ...] = ()  #: those that the engine gave it
    inf: int = 0  #: Inferentia chips that this replica wants for itself
    inf_ids: tuple[int, ...] = ()  #: those that the engine gave it, by the numbers of their devices
    kind: str = ApiKind.REALTIME.value
    jobs_socket: str | None = field(default=None, metadata=HOME_PATH)  #: of the operator; set: a job worker
    jobs_token: str = ""  #: what this worker shows there
    metrics_dir: str = field(default="", metadata=HOME_PATH)  #: counters of its processes; empty: none
    max_batch_size: int = 0  #: requests that one call may be given at once; 0: each is a call of its own
    batch_interval_s: float = 0.0  #: how long a batch may wait for others while it could be called
    isolates_failures: bool = True  #: a batch that fails is bisected
    tracker_key: str | None = None
    tracker_type: str | None = None  #: "classification" or "regression"; None: predictions are not tracked
    readiness: str | None = None  #: a JSON file of the project that each process must answer before it is ready
    listen_host: str = ""  #: address at which its processes listen over TCP too, ports as they are free; "": at none
    gateway_secret: str = field(default="", repr=False)  #: what each TCP connection shows first; "": nothing
    node_groups: tuple[str, ...] = ()  #: where a cluster may run it; empty: anywhere
    setup: Setup | None = None  #: None: all that this spec names is there

    @property
    def is_job_worker(self) -> bool:
        """Tell whether it works for jobs, which come and go, and not for its API as long as that is there."""
        return self.jobs_socket is not None and self.kind != ApiKind.ASYNC

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
        models, setup = data.get("models"), data.get("setup")
        return cls(
            **{
                **known,
                "setup": Setup(**setup) if setup else None,
                "sockets": tuple(data["sockets"]),
                "node_groups": tuple(data.get("node_groups", ())),
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
    pid: int = 0
    inside: str = ""  #: the batch that it ran, `<job id>:<seq>` or `<job id>:hook`; empty: none
    after: str = ""  #: where none was inside, the batch that it ran last, in the same form


#: So many deaths are kept of each slot.
KEPT_DEATHS = 16


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a replica."""

    index: int
    socket: str  #: unix path, or `host:port` (`[host]:port` of IPv6); "" while a supervisor has yet to say its ports
    state: ProcessState
    pid: int | None = None
    restarts: int = 0  #: deaths since the supervisor started
    failed_starts: int = 0  #: starts in a row that did not become ready
    lent: int = 0  #: connections held by slow clients only: no call of theirs runs, so the gateway may send others
    death: Death | None = None  #: the last one
    failure: Failure | None = None  #: of the last start, if it did not become ready
    deaths: tuple[Death, ...] = ()  #: the last `KEPT_DEATHS` of a worker of jobs, failed starts too, oldest first
    near: str = ""  #: unix path on its own machine, where `socket` is `host:port`


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
    problems: tuple[ModelProblem, ...] = ()  #: the first few
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
    lack: str = ""  #: what a cluster is short of; while it says something, nothing of the replica runs
    node: str = ""  #: address of the machine of a cluster that it is on
    is_leaving: bool = False  #: its place is not its own any more: it serves until another one does

    @property
    def is_ready(self) -> bool:
        """Tell whether every process answers requests."""
        return all(process.state is ProcessState.READY for process in self.processes)

    def to_json(self) -> str:
        """Return one line of JSON; `from_json` is its inverse."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ReplicaStatus:
        """Read what `to_json` wrote; unknown keys of a newer version are ignored."""
        data = json.loads(text)
        processes = tuple(_process(item) for item in data["processes"])
        models = data.get("models")
        return cls(**{**_known(cls, data), "processes": processes, "models": _models(models) if models else None})

    def describe_processes(self) -> list[dict[str, Any]]:
        """Return one JSON object per process, as `cortex status` shows them."""
        return [
            {
                "api": self.api,
                "id": self.id,
                "node": self.node,
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


def orphan_limit_s(timeout_s: float) -> float:
    """Return how long a worker may outlive its supervisor at most, where calls may take `timeout_s`."""
    return ORPHAN_SERVES_S + timeout_s + _EXIT_HOOKS_S


def _known(kind: type[ReplicaStatus | ProcessStatus], data: dict[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in kind.__dataclass_fields__ if name in data}


def _process(data: dict[str, Any]) -> ProcessStatus:
    death, failure = data["death"], data["failure"]
    return ProcessStatus(
        **{
            **_known(ProcessStatus, data),
            "state": ProcessState(data["state"]),
            "death": _death(death) if death else None,
            "failure": Failure(**failure) if failure else None,
            "deaths": tuple(map(_death, data.get("deaths", ()))),
        }
    )


def _death(data: dict[str, Any]) -> Death:
    return Death(**{**data, "cause": DeathCause(data["cause"])})


def _models(data: dict[str, Any]) -> ModelsStatus:
    versions = tuple(ServedVersion(**item) for item in data["versions"])
    return ModelsStatus(
        **{**data, "versions": versions, "problems": tuple(ModelProblem(**i) for i in data["problems"])}
    )
