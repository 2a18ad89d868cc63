"""Import the user's file, check its class, construct it, and bind its methods.

`load` does this for requests; `batch` shares `import_code`, `UserCode` and `build_clients` for jobs. Every replica
imports this module, so it imports light modules only. It has no notion of HTTP or encodings.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodWrapperType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from cortex.errors import UserError, with_article
from cortex.models.loaded_models import call_scope
from cortex.models.spec import Catalogue, ModelSource
from cortex.payloads.signature import ApiSignature
from cortex.predictor.applications import AsgiApp, as_asgi, class_application, module_application
from cortex.predictor.binding import BoundMethod, bind_function, bind_method, call_kind
from cortex.predictor.bound_routes import BoundRoute, bind_routes
from cortex.predictor.importing import import_user_file
from cortex.predictor.inference.request_handler import RequestHandler
from cortex.predictor.interface import (
    AFTER_FORK,
    BATCH_KEY,
    GENERATIONS,
    PRE_INFERENCE,
    PROTO_MODULES,
    Generation,
    Signature,
    for_grpc,
)
from cortex.predictor.interface_rules import (
    batch_key_problem,
    batched_method,
    batching_problem,
    declared_arguments,
    declared_names,
    find_foreign_class,
    find_method_of_kind,
    find_problems,
)
from cortex.predictor.routes import declared_routes, repeated, unsupported
from cortex.predictor.tracebacks import set_project, user_code
from cortex.spelling import nearest

if TYPE_CHECKING:
    from cortex.models.loader import LoadEvents, ModelFetcher
    from cortex.models.registry import Registry
    from cortex.predictor.clients.builder import Clients
    from cortex.predictor.inference.inference_model import InferenceModel
    from cortex.predictor.protobuf import BoundService, Definition


class LoadSpec(Protocol):
    """The fields of a replica's spec that the loader reads."""

    @property
    def api(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def interface(self) -> str: ...
    @property
    def project_dir(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def python_path(self) -> str | None: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def api_spec(self) -> dict[str, Any]: ...
    @property
    def model_path(self) -> str | None: ...
    @property
    def type(self) -> str: ...
    @property
    def app(self) -> str | None: ...
    @property
    def protobuf_path(self) -> str | None: ...
    @property
    def threads(self) -> int: ...
    @property
    def models(self) -> ModelSource | None: ...
    @property
    def tensorflow_serving(self) -> str | None: ...
    @property
    def trusts_pickle(self) -> bool: ...
    @property
    def gpu_ids(self) -> tuple[str, ...]: ...
    @property
    def max_batch_size(self) -> int: ...
    @property
    def isolates_failures(self) -> bool: ...
    @property
    def sockets(self) -> tuple[str, ...]: ...
    @property
    def pin_processes(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class BoundPredictor:
    """The user's constructed object with its bound methods."""

    generation: Generation
    file: str
    methods: Mapping[str, BoundMethod]  #: by HTTP verb in upper case
    clients: Clients | None = None  #: None if the API has no models
    inference_models: Mapping[str, InferenceModel] = field(default_factory=dict)  #: offered by V2 routes, by name
    request_handler: RequestHandler | None = None  #: the functions around the model, in interfaces that have them
    loads_on_demand: bool = False  #: a model is loaded when it is called, and may be unloaded afterwards
    application: AsgiApp | None = None  #: answers all requests, instead of `methods`
    instance: object | None = None  #: of the user's class; None if `methods` are functions or those of a built-in class
    routes: tuple[BoundRoute, ...] = ()  #: methods that answer requests at paths below the endpoint
    service: BoundService | None = None  #: answers all requests, over gRPC, instead of `methods`
    after_fork_hook: Callable[[], object] | None = None  #: of the user's class
    batch_key: Callable[..., Hashable] | None = (
        None  #: of the user's class: only payloads with the same key are batched
    )

    @property
    def registry(self) -> Registry[Any] | None:
        """Return the registry of the API's models; None without models, or if an external server manages them."""
        return self.clients.registry if self.clients else None

    @property
    def all_methods(self) -> list[BoundMethod]:
        """Return the methods that answer at the endpoint, and those of routes."""
        return [*self.methods.values(), *(route.method for route in self.routes)]

    @property
    def signature(self) -> ApiSignature:
        """Return what the methods and the models that are always loaded take and return."""
        methods = tuple(method.signature for method in self.methods.values())
        models = [] if self.loads_on_demand else [model.signature() for model in self.inference_models.values()]
        return ApiSignature(methods, tuple(models), tuple(each.signature for each in self.routes))

    def after_fork(self) -> None:
        """Call the user's `after_fork`, if there is one, in the process that serves. Raises: UserError."""
        if self.after_fork_hook is None:
            return
        with user_code(f"by {AFTER_FORK}()"):
            result = self.after_fork_hook()
        if inspect.iscoroutine(result):
            result.close()
            raise UserError(
                f"{self.file}: {AFTER_FORK}() is async; write `def {AFTER_FORK}(self)`: no event loop runs yet"
            )

    def close(self) -> None:
        """Unload the models and stop their backend; no method may be called afterwards."""
        if self.clients is not None:
            self.clients.close()

    def describe(self) -> dict[str, Any]:
        """Return the JSON response to a GET that no method of the user handles: interface, methods and models."""
        if self.request_handler is not None:
            return {"message": self.generation.summary, "model_signature": self.request_handler.describe()}
        described: dict[str, Any] = {
            "message": self.generation.summary,
            "interface": self.generation.key,
            "methods": {
                verb: {"name": method.name, "arguments": list(method.arguments)}
                for verb, method in self.methods.items()
            },
        }
        if self.routes:
            described["routes"] = [
                {
                    "verb": each.route.verb,
                    "path": each.route.template.text,
                    "name": each.method.name,
                    "arguments": [*(parameter.name for parameter in each.signature.parameters), *each.method.arguments],
                }
                for each in self.routes
            ]
        if self.clients is not None:
            described["model_metadata"] = self.clients.describe()
            if self.clients.served_models is not None:
                described["models"] = self.clients.served_models.describe()
        return described


def load(
    spec: LoadSpec,
    catalogue: Catalogue | None = None,
    fetcher: ModelFetcher | None = None,
    events: LoadEvents | None = None,
    extra_versions: Sequence[tuple[str, str]] = (),
    metrics: object = None,
) -> BoundPredictor:
    """Import and construct the user's code, and load its models. The project must be the working directory.

    `catalogue` lists the models. The latest version of each is loaded, and `extra_versions` (model, version), which
    calls asked a previous process for; with caching, models are loaded on first use. `metrics` is passed to
    constructors that declare `metrics_client`.

    Raises: UserError with the user's frames, or with `file:line`, the problem of a signature and its fix.
    """
    config = copy.deepcopy(spec.config)
    if spec.app is not None:
        return _load_application(spec, spec.app, config)
    code = import_code(spec, _definition(spec))
    if code.generation.class_name is None and spec.models is None:
        return _initialize_module(spec, code, config)
    if spec.max_batch_size and spec.type == "python":
        _check_batching(code, spec.path)
    clients = build_clients(spec, catalogue, fetcher, events)
    try:
        if not code.generation.methods and not code.generation.has_application:
            return _wrap_model(spec, code, config, clients)
        return _construct_predictor(spec, code, config, clients, extra_versions, metrics)
    except BaseException:
        if clients is not None:
            clients.close()
        raise


@dataclass(frozen=True, slots=True)
class UserCode:
    """The user's class or module, imported and checked."""

    generation: Generation
    target: Any  #: without code: a built-in class, or None for a request handler
    serving_methods: Mapping[str, str]  #: name → HTTP verb, or BATCH, ASYNC or TASK
    is_built_in: bool = False
    definition: Definition | None = None  #: of the service of a gRPC API

    def construct(self, values: Mapping[str, Any], clients: Clients | None) -> object:
        """Construct an object of the class from those of `values` that its `__init__` declares. Raises: UserError."""
        if self.is_built_in:
            return cast("object", self.target(clients.served_models if clients else {}))
        available = dict(values)
        if clients is not None and self.generation.client is not None:
            available[self.generation.client] = clients.client
        with call_scope():
            return _construct(self.target, self.generation, available, clients.bind if clients else None)


def import_code(spec: LoadSpec, definition: Definition | None = None) -> UserCode:
    """Import the user's file and check its members; `definition` is that of a gRPC API. Raises: UserError."""
    generation = _generation(spec)
    if definition is not None:
        generation = for_grpc(generation, definition.rpcs)
    if not spec.path:
        return _built_in_code(spec, generation)
    set_project(Path(spec.project_dir))
    module = _import_module(spec)
    target: Any = module if generation.class_name is None else _find_class(module, generation, spec.path)
    serving_methods = generation.select_serving(lambda name: _is_defined(target, name))
    _check_members(target, generation, serving_methods, spec.path)
    return UserCode(generation, target, serving_methods, definition=definition)


def _definition(spec: LoadSpec) -> Definition | None:
    """Return the compiled definition of a gRPC API; None for other APIs. Raises: UserError."""
    if spec.protobuf_path is None:
        return None
    from cortex.predictor.protobuf import load_definition  # noqa: PLC0415 - other APIs start faster

    return load_definition(Path(spec.project_dir), spec.protobuf_path)


def _built_in_code(spec: LoadSpec, generation: Generation) -> UserCode:
    """Return the class that answers requests with models, or, for a request handler, no functions."""
    try:
        from cortex.predictor.inference.model_handler import BatchingModelHandler, ModelHandler  # noqa: PLC0415 - needs numpy
    except ModuleNotFoundError as exc:
        from cortex.predictor.clients import builder  # noqa: PLC0415 - as below

        raise builder.missing_library(spec, exc) from exc

    target = BatchingModelHandler if spec.max_batch_size else ModelHandler
    serving = generation.select_serving(lambda name: hasattr(target, name))
    return UserCode(generation, target, serving, is_built_in=True) if serving else UserCode(generation, None, {})


def _generation(spec: LoadSpec) -> Generation:
    return GENERATIONS[spec.kind, spec.interface, spec.type, spec.models is not None]


def _import_module(spec: LoadSpec) -> ModuleType:
    with user_code(f"while {spec.path} was being imported"):
        return import_user_file(Path(spec.project_dir), spec.path, spec.python_path)


def build_clients(
    spec: LoadSpec, catalogue: Catalogue | None, fetcher: ModelFetcher | None, events: LoadEvents | None
) -> Clients | None:
    """Build the model clients; None without models. Raises: UserError."""
    if spec.models is None:
        return None
    from cortex.predictor.clients import builder  # noqa: PLC0415 - keeps replicas without models light

    return builder.build_clients(spec, catalogue, fetcher, events)


def _load_application(spec: LoadSpec, name: str, config: dict[str, Any]) -> BoundPredictor:
    """Return the application that the user's file defines as `name`. Raises: UserError."""
    set_project(Path(spec.project_dir))
    app = module_application(_import_module(spec), name, spec.type, spec.path, config)
    return BoundPredictor(_generation(spec), spec.path, {}, application=as_asgi(app, spec.type, spec.threads))


def _initialize_module(spec: LoadSpec, code: UserCode, config: dict[str, Any]) -> BoundPredictor:
    """Call the module's `init`, if it is defined, and bind its functions. Raises: UserError."""
    init = getattr(code.target, code.generation.constructor, None)
    if init is not None:
        with user_code(f"by {code.generation.constructor}()"):
            init(spec.model_path, config)
    functions = {
        verb: bind_function(getattr(code.target, name), name, verb, config)
        for name, verb in code.serving_methods.items()
    }
    return BoundPredictor(code.generation, spec.path, functions)


def _wrap_model(spec: LoadSpec, code: UserCode, config: dict[str, Any], clients: Clients | None) -> BoundPredictor:
    """Bind the functions around the model of an API, and load it. Raises: UserError."""
    assert clients is not None
    assert clients.registry is not None
    functions = {name: function for name in code.generation.hooks if (function := getattr(code.target, name, None))}
    metadata = (config,) if "metadata" in code.generation.hooks[PRE_INFERENCE].required[2:] else ()
    handler = RequestHandler(functions, metadata, clients.registry)
    clients.registry.load_latest()
    return BoundPredictor(code.generation, spec.path, {"POST": handler.bind()}, clients, request_handler=handler)


def _check_batching(code: UserCode, file: str) -> None:
    """Check that the class has a method that can process several requests in one call. Raises: UserError."""
    name = batched_method(code.generation)
    is_defined = name in code.serving_methods
    if not is_defined and _is_defined(code.target, code.generation.inference_method or ""):
        return
    is_streaming = is_defined and call_kind(getattr(code.target, name)) in ("generator", "async_generator")
    if problem := batching_problem(name, is_defined, is_streaming):
        raise UserError(f"{file}: class {code.generation.class_name}: {problem[0]}; {problem[1]}")
    hook = getattr(code.target, BATCH_KEY, None)
    if hook is not None and (problem := batch_key_problem(is_plain=call_kind(hook) == "sync")):
        raise UserError(f"{file}: class {code.generation.class_name}: {problem[0]}; {problem[1]}")


def _construct_predictor(
    spec: LoadSpec,
    code: UserCode,
    config: dict[str, Any],
    clients: Clients | None,
    extra_versions: Sequence[tuple[str, str]],
    metrics: object,
) -> BoundPredictor:
    values = {"config": config, "api_spec": copy.deepcopy(spec.api_spec), "job_spec": None, "metrics_client": metrics}
    if code.definition is not None:
        values |= dict.fromkeys(PROTO_MODULES, code.definition.module)
    instance = code.construct(values, clients)
    if code.generation.has_application:
        app = as_asgi(class_application(instance, spec.type, spec.path), spec.type, spec.threads)
        hook = _after_fork_hook(code.generation, instance)
        return BoundPredictor(code.generation, spec.path, {}, application=app, after_fork_hook=hook)
    if clients is not None and clients.registry is not None:
        clients.registry.load_latest(extra_versions)
    return _bind_instance(spec, code, instance, clients)


def rebind(spec: LoadSpec, predictor: BoundPredictor) -> BoundPredictor:
    """Check and bind the methods of the user's object again, after its class has changed. Raises: UserError."""
    target, generation = type(predictor.instance), predictor.generation
    serving_methods = generation.select_serving(lambda name: _is_defined(target, name))
    _check_members(target, generation, serving_methods, spec.path)
    code = UserCode(generation, target, serving_methods)
    return _bind_instance(spec, code, predictor.instance, predictor.clients)


def _bind_instance(spec: LoadSpec, code: UserCode, instance: object, clients: Clients | None) -> BoundPredictor:
    batched = batched_method(code.generation) if spec.max_batch_size and spec.type == "python" else None
    serving = {} if code.definition is not None else code.serving_methods
    methods = {
        verb: bind_method(instance, name, verb, code.generation, is_batched=name == batched)
        for name, verb in serving.items()
    }
    hook = _after_fork_hook(code.generation, instance)
    batch_key = getattr(instance, BATCH_KEY, None) if batched in serving else None
    if batch_key is not None:  # it gets payloads, even if the method does not
        methods = {
            verb: replace(method, needs_payload=True) if method.name == batched else method
            for verb, method in methods.items()
        }
    is_cached = spec.models is not None and spec.models.is_cached  # a model must not be unloaded while a call uses it
    if code.definition is not None:
        from cortex.predictor.protobuf import bind_service  # noqa: PLC0415 - other APIs start faster

        service = bind_service(code.definition, instance, code.generation, is_cached)
        return BoundPredictor(code.generation, spec.path, {}, clients, service=service, after_fork_hook=hook)
    if is_cached:
        methods = {verb: method.in_scope() for verb, method in methods.items()}
    routes = bind_routes(instance, code.generation, is_cached)
    if clients is not None and clients.served_models is not None:
        served = clients.served_models
        return BoundPredictor(
            code.generation, spec.path, methods, clients, served, loads_on_demand=is_cached, routes=routes
        )
    inference_models = _inference_models(
        spec, code.generation, instance, None if batched else methods.get("POST"), is_cached
    )
    return BoundPredictor(
        code.generation,
        spec.path,
        methods,
        clients,
        inference_models,
        instance=instance,
        routes=routes,
        after_fork_hook=hook,
        batch_key=batch_key,
    )


def _after_fork_hook(generation: Generation, instance: object) -> Callable[[], object] | None:
    hook: Callable[[], object] | None = getattr(instance, AFTER_FORK, None)
    return hook if AFTER_FORK in generation.hooks else None


def _inference_models(
    spec: LoadSpec, generation: Generation, instance: object, post: BoundMethod | None, in_scope: bool
) -> Mapping[str, InferenceModel]:
    """Bind the method that answers the Open Inference Protocol: its own, or `post` if its payload has tensors.

    Raises: UserError.
    """
    name = generation.inference_method
    method = getattr(instance, name, None) if name is not None else None
    if name is None:
        return {}
    if method is None:
        if post is None or post.payload_type is None:
            return {}
        from cortex.predictor.inference.payload_model import bind_payload_model  # noqa: PLC0415 - few classes annotate tensors

        model = bind_payload_model(spec.api, post)
        return {spec.api: model} if model else {}
    from cortex.predictor.inference.inference_model import MethodModel  # noqa: PLC0415 - few classes have the method

    return {spec.api: MethodModel(spec.api, method, generation.hooks[name], in_scope)}


def _construct(
    target: type,
    generation: Generation,
    values: Mapping[str, Any],
    before_init: Callable[[object], None] | None = None,
) -> object:
    """Construct the user's object; `before_init` runs between `__new__` and `__init__`, which may load models.

    Raises: UserError.
    """
    declared = declared_names(target.__init__, generation.constructor_signature)  # type: ignore[misc]
    chosen = {name: values[name] for name in declared if name in values}
    with user_code(f"by {target.__name__}.__init__()"):
        if before_init is None:
            return target(**chosen)
        # The steps of type.__call__, with `before_init` in between.
        new: Any = target.__new__
        instance = new(target, **({} if new is object.__new__ else chosen))
        before_init(instance)
        instance.__init__(**chosen)
    return instance


def _find_class(module: ModuleType, generation: Generation, file: str) -> type:
    """Return the class that the generation requires. Raises: UserError."""
    name = generation.class_name or ""
    target = getattr(module, name, None)
    if inspect.isclass(target):
        return target
    if target is not None:
        raise UserError(f"{file}: {name} must be a class, but is {with_article(type(target).__name__)}")
    classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
    if foreign := find_foreign_class(generation, classes):
        fix = foreign[1]
    else:
        guess = nearest(name, classes)
        fix = f'did you mean class {guess}? rename it to "{name}"' if guess else "define it"
    raise UserError(f"{file}: class {name} is not defined; {fix}")


def _is_defined(target: Any, name: str) -> bool:
    """Return whether a class or module defines a function; `type.__call__` of a class does not count as a method."""
    function = getattr(target, name, None)
    return callable(function) and not isinstance(function, MethodWrapperType)


def _check_members(target: Any, generation: Generation, serving_methods: Mapping[str, str], file: str) -> None:
    """Check that `target` defines the required members with valid signatures. Raises: UserError."""
    where = f"{file}: " + (f"class {generation.class_name}: " if generation.class_name else "")
    routes = declared_routes(target)
    if routes and (problem := unsupported(generation)):
        raise UserError(f"{where}{routes[0][0]}(): {problem[0]}; {problem[1]}")
    is_complete = serving_methods or routes or generation.is_inference_only(lambda name: _is_defined(target, name))
    if generation.is_grpc and (missing := [name for name in generation.methods if name not in serving_methods]):
        raise UserError(f"{where}{missing[0]}(self, payload) is not defined; add it")
    if generation.methods and not is_complete:
        wanted = " or ".join(f"{name}()" for name in generation.methods)
        other = find_method_of_kind(generation, dir(target))
        fix = f"; {other[0]}() belongs to `kind: {other[1]}`" if other else ""
        raise UserError(f"{where}{wanted} is not defined{fix}")
    if generation.constructor_required or (generation.constructor and hasattr(target, generation.constructor)):
        _check_signature(target, generation.constructor, generation.constructor_signature, generation, file)
    for name in serving_methods:
        _check_signature(target, name, generation.method_signature, generation, file)
    for index, first in repeated(routes):
        name, route = routes[index]
        raise UserError(f"{where}{first}() and {name}() have the same route, {route}; change one of them")
    for name, route in routes:
        _check_signature(target, name, route.signature(generation), generation, file)
    for name, signature in generation.hooks.items():
        if name in generation.required_hooks and not callable(getattr(target, name, None)):
            raise UserError(f"{where}{name}({', '.join(('self', *signature.required))}) is not defined; add it")
        if hasattr(target, name):
            _check_signature(target, name, signature, generation, file)


def _check_signature(target: Any, name: str, signature: Signature, generation: Generation, file: str) -> None:
    function = getattr(target, name)
    if function is object.__init__:
        if not generation.constructor_required:
            return
        shown = ", ".join(("self", *signature.required))
        raise UserError(f"{file}: class {target.__name__}: __init__({shown}) is not defined; add it")
    declared = declared_arguments(function)
    if declared is None:
        return
    static = inspect.getattr_static(target, name)
    # A partial has `__get__` from Python 3.13 on, but binds nothing before 3.14.
    never_bound = isinstance(static, staticmethod | classmethod | functools.partial)
    is_bound_later = hasattr(type(static), "__get__") and not never_bound
    problems = find_problems(signature, declared, takes_self=generation.class_name is not None and is_bound_later)
    if not problems:
        return
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{file}:{code.co_firstlineno}: " if code else f"{file}: "
    if generation.class_name:
        where += f"class {generation.class_name}: "
    noun = "method" if generation.class_name else "function"
    shown = f'{where}invalid signature for {noun} "{name}({", ".join(map(str, declared))})"'
    raise UserError("\n".join(f"{shown}: {problem.message}; {problem.fix}" for problem in problems))
