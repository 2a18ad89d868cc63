"""The schema of an API: every field with its default and range, as frozen models of the current file form.

YAML, positions and older file forms are handled elsewhere: `conversion.py` converts a file to this form, and
`validate.py` turns the errors raised here into diagnostics. Units are in the names (`_s`, `_bytes`); CPU is in cores.
"""

from __future__ import annotations

import ipaddress
import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticKnownError

from cortex.config.values import (
    ACCEPTED,
    STORED,
    a_list,
    a_map,
    accepts,
    cores,
    cron_expression,
    dashed,
    duration_s,
    enum,
    env_name,
    env_value,
    integer,
    memory_bytes,
    number,
    percent_or_count,
    percentage,
    problem,
    quote,
    text,
    time_zone,
    true_or_false,
    wrong_type,
)
from cortex.lifecycle import ApiKind
from cortex.recording import json_path
from cortex.spelling import nearest


class ConfigModel(BaseModel):
    """Base model: frozen, without extra keys. Null in a field of `null_means_default` means that the key is absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    null_means_default: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.null_means_default}


@accepts(type="string", pattern=r"^(?![/~])(?!(.*/)?\.\.(/|$)).*\S")
def _project_path(value: object) -> str:
    path = text(value)
    if path.startswith(("/", "~")):
        raise problem(f"{quote(path)} must be relative to the project folder", "write a path inside the project folder")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise problem(f"{quote(path)} must be inside the project folder", "move it into the project folder")
    return "/".join(parts)


@accepts(type="string", pattern=r"^(?![/~])(?!(.*/)?\.\.(/|$)).*\S")
def folder_on_path(value: object) -> str:
    """Validate a folder of the project to add to the Python path."""
    path = _project_path(value)
    if not path:
        raise problem(f"{quote(value)} is the project folder, which is on the Python path already", "remove the key")
    return path + "/"


@accepts(**getattr(_project_path, ACCEPTED))
def _code_path(value: object, info: ValidationInfo) -> str | None:
    """Validate the user's file, which only Python code requires: models of other types can be served without code."""
    if value is not None:
        return _project_path(value)
    if needs_code(info.data.get("type", PYTHON)) and info.data.get("interface") not in REQUEST_HANDLERS:
        raise PydanticKnownError("missing")
    return None


Text = Annotated[str, BeforeValidator(text)]
Flag = Annotated[bool, BeforeValidator(true_or_false)]
Count = Annotated[int, BeforeValidator(integer(above=0))]
Fraction = Annotated[float, BeforeValidator(number(at_least=0, below=1))]
EnvName = Annotated[str, BeforeValidator(env_name)]
EnvValue = Annotated[str, BeforeValidator(env_value)]
ProjectPath = Annotated[str, BeforeValidator(_project_path)]


STORES = ("s3://", "gs://")
DEFAULT_MODEL = "_cortex_default"  #: internal name of the model given by `path`
LOCAL_SERVING = "local"  #: a TensorFlow Serving process that the replica starts
PYTHON = "python"  #: the handler type without models that cortex loads
ANY_MODEL = "model"  #: the handler type without code, which detects the format of its models
COMMAND = "command"  #: the handler type of a server of the user's own


@accepts(type="string", pattern=f"^(?!{DEFAULT_MODEL}$)[A-Za-z0-9_-]+$")
def _model_name(value: object) -> str:
    name = text(value)
    if name == DEFAULT_MODEL:
        raise problem(f"{quote(name)} is a reserved name", "rename the model")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        suggestion = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")
        raise problem(
            f"{quote(name)} must contain only letters, numbers, underscores, and dashes",
            f"write {quote(suggestion or 'my-model')}",
        )
    return name


_ALMOST_STORE = re.compile(r"(s3[an]?|gc?s)(?::/*|//)([^/].*)", re.IGNORECASE)
_STORE_OVER_HTTP = re.compile(
    r"https?://(?:(?P<bucket>[^./]+)\.)?"
    r"(?:s3[^/]*\.amazonaws\.com|(?P<google>storage\.(?:cloud\.)?google(?:apis)?\.com))/(?P<path>[^?#]+).*"
)


@accepts(type="string", pattern=r"^((s3|gs)://.*[^/]|(?!~)(?!.*://)(?!(.*/)?\.\.(/|$)).*\S)")
def _model_location(value: object) -> str:
    """Validate the location of a model; `rules/project_rules.py` checks that it exists."""
    location = text(value)
    if location.startswith(STORES):
        if not location.split("://", 1)[1].strip("/"):
            raise problem(f"{quote(location)} has no bucket name", f'write "{location[:5]}bucket/path"')
        return location
    if "://" in location or location.startswith("~") or _ALMOST_STORE.match(location):
        raise problem(
            f"{quote(location)} must be a path, or start with s3:// or gs://",
            f"write {quote(_as_store(location) or 's3://bucket/path')}",
        )
    if ".." in location.split("/"):
        fix = "move it into the project folder, or write an absolute path"
        raise problem(f'{quote(location)} must not contain ".."', fix)
    return location


