"""Specification and status of a replica: plain data that crosses processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cortex.lifecycle import ApiKind, DeathCause, ProcessState
from cortex.models.spec import HOME_PATH, ModelProblem, ModelSource
from cortex.processes.codec import NEWER, decode, encode

#: Set in processes of `cortex dev`, whose tracebacks appear in its terminal.
DEV_VARIABLE = "CORTEX_DEV"
TERMINAL_HINT = "; the terminal shows the traceback"
#: Set while `cortex.testing` runs an API, whose tracebacks are the output of the test.
TEST_VARIABLE = "CORTEX_TEST"
#: The reason that callers get whose calls took longer than the time that their process had when it was stopped.
STOPPED_IN_CALL = "stopped before the call was finished"
#: Files in the folder of an environment: it was built; all its packages were compiled.
ENVIRONMENT_COMPLETE, ENVIRONMENT_COMPILED = "complete.json", "compiled"


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of each request; changes apply to running replicas without a restart."""

    timeout_s: float
    max_body_bytes: int
    on_disconnect: str  #: "finish", "cancel" or "kill" a call whose client disconnects
    websocket_idle_s: float  #: without a message, until a WebSocket is closed

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> RequestLimits:
        """Parse the fields in a message; unknown keys are ignored. Raises: ValueError."""
        return decode(cls, {**_OLDER_LIMITS, **data})


#: Limits that messages and specs of older versions may lack.
_OLDER_LIMITS: dict[str, Any] = {"on_disconnect": "cancel", "websocket_idle_s": 3600.0}


@dataclass(frozen=True)
class Setup:
    """Preparations of the node before a replica starts: the project, its environment, its model."""

    project_hash: str
    pip: str  #: project files that define the environment; each of them is optional
    conda: str
    shell: str
    env: dict[str, str]  #: variables of the configuration, without those of `.env`
    model: str | None = None  #: a path in the project, or a location in a store, for `init(model_path, …)`
    #: As in `config.schema.Dependencies`.
    model_packages: dict[str, str] = field(default_factory=dict, metadata=NEWER)


