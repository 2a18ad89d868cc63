"""Broken rules, and their position in the user's file."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from cortex.config.api_spec import complete
from cortex.config.conversion import Draft
from cortex.config.schema import Api
from cortex.errors import Diagnostic


class Violation(NamedTuple):
    """A broken rule: it points at the first of `fields` that the user wrote, and is dropped if one of them is invalid.

    In the message, `{got}` is replaced by the value and `{handler.path}` by the user's key for that field.
    """

    fields: tuple[str, ...]
    message: str
    fix: str = ""


#: A field in the message of a violation.
_FIELD = re.compile(r"\{(handler(?:\.[a-z_]+)+)\}")

#: Fields whose mistakes do not affect where the code is.
_FIELDS_UNRELATED_TO_CODE = frozenset(
    {
        "handler.python_path",
        "handler.command",
        "handler.strip_prefix",
        "handler.start_timeout_s",
        "handler.config",
        "handler.env",
        "handler.model",
        "handler.models",
        "handler.signature_key",
        "handler.tensorflow_serving",
        "handler.processes_per_replica",
        "handler.threads_per_process",
        "handler.pin_processes",
        "handler.preload",
        "handler.server_side_batching",
        "handler.log_level",
        "handler.protobuf_path",
    }
)


@dataclass(frozen=True)
class CheckedApi:
    """A validated API; its invalid fields, listed in `invalid_fields`, hold defaults or stand-ins."""

    draft: Draft
    api: Api
    invalid_fields: frozenset[str]

    @property
    def is_readable(self) -> bool:
        """True if the location and the interface of the user's code are valid."""
        unrelated = tuple(f"{field}." for field in _FIELDS_UNRELATED_TO_CODE)
        return not any(
            field.startswith("handler") and not f"{field}.".startswith(unrelated) for field in self.invalid_fields
        )

    def with_api(self, api: Api) -> CheckedApi:
        """Return a copy with the API in a form that depends on the project."""
        if api.as_written is not None:
            api = api.model_copy(update={"as_written": complete(self.draft, api)})
        return replace(self, api=api)

    def point_at(self, violation: Violation) -> Diagnostic | None:
        """Return the diagnostic of a violation; None if one of its fields is already invalid."""
        if self.invalid_fields.intersection(violation.fields):
            return None
        draft = self.draft
        for field in violation.fields:
            if node := draft.find(*field.split(".")):
                message = re.sub(_FIELD, lambda found: draft.last_key(found[1]), violation.message)
                message = message.replace("{got}", str(node.plain()))
                # Point at the key of a section; its value starts on the next line.
                at = draft.document.at_key if isinstance(node.value, dict) else draft.document.at_value
                return at(node, message, violation.fix)
        written = draft.written_key(violation.fields[0])
        if any(written.startswith(f"{key}.") for key in draft.rejected):
            return None
        holder, path = draft.missing(violation.fields[0])
        return draft.document.diagnostic(holder.key_line, holder.key_column, path, violation.message, violation.fix)
