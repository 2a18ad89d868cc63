"""Values that look like secrets: whoever can pull an image can read them. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from cortex.config.rules.violations import Violation
from cortex.config.validate import CheckedFile
from cortex.errors import Diagnostic
from cortex.masking import is_secret, mask_secrets
from cortex.projects.key_files import find_key_files
from cortex.projects.project import ProjectFiles

_INDEX_WITH_CREDENTIALS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s@]+@", re.IGNORECASE)
_COMMENT = re.compile(r"(^|\s)#.*")
_READ_ENV = "read it from an environment variable of .env instead"
_ALLOW = "or add `--allow-secret {}` if it is none"


def secret_problems(checked: CheckedFile, project: ProjectFiles, allowed: Collection[str]) -> list[Diagnostic]:
    """Return a diagnostic for each file with a key, and for values and package indexes that look like secrets.

    `allowed` are paths of files, names of variables, and of keys of `config` and of submissions, which may be in the
    image.
    """
    found: list[Diagnostic] = []
    for file in find_key_files(project):
        if file.path not in allowed:
            message = f"has {file.what}, which everyone who can pull the image could use"
            fix = f"list it in .cortexignore and mount it; {_ALLOW.format(file.path)}"
            found.append(Diagnostic(file.path, file.line, int(file.line > 0), "", message, fix))
    for entry in checked.checked:
        schedule = entry.api.schedule
        for field, values, fix in (
            ("handler.env", entry.api.handler.env, "move it to .env, which is not part of the image"),
            ("handler.config", entry.api.handler.config, _READ_ENV),
            ("schedule.submission", schedule.submission if schedule is not None else {}, _READ_ENV),
        ):
            for path in secret_paths(values):
                if path[-1] not in allowed:
                    message = f"{path[-1]} looks like a secret, and everyone who can pull the image could read it"
                    violation = Violation((".".join((field, *path)),), message, f"{fix}; {_ALLOW.format(path[-1])}")
                    # A key with a dot is no path to a node; the section is.
                    where = entry.point_at(violation) or entry.point_at(violation._replace(fields=(field,)))
                    found += [where] if where else []
        pip = entry.api.handler.dependencies.pip
        for number, line in enumerate(project.text(pip).splitlines(), 1):
            if match := _INDEX_WITH_CREDENTIALS.search(_COMMENT.sub("", line)):
                fix = "give the index to uv and pip by UV_INDEX_URL and PIP_INDEX_URL of the base image"
                message = "the credentials in this URL would be readable in the image"
                found.append(Diagnostic(pip, number, match.start() + 1, "", message, fix))
    return list(dict.fromkeys(found))


def secret_paths(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each text in `values` that looks like a secret, by its key or by itself."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from secret_paths(value, (*path, str(key)))
    elif isinstance(values, list):
        for value in values:
            yield from secret_paths(value, path)
    elif (
        isinstance(values, str) and path and values.strip() and (is_secret(path[-1]) or mask_secrets(values) != values)
    ):
        yield path
