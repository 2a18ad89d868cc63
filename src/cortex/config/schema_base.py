"""What all sections of the schema are made of: the base of the models, and types of fields that several use."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from cortex.config.values import env_name, env_value, integer, number, problem, quote, text


class Model(BaseModel):
    """Frozen, strict about keys; a null for a field in `null_means_default` is as if the key were absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    null_means_default: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.null_means_default}


def _project_path(value: object) -> str:
    path = text(value)
    if path.startswith(("/", "~")):
        raise problem(
            f"{quote(path)} must be relative to the project folder", "write it as seen from the project folder"
        )
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise problem(f"{quote(path)} must be inside the project folder", "move it into the project folder")
    return "/".join(parts)


def folder_on_path(value: object) -> str:
    """Read a folder of the project that goes on the Python path."""
    path = _project_path(value)
    if not path:
        raise problem(f"{quote(value)} is the project folder, which is on the Python path already", "remove the key")
    return path + "/"


Text = Annotated[str, BeforeValidator(text)]
Count = Annotated[int, BeforeValidator(integer(above=0))]
Fraction = Annotated[float, BeforeValidator(number(at_least=0, below=1))]
EnvName = Annotated[str, BeforeValidator(env_name)]
EnvValue = Annotated[str, BeforeValidator(env_value)]
ProjectPath = Annotated[str, BeforeValidator(_project_path)]
