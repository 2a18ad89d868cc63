"""Fields of the schema, and the file generations that can set them."""

from __future__ import annotations

from collections.abc import Iterator

from cortex.config.generations import GENERATIONS, HANDLER, SPLITTER, TASK
from cortex.config.schema import Api, ConfigModel

#: Set by the conversion itself: the generation, the name of `kind: deployment`, and the user's own keys and values.
BY_CONVERSION = {"handler.interface", "deployment", "as_written"}
#: Set by a deploy.
BY_DEPLOY = {"handler.dependencies.model_packages", "handler.models.pinned"}
ONLY_IN_OLDER_FILES = {"handler.model", "autoscaling.target_cpu_utilization"}


def fields_of(model: type[ConfigModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields; entries of lists are not sections."""
    for name, field in model.model_fields.items():
        section = next((arg for arg in (field.annotation, *_arguments(field.annotation)) if _is_model(arg)), None)
        if section is None:
            yield prefix + name
        else:
            yield from fields_of(section, f"{prefix}{name}.")


def _arguments(annotation: object) -> tuple[object, ...]:
    return () if getattr(annotation, "__origin__", None) is list else getattr(annotation, "__args__", ())


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, ConfigModel)


def test_each_field_has_a_key_in_current_files() -> None:
    writable = {field for generation in (HANDLER, TASK, SPLITTER) for field in generation.fields.values()}
    missing = set(fields_of(Api)) - writable - BY_CONVERSION - BY_DEPLOY - ONLY_IN_OLDER_FILES
    assert not missing, f"no key of cortex.yaml sets {sorted(missing)}: add them to config/generations.py"


def test_older_fields_have_a_key_in_older_files() -> None:
    writable = {field for generation in GENERATIONS for field in generation.fields.values()}
    assert writable >= ONLY_IN_OLDER_FILES


def test_each_key_sets_a_field_that_exists() -> None:
    known = {*fields_of(Api), "ignored", "not yet"}
    unknown = {field for generation in GENERATIONS for field in generation.fields.values()} - known
    assert not unknown