@dataclass(frozen=True)
class ReplicaSpec(RequestLimits):
    """Everything that a supervisor needs to run one replica."""

    id: str  #: `<api>-<8 hex of the revision>-<6 random hex>`, never reused
    api: str
    revision: str  #: hash of everything that requires new processes when it changes
    interface: str  #: key of `predictor.interface.GENERATIONS`: "functions", "predictor" or "handler"
    project_dir: str = field(metadata=HOME_PATH)  #: the unpacked project; the process's working directory
    path: str  #: the user's file, relative to `project_dir`; "": a built-in class serves the models
    python: str = field(metadata=HOME_PATH)  #: interpreter of the project's environment
    run_dir: str = field(metadata=HOME_PATH)  #: this replica's folder under `run/replicas`: spec.json, supervisor.json
    sockets: tuple[str, ...] = field(metadata=HOME_PATH)  #: unix socket path of each process
    control_socket: str = field(metadata=HOME_PATH)  #: unix socket on which the supervisor answers the engine
    log_path: str = field(metadata=HOME_PATH)
    python_path: str | None = None  #: relative to `project_dir`
    config: dict[str, Any] = field(default_factory=dict)
    api_spec: dict[str, Any] = field(default_factory=dict)  #: for classes that declare it; empty in older specs
    model_path: str | None = field(default=None, metadata=HOME_PATH)  #: local path passed to `init(model_path, …)`
    env: dict[str, str] = field(default_factory=dict)  #: `env:` and `.env`, already merged
    threads: int = 1
    max_concurrency: int = 1024  #: concurrent calls of a process whose methods are `async def`
    mem_limit_bytes: int | None = None
    log_level: str = "info"
    type: str = "python"  #: "python", "tensorflow", "onnx", "model", "asgi", "wsgi" or "command"
    app: str | None = None  #: of an application: its name in the module, or of its factory; None: `Handler.app`
    protobuf_path: str | None = None  #: of a gRPC API: the definition of its service, relative to `project_dir`
    models: ModelSource | None = None  #: None: the API has no models that cortex loads
    trusts_pickle: bool = False  #: pickles among `models` may be loaded, which runs their code
    model_agent_socket: str | None = field(default=None, metadata=HOME_PATH)  #: None: another server loads `models`
    #: `host:port` of a server, "local" to start one, None to decide automatically
    tensorflow_serving: str | None = None
    cpu: float = 0.0  #: requested cores; not enforced
    mem_bytes: int = 0  #: requested memory; `mem_limit_bytes` is the enforced limit
    gpu: int = 0  #: requested GPUs, for exclusive use
    gpu_ids: tuple[str, ...] = ()  #: GPUs assigned by the engine
    inf: int = 0  #: requested Inferentia chips, for exclusive use
    inf_ids: tuple[int, ...] = ()  #: chips assigned by the engine, by device number
    kind: str = ApiKind.REALTIME.value
    jobs_socket: str | None = field(default=None, metadata=HOME_PATH)  #: of the operator; set: a job worker
    jobs_token: str = ""  #: authenticates the job worker to the operator
    metrics_dir: str = field(default="", metadata=HOME_PATH)  #: counters of its processes; empty: none
    max_batch_size: int = 0  #: requests per call; 0: no batching
    batch_interval_s: float = 0.0  #: how long a batch waits for further requests while a thread is free
    isolates_failures: bool = True  #: bisect batches whose calls raise
    tracker_key: str | None = None
    tracker_type: str | None = None  #: "classification" or "regression"; None: no prediction tracking
    #: JSON file of the project: a sample request that each process must answer before it is ready
    readiness: str | None = None
    listen_host: str = ""  #: address at which its processes also listen over TCP, on free ports; "": no TCP
    #: authenticates TCP connections of the gateway; "": no authentication
    gateway_secret: str = field(default="", repr=False)
    node_groups: tuple[str, ...] = ()  #: allowed node groups of a cluster; empty: any
    setup: Setup | None = None  #: None: everything is prepared already
    command: tuple[str, ...] = ()  #: of `type: command`: the program and its arguments
    endpoint: str = ""  #: of `type: command`: the path prefix of the API
    strip_prefix: bool = True  #: of `type: command`: the server gets paths without `endpoint`
    start_timeout_s: float = 600.0  #: of `type: command`: time until the server is ready
    preload: bool = False  #: the class is constructed in a fork server, from which the processes are forked
    record_share: float = 0.0  #: part of the requests that are recorded; 0: none
    record_max_cpu: float = 1.0  #: part of a core that recording uses at most, per process; 1: no limit
    record_max_bytes: int = 0  #: of the recording
    record_redact: tuple[str, ...] = ()  #: as in `config.schema.RecordConfig`
    record_to: str = field(default="", metadata=HOME_PATH)  #: folder or URL
    pin_processes: bool = False  #: each process runs only on processors of its own
    working_copies: str = ""  #: strategy of `worker.working_copy`; "": the supervisor chooses it
    version: str = ""  #: of the cortex that runs the replica, set by the engine; "": from before it was stated
    environment: str = ""  #: prefix of the Python environment with that cortex, which a project's is a layer on

    @property
    def is_job_worker(self) -> bool:
        """Return whether the replica exists for a job, and not for as long as its API exists."""
        return self.jobs_socket is not None and self.kind != ApiKind.ASYNC

    @property
    def batches_calls(self) -> bool:
        """Return whether one call of the method gets several requests, and not one run of a model below it."""
        return self.max_batch_size > 0 and (self.type == "python" or not self.path)

    @property
    def command_sockets(self) -> tuple[str, ...]:
        """Return the unix socket at which the command of each process may listen."""
        return tuple(f"{path}s" for path in self.sockets) if self.command else ()

    @property
    def limits(self) -> RequestLimits:
        """Return the fields that can change while the replica runs."""
        return RequestLimits(**{name: getattr(self, name) for name in RequestLimits.__dataclass_fields__})

    def with_limits(self, limits: RequestLimits) -> ReplicaSpec:
        """Return a copy with other limits."""
        return replace(self, **asdict(limits))

    def to_json(self) -> str:
        """Return one JSON object; `from_json` is its inverse."""
        return json.dumps(encode(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ReplicaSpec:
        """Parse the result of `to_json`; unknown keys, of a newer version, are ignored. Raises: ValueError."""
        return decode(cls, {**_OLDER_LIMITS, **json.loads(text)})

    @classmethod
    def read(cls, path: Path) -> ReplicaSpec:
        """Read a spec file."""
        return cls.from_json(path.read_text())


@dataclass(frozen=True)
class StartFailure:
    """Reason why a process did not become ready."""

    message: str  #: one line, `ValueError: bad weights`
    traceback: str = ""  #: the user's frames
    was_killed: bool = False  #: something killed it: the next start may succeed
    summary: str = ""  #: the message without text of user code, paths and addresses; "": no more than that it failed

    def for_callers(self, api: str) -> str:
        """Return the reason that callers of `api` get: they must not see what its code prints, or where it runs."""
        if self.summary == self.message:
            return self.message
        return f"{self.summary or 'it does not start'}; `cortex get {api}` shows why"


@dataclass(frozen=True)
class Death:
    """Death of a worker process."""

    cause: DeathCause
    message: str  #: for callers: `out of memory`, `exited with code 3`, `killed (SIGKILL)`
    at: float  #: UNIX time, seconds
    pid: int = 0
    inside: str = ""  #: the batch that was running, `<job id>:<seq>` or `<job id>:hook`; empty: none
    after: str = ""  #: if none was running, the last batch, in the same form

    @property
    def is_kill(self) -> bool:
        """Return whether the process was killed, also for lack of memory, rather than failing by itself."""
        return self.cause in (DeathCause.KILLED, DeathCause.OUT_OF_MEMORY)


#: Number of deaths remembered per slot.
KEPT_DEATHS = 16


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a replica."""

    index: int
    socket: str  #: unix path, or `host:port` (`[host]:port` for IPv6); "" until the supervisor has reported its ports
    state: ProcessState
    pid: int | None = None
    restarts: int = 0  #: deaths of ready processes since the supervisor started
    failed_starts: int = 0  #: consecutive starts that did not become ready
    aborted_starts: int = 0  #: all deaths of processes that were not ready, since the supervisor started
    #: Connections that only slow clients occupy: no call runs on them, so the gateway may send other requests.
    lent: int = 0
    death: Death | None = None  #: the last death
    failure: StartFailure | None = None  #: of the last start, if it did not become ready
    waits_for: str = ""  #: why a process that starts is not ready yet, if that takes long and is known
    deaths: tuple[Death, ...] = ()  #: the last `KEPT_DEATHS` of a job worker, including failed starts, oldest first
    near: str = ""  #: unix path on its own node, if `socket` is `host:port`
    has_short_calls: bool = False  #: its calls take a few milliseconds at most: the gateway may send requests ahead


@dataclass(frozen=True)
class ServedVersion:
    """A version of a model that a replica serves."""

    model: str
    version: str
    digest: str
    modified_at: float  #: UNIX time, seconds
    is_latest: bool
    is_loaded: bool  #: False: loaded on first use


@dataclass(frozen=True)
class ModelsStatus:
    """The models of a replica: versions served, and problems of those that are not."""

    versions: tuple[ServedVersion, ...] = ()  #: sorted by model and version; the first few hundred
    version_count: int = 0  #: total number
    problems: tuple[ModelProblem, ...] = ()  #: the first few
    is_loading: bool = False  #: further versions are being loaded


@dataclass(frozen=True)
class ReplicaStatus:
    """Status of a replica, reported by its supervisor."""

    id: str
    api: str
    revision: str
    supervisor_pid: int
    started_at: float  #: UNIX time, seconds
    processes: tuple[ProcessStatus, ...]
    slots: int = 1  #: concurrent calls per process: threads, or more for async methods (known once ready)
    models: ModelsStatus | None = None
    lack: str = ""  #: resources that the cluster lacks; unless empty, no process of the replica runs
    node: str = ""  #: address of its node in a cluster
    is_leaving: bool = False  #: its reservation is lost: it serves until its replacement does
    is_unreserved: bool = False  #: its reservation is lost, and requested again
    signature: str = ""  #: `ApiSignature` as JSON; "": not known yet, or too long
    version: str = ""  #: as in the spec
    environment: str = ""

    @property
    def is_ready(self) -> bool:
        """Return whether every process is ready."""
        return all(process.state is ProcessState.READY for process in self.processes)

    def to_json(self) -> str:
        """Return one line of JSON; `from_json` is its inverse."""
        return json.dumps(encode(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ReplicaStatus:
        """Parse the result of `to_json`; unknown keys, of a newer version, are ignored. Raises: ValueError."""
        return decode(cls, json.loads(text))

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
                "version": self.version,
                "environment": self.environment,
                "restarts": process.restarts + process.aborted_starts,
                "last_death": asdict(process.death) if process.death else None,
            }
            for process in self.processes
        ]
