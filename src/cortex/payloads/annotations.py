"""Annotations of the user's methods: from `payload: Iris` to the type of the payload and its JSON Schema.

    annotation                                    read by
    none, Any, object                             nothing: the payload is what the content type says
    dict, list, str, bytes, FormData              `payload_type`: no import
    numpy.ndarray, pandas.DataFrame, PIL images,  `annotated_arrays`, `annotated_files`: what the user's code has
    UploadFile                                    imported itself
    everything else                               pydantic, as FastAPI does: models, dataclasses, TypedDict, generics

Arrays, frames and images may also be parts of a type that pydantic reads: `list[numpy.ndarray]`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import typing
from collections import abc
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Union, get_args, get_origin

import orjson

from cortex.payloads.json_bodies import parse_json
from cortex.payloads.json_object import Json
from cortex.payloads.payload_type import (
    BYTES_SCHEMA,
    BYTES_TYPE,
    JSON_TYPE,
    TEXT_SCHEMA,
    TEXT_TYPE,
    BytesType,
    FormType,
    FormUnionType,
    ListType,
    ObjectType,
    Part,
    PayloadType,
    TextType,
    fields_of,
)
from cortex.payloads.signature import BodySignature
from cortex.payloads.validation import MAX_LISTED, PayloadError, from_pydantic

if typing.TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import SchemaValidator

#: In a larger body, each list is read up to its first mistake: pydantic needs about 300 bytes of memory per mistake,
#: and a body of 100 MiB can have 30 million.
LARGE_BYTES = 64 * 1024

_UNIONS = (Union, types.UnionType)
_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection)
_ITERATORS = (abc.Iterator, abc.Generator, abc.AsyncIterator, abc.AsyncGenerator, abc.AsyncIterable)
#: Parts of pydantic's core schemas that are no schemas.
_VALUES = ("default", "metadata")
#: Errors of pydantic about values that are no lists, or similar.
_LIST_ERRORS = ("list_type", "tuple_type", "set_type", "frozen_set_type")
_UNTYPED = (inspect.Parameter.empty, Any, object)


class AnnotationProblem(Exception):
    """An annotation that cannot be resolved, or that no payload can be read as; `str(error)` is the reason."""


def resolve(function: Any, name: str) -> Any:
    """Return the annotation of an argument, or of `return`; `Parameter.empty` if there is none.

    Raises: AnnotationProblem, for a name that exists only for type checkers, say.
    """
    try:
        owner = type(function.__self__) if inspect.ismethod(function) else None
        function = inspect.unwrap(function)
        annotations = getattr(function, "__annotations__", None)
        if not isinstance(annotations, dict) or name not in annotations:
            return inspect.Parameter.empty
        scope = getattr(function, "__globals__", {})
        holder = types.SimpleNamespace(__annotations__={name: annotations[name]})
        return typing.get_type_hints(holder, scope, dict(vars(owner)) if owner else None, include_extras=True)[name]
    except Exception as error:  # evaluates code of the user, which may be any text
        raise AnnotationProblem(_reason(error)) from error


def payload_type(annotation: Any) -> PayloadType | None:
    """Return the type of a payload; None if anything is allowed. Raises: AnnotationProblem."""
    try:
        bare, is_optional = _without_none(annotation)
        if _is_anything(bare):
            return None
        found: PayloadType = (
            _form_type(bare)
            or _form_union(bare)
            or _library_type(bare)
            or _builtin_type(bare)
            or _with_text_or_bytes(bare)
            or JsonType(annotation)
        )
    except Exception as error:  # the user's types run code of their own
        raise AnnotationProblem(_reason(error)) from error
    if is_optional:
        found.set_default(None)
    return found


def _is_anything(annotation: Any) -> bool:
    if get_origin(annotation) in _UNIONS:
        return any(map(_is_anything, get_args(annotation)))
    return isinstance(annotation, typing.TypeVar) or any(annotation is untyped for untyped in _UNTYPED)


def _form_type(annotation: Any) -> PayloadType | None:
    """Return the type of starlette's `FormData` and of uploads; None for all others."""
    return FormType() if getattr(annotation, "__name__", "") == "FormData" else _upload_type(annotation)


def _form_union(annotation: Any) -> PayloadType | None:
    """Return the type of a union with a form or an upload; None for all others."""
    members = get_args(annotation) if get_origin(annotation) in _UNIONS else ()
    for member in members:
        if form_type := _form_type(member):
            other = payload_type(Union[tuple(each for each in members if each is not member)])  # noqa: UP007 - as below
            return FormUnionType(form_type, other) if other else None
    return None


def element(annotation: Any) -> Any:
    """Return T of `list[T]`; any other annotation unchanged."""
    return (get_args(annotation) or (Any,))[0] if is_list(annotation) else annotation