def _as_store(url: str) -> str | None:
    """Suggest the s3:// or gs:// form of an object's HTTP address or of a misspelt URL."""
    if found := _ALMOST_STORE.match(url):
        return f"{'s3' if found[1].lower().startswith('s3') else 'gs'}://{found[2]}"
    found = _STORE_OVER_HTTP.fullmatch(url)
    if found is None:
        return None
    bucket = f"{found['bucket']}/" if found["bucket"] else ""
    return f"{'gs' if found['google'] else 's3'}://{bucket}{found['path']}"


@accepts(type="string", pattern=f"^({LOCAL_SERVING}|.+:[0-9]{{1,5}})$")
def serving_address(value: object) -> str:
    """Validate the address of a TensorFlow Serving server: host:port, or LOCAL_SERVING."""
    address = text(value)
    if address == LOCAL_SERVING:
        return address
    found = re.fullmatch(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", address)
    if found is None or not 0 < int(found[1]) < 65536:
        if address.lower() == LOCAL_SERVING:
            raise problem(f"{quote(address)} must be host:port, or {quote(LOCAL_SERVING)}", f'write "{LOCAL_SERVING}"')
        host = re.sub(r"^[a-z+]+://", "", address).split("/")[0].split(":")[0]
        raise problem(
            f"{quote(address)} must be host:port, or {quote(LOCAL_SERVING)}",
            f"write {quote(f'{host}:8500')}" if re.fullmatch(r"[A-Za-z0-9_.-]+", host) else 'write "localhost:8500"',
        )
    return address


ModelLocation = Annotated[str, BeforeValidator(_model_location)]


class ModelEntry(ConfigModel):
    """One entry of `models.paths`."""

    null_means_default = frozenset({"signature_key"})

    name: Annotated[str, BeforeValidator(_model_name)]
    path: ModelLocation
    signature_key: Text | None = None


@dataclass(frozen=True)
class PinnedModel:
    """The version of a model that counts as its latest one, whatever else the bucket has."""

    model: str
    number: str
    digest: str
    size_bytes: int
    modified_at: float


class ModelsConfig(ConfigModel):
    """The exported models of an API: exactly one of `path`, `paths` and `dir`, and the limits of the caches."""

    null_means_default = frozenset({"path", "paths", "dir", "cache_size", "disk_cache_size", "cache_memory", "trust"})

    path: ModelLocation | None = None
    paths: Annotated[list[ModelEntry], BeforeValidator(a_list)] | None = None
    dir: ModelLocation | None = None  #: each folder in it is a model
    signature_key: Text | None = None  #: default for models without their own
    poll_interval_s: Annotated[float, BeforeValidator(duration_s(at_least=1))] = 10.0
    cache_size: Count | None = None  #: model versions in memory
    disk_cache_size: Count | None = None  #: model versions on disk
    cache_memory: Annotated[int, BeforeValidator(memory_bytes)] | None = None
    trust: Annotated[str, BeforeValidator(enum("pickle"))] | None = None  #: what may run code from models' files
    #: A new version is tried with a part of the requests, as `update_strategy.canary` says, before it replaces the old.
    canary: Flag = False
    #: With `canary`: the versions of this revision, which a deploy finds in the bucket. No key of cortex.yaml.
    pinned: list[PinnedModel] = []

    @property
    def is_cached(self) -> bool:
        """True if models are loaded on first use and evicted to stay within a limit."""
        return self.cache_size is not None or self.cache_memory is not None


@accepts(type="string", pattern=r"^(/|(?!~)(?!(.*/)?\.\.(/|$)).*\S)")
def _readiness(value: object) -> str:
    """Validate the sample of a project, or the path at which the server of a command answers."""
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        raise wrong_type(value, "a string", f"write {quote(value['path'])}")
    written = text(value)
    if not written.startswith("/"):
        return _project_path(value)
    if not re.fullmatch(r"/[!-~]*", written):
        raise problem(
            f"{quote(written)} must contain only printable ASCII characters without spaces", 'write "/health"'
        )
    return written


_TYPES = (PYTHON, "tensorflow", "onnx", ANY_MODEL, "asgi", "wsgi", COMMAND)
#: What people write as `type` of a handler → the one that serves it.
_FRAMEWORKS = {
    **dict.fromkeys(("fastapi", "starlette", "litestar", "quart", "sanic", "uvicorn", "hypercorn", "daphne"), "asgi"),
    **dict.fromkeys(("flask", "django", "bottle", "falcon", "pyramid", "gunicorn", "waitress", "uwsgi"), "wsgi"),
    **dict.fromkeys(("sklearn", "xgboost", "lightgbm", "mlflow"), ANY_MODEL),
    **dict.fromkeys(("keras", "tf"), "tensorflow"),
    **dict.fromkeys(("torch", "pytorch", "torchscript", "huggingface"), PYTHON),
    **dict.fromkeys(("vllm", "container", "docker", "shell", "process"), COMMAND),
}
#: Values of `type` for applications, which answer everything below the endpoint.
APPLICATION_TYPES = frozenset({"asgi", "wsgi"})


def needs_code(type_: str) -> bool:
    """Return whether a handler of a type, or of the type that a wrong word means, needs a file."""
    meant = type_ if type_ in _TYPES else _FRAMEWORKS.get(type_.lower()) or nearest(type_, _TYPES)
    return meant in (None, PYTHON, *APPLICATION_TYPES)


Interface = Literal["functions", "older_request_handler", "request_handler", "predictor", "handler"]
#: Interfaces whose code only prepares the inputs and outputs of a model.
REQUEST_HANDLERS: frozenset[Interface] = frozenset({"older_request_handler", "request_handler"})

MAX_NAME_LENGTH = 42
#: Maximum length of the name of a deployment and of an API in one: both are in the endpoint, and folders have the name.
MAX_OLD_NAME_LENGTH = 200
MAX_ENDPOINT_LENGTH = 1000
MIN_CORES = 0.02  #: for files from 0.13 on
MAX_CORES = 10_000  #: far beyond any machine; a larger amount is an error in writing
MIN_MEMORY_BYTES = 20 * 1024**2  #: for files from 0.13 on
SUBMISSION_BYTES = 10 * 1024**2  #: default size limit of a submission to a BatchAPI
CPU_PERCENT = 80  #: default target of the CPU usage in files of 0.10 to 0.12
WORKLOAD_S = 3600.0  #: default time limit of one workload of an AsyncAPI
WEBSOCKET_IDLE_S = 3600.0  #: default limit of the time without a message on a WebSocket
START_S = 600.0  #: default time until the server of a command is ready
ASGI_CONCURRENCY = 100  #: default target of requests in flight per process of an ASGI application or a command
MIN_RECORDING_BYTES = 16 * 1024**2  #: of all files of a recording
MAX_BATCH_BYTES = 256 * 1024**2  #: a whole batch is held in memory and stored as one database value


@accepts(type="string", pattern="^[a-z]([-a-z0-9]*[a-z0-9])?$")
def _api_name(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise wrong_type(value, "a string", fix_of=lambda written: f"write {quote(_nearest_name(written))}")
    name = text(value)
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise problem(
            f"{quote(name)} must contain only lower case letters, numbers, and dashes, start with a letter, "
            "and cannot end with a dash",
            f"write {quote(_nearest_name(name))}",
        )
    if len(name) > MAX_OLD_NAME_LENGTH:
        raise problem(f"is too long ({len(name)} characters)", f"shorten it to {MAX_NAME_LENGTH} characters")
    return name


def _nearest_name(name: str) -> str:
    letters = dashed(name) or "my-api"
    return letters if letters[0].isalpha() else f"api-{letters}"


ApiName = Annotated[str, BeforeValidator(_api_name)]


@accepts(type="string", pattern=r"^(?!/$)(?!.*//)[A-Za-z0-9_./-]+$", maxLength=MAX_ENDPOINT_LENGTH)
def _endpoint(value: object) -> str:
    endpoint = text(value)
    if len(endpoint) > MAX_ENDPOINT_LENGTH:
        raise problem(f"must be no longer than {MAX_ENDPOINT_LENGTH} characters (got {len(endpoint)})", "shorten it")
    if bad := re.search(r"[^A-Za-z0-9_\-./]", endpoint):
        raise problem(
            f'{quote(endpoint)} must contain only letters, numbers, and the characters "_", "-", ".", "/" '
            f"(got {quote(bad[0])})",
            f"write {quote(_nearest_endpoint(endpoint))}",
        )
    if "//" in endpoint:
        raise problem(
            f"{quote(endpoint)} cannot contain adjacent slashes", f"write {quote(re.sub('/+', '/', endpoint))}"
        )
    if endpoint == "/":
        raise problem('"/" is not an endpoint', 'write a path, such as "/my-api"')
    return "/" + endpoint.strip("/")


def _nearest_endpoint(endpoint: str) -> str:
    parts = [re.sub(r"[^A-Za-z0-9_.-]+", "-", part).strip("-") for part in endpoint.split("/")]
    return "/" + "/".join(filter(None, parts)) if any(parts) else "/my-api"


class Dependencies(ConfigModel):
    """The dependency files, relative to the project folder."""

    pip: ProjectPath = "requirements.txt"
    conda: ProjectPath = "conda-packages.txt"
    shell: ProjectPath = "dependencies.sh"
    #: Packages of the models, which a deploy derives from their files; lines of a requirements file → the installed
    #: versions that do as well, such as `==1.9.*`; "": any. No key of cortex.yaml.
    model_packages: dict[str, str] = {}


@accepts(**getattr(memory_bytes, ACCEPTED))
def _batch_size(value: object) -> int:
    size = memory_bytes(value)
    if size > MAX_BATCH_BYTES:
        raise problem(f"must be at most 256Mi (got {quote(value)})", "write a smaller amount")
    return size


class Batching(ConfigModel):
    """Server-side batching: concurrent requests become one call with a list for each argument."""

    max_batch_size: Annotated[int, BeforeValidator(integer(at_least=2, at_most=1024))]
    #: Maximum wait for further requests.
    batch_interval_s: Annotated[float, BeforeValidator(duration_s(above=0, example="10ms"))]
    isolate_failures: Flag = True  #: bisect a failed batch


@accepts(type="string", pattern="^[A-Za-z_][A-Za-z0-9_]*$")
def _attribute_name(value: object) -> str:
    name = text(value)
    if not name.isidentifier():
        last = re.sub(r"\W.*", "", re.split("[:.]", name)[-1])
        fix = f"write {quote(last if last.isidentifier() else 'app')}"
        raise problem(f"{quote(name)} must be the name of an application or of a function in the file", fix)
    return name


@accepts(type="array", minItems=1, items={"type": "string"})
def _command(value: object) -> list[object]:
    """Validate the program of a command and its arguments."""
    if isinstance(value, str) and value.strip():
        try:
            parts = shlex.split(value)
        except ValueError:  # no closing quotation
            parts = value.split()
        raise problem("must be a list: the program, then each argument", f"write {json.dumps(parts)}")
    if value == []:
        raise problem("cannot be empty", 'write the program and its arguments, such as ["node", "server.js"]')
    return a_list(value)


@accepts(type="string", pattern=r"^(?![/~-])(?!(.*/)?\.\.(/|$)).+\.proto$")
def _protobuf_path(value: object) -> str:
    path = _project_path(value)
    if not path.endswith(".proto") or path.startswith("-"):
        raise problem(f'{quote(path)} must end with ".proto"', "write the path of the definition of the service")
    return path


class Handler(ConfigModel):
    """The user's code: its location, its interface and its arguments."""

    null_means_default = frozenset(
        {
            "app",
            "command",
            "config",
            "env",
            "pin_processes",
            "preload",
            "protobuf_path",
            "server_side_batching",
            "start_timeout_s",
            "strip_prefix",
        }
    )

    interface: Interface
    type: Annotated[str, BeforeValidator(enum(*_TYPES, synonyms=_FRAMEWORKS))]
    #: The user's file; None: a built-in class serves the models.
    path: Annotated[str | None, BeforeValidator(_code_path)] = Field(default=None, validate_default=True)
    app: Annotated[str, BeforeValidator(_attribute_name)] | None = None  #: the application in `path`, or its factory
    #: The program of the user's own server, and its arguments.
    command: Annotated[list[Text], BeforeValidator(_command)] | None = None
    strip_prefix: Flag = True  #: the command's server gets paths without it
    start_timeout_s: Annotated[float, BeforeValidator(duration_s(above=0))] = START_S  #: until that server is ready
    protobuf_path: Annotated[str, BeforeValidator(_protobuf_path)] | None = None  #: its service answers over gRPC
    python_path: Annotated[str, BeforeValidator(folder_on_path)] | None = None
    config: Annotated[dict[str, Any], BeforeValidator(a_map)] = {}
    env: Annotated[dict[EnvName, EnvValue], BeforeValidator(a_map)] = {}
    model: ModelLocation | None = None  #: passed to module functions, which load it themselves
    models: ModelsConfig | None = None  #: `multi_model_reloading` of Python code
    signature_key: Text | None = None  #: TensorFlow: default for entries of `models` without their own
    tensorflow_serving: Annotated[str, BeforeValidator(serving_address)] | None = None  #: host:port, or LOCAL_SERVING
    processes_per_replica: Annotated[int, BeforeValidator(integer(at_least=1, at_most=100))] = 1
    threads_per_process: Annotated[int, BeforeValidator(integer(at_least=1))] = 1
    pin_processes: Flag = False  #: each has processors of its own
    preload: Flag = False  #: the processes are forked after construction
    log_level: Annotated[str, BeforeValidator(enum("debug", "info", "warning", "error"))] = "info"
    dependencies: Dependencies = Dependencies()
    server_side_batching: Batching | None = None


#: Placeholder for APIs without code.
NO_CODE = Handler(interface="handler", type="python", path="(none)")


@accepts(type="string", pattern="^/")
def _local_folder(value: object) -> str:
    folder = text(value)
    if not folder.startswith("/"):
        raise problem(f"{quote(folder)} must be an absolute path", 'write something like "/data/images"')
    return posixpath.normpath(f"/{folder.lstrip('/')}")


LocalFolder = Annotated[str, BeforeValidator(_local_folder)]


@accepts(type="string", pattern=r"^(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]*(/.*)?$")
def _bucket(value: object) -> str:
    bucket = text(value)
    if not re.fullmatch(r"(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]*(/.*)?", bucket):
        raise problem(f"{quote(bucket)} must start with s3:// or gs:// and a bucket", 'write "s3://bucket/folder"')
    return bucket.rstrip("/")


@accepts(type="string", pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]*|[0-9a-fA-F.:]+(/[0-9]+)?)$")
def _webhook_host(value: object) -> str:
    """Return a host name in lower case, or an address or network as a network."""
    host = text(value).lower()
    try:
        return str(ipaddress.ip_network(host, strict=False))
    except ValueError:
        if re.fullmatch(r"[a-z0-9_][a-z0-9._-]*", host):
            return host
    raise problem(
        f"{quote(value)} must be a host, an address or a network",
        'write something like "hooks.internal", "10.0.0.5" or "10.0.0.0/8"',
    )


Bucket = Annotated[str, BeforeValidator(_bucket)]
WebhookHost = Annotated[str, BeforeValidator(_webhook_host)]


_HOST = r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
_ORIGIN = rf"[a-z][a-z0-9+.-]*://{_HOST}"


@accepts(type="string", pattern=rf"^(\*|{_ORIGIN})$")
def _origin(value: object) -> str:
    """Validate an origin as browsers send it: a scheme, a host in lower case, and a port unless it is the default."""
    origin = text(value)
    if origin == "*" or (re.fullmatch(_ORIGIN, origin) and not _default_port(origin)):
        return origin
    written = origin.lower() if "://" in origin else f"https://{origin.lower()}"
    found = re.match(_ORIGIN, written)
    likely = found[0].removesuffix(_default_port(found[0])) if found else "https://example.com"
    raise problem(
        f'{quote(origin)} must be "*" or an origin: a scheme, a host, and a port unless it is the default one',
        f"write {quote(likely)}",
    )


def _default_port(origin: str) -> str:
    """Return the port of an origin that browsers leave out; "" if there is none."""
    found = re.fullmatch(r"(?:http://.*(:80)|https://.*(:443))", origin)
    return (found[1] or found[2]) if found else ""


@accepts(type="string", pattern=r"^(\*|[A-Za-z0-9_-]+)$")
def _header_name(value: object) -> str:
    name = text(value)
    if not re.fullmatch(r"\*|[A-Za-z0-9_-]{1,200}", name):
        fix = 'write something like "Content-Type"'
        raise problem(f'{quote(name)} must be "*" or the name of a header', fix)
    return name


Origin = Annotated[str, BeforeValidator(_origin)]
HeaderName = Annotated[str, BeforeValidator(_header_name)]


class CorsConfig(ConfigModel):
    """The permissions of browser pages that another origin serves (CORS)."""

    origins: Annotated[list[Origin], BeforeValidator(a_list)]
    headers: Annotated[list[HeaderName], BeforeValidator(a_list)] = ["*"]
    credentials: Flag = False


@accepts(type="string", pattern=r"^((s3|gs)://.*[^/]|/.*)$")
def _recording_location(value: object) -> str:
    location = text(value)
    if location.startswith(STORES):
        if not location.split("://", 1)[1].strip("/"):
            raise problem(f"{quote(location)} has no bucket name", f'write "{location[:5]}bucket/path"')
        return location.rstrip("/")
    if not location.startswith("/"):
        suggestion = _as_store(location) or "/data/recordings"
        raise problem(
            f"{quote(location)} must be an absolute path, or start with s3:// or gs://", f"write {quote(suggestion)}"
        )
    return posixpath.normpath(f"/{location.lstrip('/')}")


@accepts(type="string", pattern=rf"({json_path.PATTERN})|(^[A-Za-z0-9_.-]+$)")
def _redacted(value: object) -> str:
    name = text(value)
    if not re.fullmatch(json_path.PATTERN if name.startswith("$") else r"[A-Za-z0-9_.-]+", name):
        raise problem(
            f"{quote(name)} must be a path in JSON bodies, or the name of a header or query parameter",
            'write something like "$.user.email", "$.items[*].name", "$..password" or "X-User"',
        )
    return name


@accepts(**getattr(memory_bytes, ACCEPTED))
def _recording_size(value: object) -> int:
    size = memory_bytes(value)
    if size < MIN_RECORDING_BYTES:
        raise problem(f"must be at least 16Mi (got {quote(value)})", 'write something like "1Gi"')
    return size


class RecordConfig(ConfigModel):
    """The recording of requests and their answers, for `cortex replay`."""

    null_means_default = frozenset({"redact", "to"})

    share: Annotated[str, BeforeValidator(percentage(above=0))] = "10%"  #: of the requests
    max_cpu: Annotated[str, BeforeValidator(percentage(above=0))] = "1%"  #: of a core, for each process; 100%: no limit
    max_size: Annotated[int, BeforeValidator(_recording_size)] = 1024**3  #: bytes; the oldest files make room
    #: Paths in JSON bodies, names of headers and query parameters.
    redact: Annotated[list[Annotated[str, BeforeValidator(_redacted)]], BeforeValidator(a_list)] | None = None
    #: A folder or bucket; None: `recordings` in CORTEX_HOME.
    to: Annotated[str, BeforeValidator(_recording_location)] | None = None


class Networking(ConfigModel):
    """The endpoint of an API and the limits of a request."""

    null_means_default = frozenset({"endpoint", "local_paths", "buckets", "webhook_hosts", "cors", "record"})

    endpoint: Annotated[str, BeforeValidator(_endpoint)]
    timeout_s: Annotated[float, BeforeValidator(duration_s(above=0))] = 60.0  #: WORKLOAD_S for an AsyncAPI
    max_body_size: Annotated[int, BeforeValidator(memory_bytes)] = 100 * 1024**2  #: SUBMISSION_BYTES for jobs
    max_batch_size: Annotated[int, BeforeValidator(_batch_size)] = 256_000  #: bytes of one batch of a BatchAPI
    #: Bytes that callers of an AsyncAPI, BatchAPI or TaskAPI may have stored.
    max_stored_size: Annotated[int, BeforeValidator(memory_bytes)] = 10 * 1024**3
    # What submissions may name that come through the endpoint, whose callers have shown no token of the operator:
    local_paths: Annotated[list[LocalFolder], BeforeValidator(a_list)] | None = None  #: folders of this machine
    buckets: Annotated[list[Bucket], BeforeValidator(a_list)] | None = None  #: buckets, or folders in buckets
    #: Hosts, addresses and networks of webhooks, besides all public addresses.
    webhook_hosts: Annotated[list[WebhookHost], BeforeValidator(a_list)] | None = None
    access_log: Flag = False  #: the gateway writes a line per request
    sticky: Flag = False  #: a client's requests go to the same process
    auth: Annotated[str, BeforeValidator(enum("none", "api_key"))] = "none"  #: the credential that the gateway requires
    docs: Flag = True  #: serve `openapi.json` and `docs` below the endpoint
    #: for a call whose client disconnects
    on_disconnect: Annotated[str, BeforeValidator(enum("finish", "cancel", "kill"))] = "cancel"
    #: without a message in either direction
    websocket_idle_timeout_s: Annotated[float, BeforeValidator(duration_s(above=0))] = WEBSOCKET_IDLE_S
    cors: CorsConfig | None = None  #: None: pages of every origin may read responses
    record: RecordConfig | None = None  #: None: no request is recorded

    @property
    def needs_key(self) -> bool:
        """True if callers must send an API key."""
        return self.auth == "api_key"


class Compute(ConfigModel):
    """The resources that one replica requests; only `mem_limit` is enforced as a limit."""

    cpu: Annotated[float, BeforeValidator(cores)] | None = 0.2
    mem: Annotated[int, BeforeValidator(memory_bytes)] | None = None
    gpu: Annotated[int, BeforeValidator(integer(at_least=0))] = 0
    inf: Annotated[int, BeforeValidator(integer(at_least=0, at_most=1))] = 0
    mem_limit: Annotated[int, BeforeValidator(memory_bytes)] | None = None
    node_groups: Annotated[list[Text], BeforeValidator(a_list)] | None = None


class Autoscaling(ConfigModel):
    """The range of the number of replicas and the parameters of the autoscaler."""

    null_means_default = frozenset({"init_replicas"})

    min_replicas: Annotated[int, BeforeValidator(integer(at_least=0))] = 1  #: 0: an idle API runs no process
    max_replicas: Count = 100
    #: Replicas of a new API; at least 1 by default, so that a deployment shows whether the code works.
    init_replicas: Annotated[int, BeforeValidator(integer(at_least=0))] = Field(
        default_factory=lambda data: max(1, int(data.get("min_replicas", 1)))
    )
    target_replica_concurrency: Annotated[float, BeforeValidator(number(above=0))] | None = None
    max_replica_concurrency: Annotated[int, BeforeValidator(integer(above=0, at_most=65535))] = 1024
    window_s: Annotated[float, BeforeValidator(duration_s(at_least=10, multiple_of=10))] = 60.0
    downscale_stabilization_period_s: Annotated[float, BeforeValidator(duration_s(at_least=0))] = 300.0
    upscale_stabilization_period_s: Annotated[float, BeforeValidator(duration_s(at_least=0))] = 60.0
    max_downscale_factor: Fraction = 0.75
    max_upscale_factor: Annotated[float, BeforeValidator(number(above=1))] = 1.5
    downscale_tolerance: Fraction = 0.05
    upscale_tolerance: Annotated[float, BeforeValidator(number(at_least=0))] = 0.05
    #: Percent; only in files of 0.10 to 0.13, and by default CPU_PERCENT in those of 0.10 to 0.12.
    target_cpu_utilization: Count | None = None


Step = Annotated[str, BeforeValidator(percentage(above=0, at_most=99, whole=True))]


@accepts(type="array", minItems=1)
def _steps(value: object) -> list[object]:
    if value == []:
        raise problem("cannot be empty", 'write something like "[1%, 10%, 50%]"')
    return a_list(value)


class CanaryConfig(ConfigModel):
    """Trial of a new revision beside the old one before it replaces it."""

    null_means_default = frozenset({"max_prediction_shift", "max_disagreement"})

    #: Before the first step, the new revision gets copies of all requests, and its responses are discarded.
    shadow: Flag = False
    #: Shares of the requests, one after the other.
    steps: Annotated[list[Step], BeforeValidator(_steps)] = ["1%", "10%", "50%"]
    min_requests: Count = 100  #: that the new revision must answer in each step
    max_error_increase: Annotated[str, BeforeValidator(percentage())] = "0.5%"  #: of the part of requests that fail
    max_latency_increase: Annotated[str, BeforeValidator(percentage(at_most=1000))] = "25%"
    #: of the share of any class that the tracker counts; None: not compared
    max_prediction_shift: Annotated[str, BeforeValidator(percentage())] | None = None
    #: share of the copied requests for which both revisions predict something else; None: not compared
    max_disagreement: Annotated[str, BeforeValidator(percentage())] | None = None
    confidence: Annotated[float, BeforeValidator(number(at_least=0.5, below=1))] = 0.99
    give_up_after_s: Annotated[float, BeforeValidator(duration_s(above=0))] = 86_400.0
    #: after `give_up_after`
    on_no_decision: Annotated[str, BeforeValidator(enum("hold", "promote", "roll_back"))] = "hold"


class UpdateStrategy(ConfigModel):
    """Limits of a rolling update: extra and unavailable replicas, as a count or a percentage."""

    null_means_default = frozenset({"canary"})

    max_surge: Annotated[str, BeforeValidator(percent_or_count)] = "25%"
    max_unavailable: Annotated[str, BeforeValidator(percent_or_count)] = "25%"
    canary: CanaryConfig | None = None  #: None: a new revision replaces the old one as soon as it is ready


class TrackerConfig(ConfigModel):
    """The value of each response to count (classification) or average (regression), and the threshold of drift."""

    null_means_default = frozenset({"key", "baseline"})

    key: Text | None = None
    model_type: Annotated[str, BeforeValidator(enum("classification", "regression"))]
    #: JSON file with predictions from training; None: the first `window` predictions.
    baseline: ProjectPath | None = None
    window: Annotated[int, BeforeValidator(integer(at_least=100))] = 1000  #: number of predictions per comparison
    false_alarm_rate: Annotated[float, BeforeValidator(number(above=0, below=1))] = 0.001  #: per window


@accepts(type="array", minItems=1)
def _shares(value: object) -> list[object]:
    if value == []:
        raise problem("cannot be empty", 'write "- name: my-api" and "weight: 100" below it')
    return a_list(value)


class Traffic(ConfigModel):
    """One API behind a TrafficSplitter."""

    name: Text
    weight: Annotated[int, BeforeValidator(integer(at_least=0, at_most=100))]  #: percent of requests
    #: Receives copies of requests; its responses are discarded.
    shadow: Flag = False


class Schedule(ConfigModel):
    """A schedule that submits jobs of an API."""

    null_means_default = frozenset({"submission"})

    cron: Annotated[str, BeforeValidator(cron_expression)]  #: five fields
    timezone: Annotated[str, BeforeValidator(time_zone)] = "UTC"
    submission: Annotated[dict[str, Any], BeforeValidator(a_map)] = {}  #: request body of the submission
    overlap: Annotated[str, BeforeValidator(enum("allow", "skip"))] = "allow"  #: if the previous job is still running


class Api(ConfigModel):
    """One API as configured, with all defaults; `model_dump(mode="json")` round-trips."""

    null_means_default = frozenset({"readiness", "schedule"})

    name: ApiName
    kind: ApiKind = ApiKind.REALTIME
    deployment: str | None = None  #: name of its `kind: deployment`; only in files of 0.10 to 0.12
    handler: Handler = NO_CODE  #: NO_CODE only for a TrafficSplitter
    networking: Networking
    compute: Compute = Compute()
    autoscaling: Autoscaling = Autoscaling()
    update_strategy: UpdateStrategy = UpdateStrategy()
    tracker: TrackerConfig | None = None
    #: Sample request that a new replica must answer before it receives traffic; of a command, the path of one.
    readiness: Annotated[str, BeforeValidator(_readiness)] | None = None
    apis: Annotated[list[Traffic], BeforeValidator(_shares)] | None = None  #: targets of a TrafficSplitter
    schedule: Schedule | None = None  #: only for a BatchAPI or a TaskAPI
    #: The user's own keys and values, with defaults; see `api_spec.py`. None if an older version stored the API.
    as_written: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_scaling(cls, data: Any) -> Any:
        """Set the default target of CPU usage of an API in a deployment."""
        scaling = data.get("autoscaling", {}) if isinstance(data, dict) and data.get("deployment") else None
        if not isinstance(scaling, dict) or scaling.get("target_cpu_utilization") is not None:
            return data
        return {**data, "autoscaling": {**scaling, "target_cpu_utilization": CPU_PERCENT}}

    @model_validator(mode="before")
    @classmethod
    def _default_networking(cls, data: Any) -> Any:
        """Set the defaults that depend on other fields of the API."""
        networking = data.get("networking", {}) if isinstance(data, dict) else None
        if not isinstance(networking, dict):
            return data
        if isinstance(data.get("name"), str) and networking.get("endpoint") is None:
            prefix = f"/{data['deployment']}" if data.get("deployment") else ""
            networking = {**networking, "endpoint": f"{prefix}/{data['name']}"}
        if data.get("kind") in (ApiKind.BATCH, ApiKind.TASK):
            networking = {"max_body_size": SUBMISSION_BYTES, **networking}
        if data.get("kind") == ApiKind.ASYNC:
            networking = {"timeout_s": WORKLOAD_S, **networking}
        return {**data, "networking": networking}

    @classmethod
    def read_stored(cls, text: str | bytes) -> Api:
        """Parse the JSON of a stored API; its time zone was validated when it was stored and is not checked again."""
        return cls.model_validate_json(text, context=STORED)

    @property
    def is_application(self) -> bool:
        """True if an ASGI or WSGI application answers everything below the endpoint."""
        return self.handler.type in APPLICATION_TYPES

    @property
    def runs_command(self) -> bool:
        """True if a server of the user's own answers everything below the endpoint."""
        return self.handler.type == COMMAND

    @property
    def has_docs(self) -> bool:
        """True if cortex has a documentation page for the API; applications and commands may have their own."""
        return self.networking.docs and not self.answers_all_paths

    @property
    def answers_all_paths(self) -> bool:
        """True if code of the user answers all paths below the endpoint: an application, or the server of a command."""
        return self.is_application or self.runs_command

    @property
    def readiness_sample(self) -> str | None:
        """The file of the project that has the sample request of `readiness`."""
        return None if self.runs_command else self.readiness

    @property
    def is_grpc(self) -> bool:
        """True if clients call the API over gRPC."""
        return self.handler.protobuf_path is not None

    @property
    def concurrency(self) -> int:
        """Number of requests that one replica runs concurrently."""
        return self.handler.processes_per_replica * self.handler.threads_per_process

    @property
    def target_concurrency(self) -> float:
        """Number of requests in flight per replica that the autoscaler targets."""
        batching, handler = self.handler.server_side_batching, self.handler
        calls = max(handler.threads_per_process, batching.max_batch_size if batching else 1)
        if handler.type in ("asgi", COMMAND):
            calls = min(
                ASGI_CONCURRENCY, max(1, self.autoscaling.max_replica_concurrency // handler.processes_per_replica)
            )
        return self.autoscaling.target_replica_concurrency or float(handler.processes_per_replica * calls)
