"""Make of the user's class for tasks a call that runs one: constructed and called, once.

It must not know what a job is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from cortex.predictor.code import UserCode
from cortex.predictor.source_checks import declared_names


def task_call(code: UserCode, values: Mapping[str, Any]) -> Callable[[Any, str], Any]:
    """Return the call; what the constructor raises is raised by it, as the task has begun by then.

    `values` are what the constructor may ask for, and the task's `config`.
    """
    names = declared_names(code.target.__init__, code.generation.constructor_signature)
    given = {name: values[name] for name in names if name in values}

    def call(payload: Any, batch_id: str) -> Any:
        return code.target(**given)(copy.deepcopy(values["config"]))

    return call


def unless_it_exits(call: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Let `sys.exit()` end a task well, as it does a script; with any other code than 0 it fails the task."""

    def guarded(payload: Any, batch_id: str) -> Any:
        try:
            return call(payload, batch_id)
        except SystemExit as error:
            if error.code in (None, 0):
                return None
            raise

    return guarded