def is_list(annotation: Any) -> bool:
    """Return whether an annotation is a list or a sequence of any kind."""
    cls = get_origin(annotation) or annotation
    return any(cls is each for each in _LISTS)


def takes_repeated(annotation: Any) -> bool:
    """Return whether a parameter of this type collects all values that a query string has for it."""
    bare, _ = _without_none(annotation.__origin__ if get_origin(annotation) is Annotated else annotation)
    cls = get_origin(bare) or bare
    return is_list(bare) or any(cls is each for each in (set, frozenset, tuple, abc.Set))


def takes_list(annotation: Any) -> bool:
    """Return whether a list of items can be of the annotated type: lists, arrays, frames, and anything."""
    bare, _ = _without_none(annotation)
    if is_list(bare) or _is_anything(bare):
        return True
    return _library_name(_class_of(bare)) in ("numpy.ndarray", "pandas.DataFrame")


def result_signature(annotation: Any) -> BodySignature:
    """Return what is known about the responses of a method with this return annotation. Never raises."""
    try:
        return _result_signature(annotation)
    except Exception:  # the annotation of a result changes nothing, so it may be anything
        return BodySignature()


def _result_signature(annotation: Any) -> BodySignature:
    origin = get_origin(annotation)
    if origin is tuple and len(get_args(annotation)) == 2 and _is_callable(get_args(annotation)[1]):
        return _result_signature(get_args(annotation)[0])
    if origin in _ITERATORS:
        item = _result_signature(get_args(annotation)[0])
        return replace(_as_item(item), alternatives=tuple(map(_as_item, item.alternatives)))
    bare, is_optional = _without_none(annotation)
    if bare is None or bare is types.NoneType or _is_anything(bare):
        return BodySignature()
    if isinstance(bare, type) and any(base.__module__ == "starlette.responses" for base in bare.__mro__):
        return BodySignature()
    found = None if is_optional else _library_type(bare) or _builtin_type(bare)
    if found is not None:
        return found.result_signature
    first, *others = _by_media_type(annotation)
    return replace(first, alternatives=tuple(others))


def _by_media_type(annotation: Any) -> list[BodySignature]:
    """Return the results of a type that pydantic knows: texts and bytes among them are not sent as JSON."""
    from pydantic import TypeAdapter  # noqa: PLC0415 - only for what is annotated

    by_type: dict[str, list[Any]] = {}
    for member in _members(annotation):
        by_type.setdefault(_media_type(member), []).append(member)
    found = []
    for media_type, members in by_type.items():
        adapter: TypeAdapter[Any] = TypeAdapter(_for_pydantic(Union[tuple(members)]))  # noqa: UP007 - not known before
        schema = BYTES_SCHEMA if media_type == BYTES_TYPE else adapter.json_schema(mode="serialization")
        found.append(BodySignature(schema, media_type, is_typed=True))
    return found


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, and the texts of a `Literal` apart from its other values."""
    if get_origin(annotation) in _UNIONS:
        for member in get_args(annotation):
            yield from _members(member)
    elif get_origin(annotation) is typing.Literal:
        values = get_args(annotation)
        for group in (
            tuple(v for v in values if isinstance(v, str)),
            tuple(v for v in values if not isinstance(v, str)),
        ):
            if group:
                yield typing.Literal[group]
    else:
        yield annotation


def _media_type(annotation: Any) -> str:
    """Return the content type of results of a type that is no union."""
    cls = annotation.__origin__ if get_origin(annotation) is Annotated else annotation
    if get_origin(cls) is typing.Literal:
        cls = type(get_args(cls)[0])
    if isinstance(cls, type) and issubclass(cls, str):
        return TEXT_TYPE
    return BYTES_TYPE if isinstance(cls, type) and issubclass(cls, bytes | bytearray | memoryview) else JSON_TYPE


def _as_item(body: BodySignature) -> BodySignature:
    """Return the signature of a stream whose items have a signature."""
    return replace(body, media_type="application/x-ndjson" if body.media_type == JSON_TYPE else body.media_type)


def _is_callable(annotation: Any) -> bool:
    return (get_origin(annotation) or annotation) is abc.Callable


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Return X of `X | None`, and whether None is allowed; X of `Annotated[X, "some words"]`, too."""
    if get_origin(annotation) is Annotated and all(type(item) is str for item in annotation.__metadata__):
        bare, is_optional = _without_none(annotation.__origin__)
        # Words beside an array are its datatype.
        return (annotation if _library_name(_class_of(bare)) == "numpy.ndarray" else bare), is_optional
    if get_origin(annotation) not in _UNIONS:
        return annotation, False
    members = [member for member in get_args(annotation) if member is not types.NoneType]
    is_optional = len(members) < len(get_args(annotation))
    return (members[0] if len(members) == 1 else annotation), is_optional


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _builtin_type(annotation: Any) -> PayloadType | None:
    """Return the type of a built-in that nothing has to be imported for; None for all others."""
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (dict, abc.Mapping, abc.MutableMapping) and arguments in ((), (str, Any), (Any, Any)):
        return ObjectType({"type": "object"})
    if origin is list and arguments in ((), (Any,)):
        return ListType({"type": "array", "items": {}})
    if annotation is str:
        return TextType(TEXT_SCHEMA)
    return BytesType(BYTES_SCHEMA) if annotation is bytes else None


