"""One API as it was read, with what is wrong in it, and where its fields are in the user's file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from cortex.config.conversion import Draft
from cortex.config.schema import Api
from cortex.errors import Diagnostic


class Violation(NamedTuple):
    """A broken rule. It points at the first of `fields` that the user wrote, and needs all of them to be right.

    In the message `{got}` stands for what the user wrote there, and `{handler.path}` for the key of that field.
    """

    fields: tuple[str, ...]
    message: str
    fix: str = ""


#: A field in the message of a broken rule.
_FIELD = re.compile(r"\{(handler(?:\.[a-z_]+)+)\}")

#: Places whose mistakes leave no doubt about which code is meant.
_BESIDE_THE_CODE = frozenset(
    {
        "handler.python_path",
        "handler.config",
        "handler.env",
        "handler.model",
        "handler.models",
        "handler.signature_key",
        "handler.tensorflow_serving",
        "handler.processes_per_replica",
        "handler.threads_per_process",
        "handler.server_side_batching",
        "handler.log_level",
    }
)


@dataclass(frozen=True)
class CheckedApi:
    """An API with the fields that are wrong in it; those hold defaults and stand-ins."""

    draft: Draft
    api: Api
    wrong: frozenset[str]

    @property
    def is_readable(self) -> bool:
        """Tell whether the user's code can be found and its interface is known."""
        aside = tuple(f"{field}." for field in _BESIDE_THE_CODE)
        return not any(field.startswith("handler") and not f"{field}.".startswith(aside) for field in self.wrong)

    def point_at(self, violation: Violation) -> Diagnostic | None:
        """Locate a broken rule; None if one of the values it is about is wrong in itself."""
        if self.wrong.intersection(violation.fields):
            return None
        draft = self.draft
        for field in violation.fields:
            if node := draft.find(*field.split(".")):
                message = re.sub(_FIELD, lambda found: draft.key(found[1]), violation.message)
                message = message.replace("{got}", str(node.plain()))
                # A section is where its key is; its value starts on the next line.
                at = draft.document.at_key if isinstance(node.value, dict) else draft.document.at_value
                return at(node, message, violation.fix)
        holder, path = draft.missing(violation.fields[0])
        return draft.document.diagnostic(holder.key_line, holder.key_column, path, violation.message, violation.fix)