def _class_of(annotation: Any) -> Any:
    """Return the class of `numpy.ndarray`, `NDArray[…]` and `Annotated[numpy.ndarray, …]`."""
    if get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    return get_origin(annotation) or annotation


def _library_name(cls: Any) -> str:
    """Return `<package>.<class>` of a class; "" for all else."""
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}" if isinstance(cls, type) else ""


def _library_type(annotation: Any) -> PayloadType | None:
    """Return the type of an array, frame, image or upload; None for all others."""
    if found := _upload_type(annotation):
        return found
    cls = _class_of(annotation)
    if not isinstance(cls, type):
        return None
    name = _library_name(cls)
    if name in ("numpy.ndarray", "pandas.DataFrame"):
        from cortex.payloads import annotated_arrays  # noqa: PLC0415 - imports numpy

        is_array = name == "numpy.ndarray"
        return annotated_arrays.array_type(annotation) if is_array else annotated_arrays.FrameType()
    if "PIL.Image.Image" in _names(cls):
        from cortex.payloads import annotated_files  # noqa: PLC0415 - as above

        return annotated_files.ImageType()
    return None


def _upload_type(annotation: Any) -> PayloadType | None:
    """Return the type of an upload, or of a list of them; None for all others."""
    is_many = is_list(annotation) and len(get_args(annotation)) == 1
    if "starlette.datastructures.UploadFile" not in _names(_class_of(element(annotation) if is_many else annotation)):
        return None
    from cortex.payloads import annotated_files  # noqa: PLC0415 - few payloads are files

    return annotated_files.UploadType(is_many)


def _names(cls: Any) -> list[str]:
    return [f"{base.__module__}.{base.__name__}" for base in cls.__mro__] if isinstance(cls, type) else []


# Types that pydantic reads.


def _with_text_or_bytes(annotation: Any) -> PayloadType | None:
    """Return the type of a union with `str` or `bytes`; None for all others."""
    members = get_args(annotation) if get_origin(annotation) in _UNIONS else ()
    if str not in members and bytes not in members:
        return None
    in_json = tuple(member for member in members if member is not bytes)
    return EitherType(JsonType(Union[in_json]), str in members, bytes in members)  # noqa: UP007 - as below


class EitherType(PayloadType):
    """A union of JSON with text or bytes, which are all bodies that are not JSON of the other types."""

    reads_bytes = True

    def __init__(self, in_json: JsonType, has_text: bool, has_bytes: bool) -> None:
        super().__init__(in_json.schema)
        self._default, self._is_required = "" if has_text else b"", False  # a text and a file may be empty
        others = ((has_text, TEXT_SCHEMA, TEXT_TYPE), (has_bytes, BYTES_SCHEMA, BYTES_TYPE))
        self.alternatives = tuple(BodySignature(schema, each, is_typed=True) for has, schema, each in others if has)
        self._in_json = in_json
        self._has_text = has_text
        self._has_bytes = has_bytes

    def from_json(self, value: Any, text: bytes) -> Any:
        return self._in_json.from_json(value, text)

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        with contextlib.suppress(orjson.JSONDecodeError, PayloadError):
            return self._in_json.from_json(parse_json(body), body)
        if self._has_bytes and not (self._has_text and media_type.startswith("text/")):
            return body
        return TextType({}).from_bytes(body, media_type)

    def from_form(self, form: Any) -> Any:
        return self._in_json.from_form(form)


class JsonType(PayloadType):
    """A type that pydantic reads from JSON."""

    def __init__(self, annotation: Any) -> None:
        from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 - only for what is annotated
        from pydantic.errors import PydanticInvalidForJsonSchema  # noqa: PLC0415 - as above

        self._error: type[ValidationError] = ValidationError
        self.annotation = annotation
        self._adapter: TypeAdapter[Any] = TypeAdapter(_for_pydantic(annotation))
        self._adapter.rebuild(raise_errors=True)
        _check_validators(self._adapter.core_schema)
        try:
            schema = self._adapter.json_schema()
        except PydanticInvalidForJsonSchema:
            schema = {}
        super().__init__(schema)

    def from_json(self, value: Any, text: bytes) -> Any:
        validator = self._adapter.validator if len(text) <= LARGE_BYTES else self._fail_fast
        try:
            # Not of `value`: as JSON, dates and the like are also read by types that are declared strict.
            return validator.validate_json(text)
        except self._error as error:
            raise self._problems(error, value, text) from None

    def _problems(self, error: ValidationError, value: Any, text: bytes) -> PayloadError:
        if error.error_count() > MAX_LISTED:
            try:
                self._fail_fast.validate_json(text)
            except self._error as fewer:
                return from_pydantic(fewer, value, total=error.error_count())
        return from_pydantic(error, value)

    def from_form(self, form: Any) -> Any:
        fields = fields_of(form)
        try:
            return self._adapter.validator.validate_python(fields)
        except self._error as error:
            lists = _lists_of_one(error, fields)
            if not lists:
                raise from_pydantic(error, fields) from None
        fields |= lists
        try:
            return self._adapter.validator.validate_python(fields)
        except self._error as error:
            raise from_pydantic(error, fields) from None

    @functools.cached_property
    def _fail_fast(self) -> SchemaValidator:
        from pydantic_core import SchemaValidator  # noqa: PLC0415 - as above

        return SchemaValidator(_failing_fast(self._adapter.core_schema), _use_prebuilt=False)


def _check_validators(schema: Any) -> None:
    """Raise TypeError for a validator that can't be called as pydantic calls it: with the value and information on it.

    pydantic takes those of `__get_validators__`, as models and dataclasses of `pydantic.v1` have it, unchecked.
    """
    if not isinstance(schema, dict):
        for each in schema if type(schema) in (list, tuple) else ():
            _check_validators(each)
        return
    function = schema.get("function")
    if schema.get("type") == "function-plain" and isinstance(function, dict) and function["type"] == "with-info":
        validator = function["function"]
        try:
            signature = inspect.signature(validator)
        except (TypeError, ValueError):  # written in C
            return
        try:
            signature.bind(None, None)
        except TypeError:
            owner = getattr(validator, "__self__", validator)
            name = getattr(owner, "__name__", repr(owner))
            raise TypeError(f"{name} is a type for pydantic V1, which pydantic V2 can't read") from None
    for key, value in schema.items():
        if key not in _VALUES:
            _check_validators(value)


def _lists_of_one(error: ValidationError, fields: Json) -> Json:
    """Return the fields of a form that should have been lists, and occurred once, as lists."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    names = {name for each in problems if each["type"] in _LIST_ERRORS for name in each["loc"]}
    return {name: [value] for name, value in fields.items() if name in names and not isinstance(value, list)}


def _failing_fast(schema: Any) -> Any:
    """Return a copy of pydantic's core schema that reads each list up to its first mistake."""
    if isinstance(schema, dict):
        copy = {key: value if key in _VALUES else _failing_fast(value) for key, value in schema.items()}
        return copy | {"fail_fast": True} if copy.get("type") in ("list", "tuple", "set", "frozenset") else copy
    return type(schema)(map(_failing_fast, schema)) if type(schema) in (list, tuple) else schema


def _for_pydantic(annotation: Any) -> Any:
    """Return an annotation whose arrays, frames and images pydantic can read, at any depth of generics."""
    found = _library_type(annotation)
    if found is not None:
        return Annotated[Any, Part(found)]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[(_for_pydantic(arguments[0]), *arguments[1:])]
    if origin in _UNIONS:
        return Union[tuple(map(_for_pydantic, arguments))]  # noqa: UP007 - not known before
    if (
        origin or annotation
    ) is abc.Iterable:  # pydantic would validate an element only when the user's code reaches it
        return list[_for_pydantic((arguments or (Any,))[0])]  # type: ignore[misc]
    if origin is not None and origin is not typing.Literal:
        converted = tuple(map(_for_pydantic, arguments))
        return annotation if converted == arguments else origin[converted]
    if sys.version_info < (3, 12) and type(annotation) is type(_Example):
        return _extended_typed_dict(annotation)
    return annotation


class _Example(typing.TypedDict):
    """A class for the type of such classes, which `typing` does not name."""


def _extended_typed_dict(annotation: Any) -> Any:
    """Return a TypedDict of `typing` as one of `typing_extensions`, which pydantic requires before Python 3.12."""
    from typing_extensions import TypedDict  # noqa: PLC0415 - comes with pydantic

    fields: Json = {}
    for name, hint in typing.get_type_hints(annotation, include_extras=True).items():
        is_marked = get_origin(hint) in (typing.Required, typing.NotRequired)
        inner = get_args(hint)[0] if is_marked else hint
        is_required = get_origin(hint) is typing.Required if is_marked else name in annotation.__required_keys__
        marker: Any = typing.Required if is_required else typing.NotRequired
        fields[name] = marker[_for_pydantic(inner)]
    return TypedDict(annotation.__name__, fields)  # type: ignore[operator]
