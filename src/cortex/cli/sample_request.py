"""The command that sends a request to a deployed API: one that works when it is pasted, or what to send."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cortex.predictor.request_arguments import RequestArguments, request_arguments

_SAMPLE_NAME = "sample.json"
#: Assumed if the user's method can't be read.
_DEFAULT = RequestArguments("POST", ())


def sample_request(api: dict[str, Any], folder: Path, ca_file: str = "") -> list[str]:
    """Return the lines that say how to call an API whose project is `folder`; `ca_file` has the CAs to trust."""
    spec = api["spec"]
    certificates = f" --cacert {shlex.quote(ca_file)}" if ca_file else ""
    key = ' -H "X-API-Key: $CORTEX_API_KEY"' if spec.get("networking", {}).get("auth") == "api_key" else ""
    url = f"{certificates} {shlex.quote(api['endpoint'])}{key}"
    method, sample = _arguments(spec, folder), _sample(spec, folder)
    if method.payload_keys is None and not method.query_keys:
        return [f"curl{_verb(method, default='GET')}{url}"]
    if sample is not None and not method.query_keys:
        body = shlex.quote(f"@{sample}")
        return [f"curl{_verb(method, default='POST')}{url} -H 'content-type: application/json' -d {body}"]
    if method.query_keys or method.verb != "POST":
        return [f"send {method.verb} with {' and '.join(_parts(method))}"]
    file, body = ("FILE.json", _parts(method)[0]) if method.payload_keys else ("FILE", "the body, for example JSON")
    return [
        f"cortex predict {spec['name']} {file}",
        f"  {file} is {body}; with it as {_SAMPLE_NAME}, the next deploy shows a command for curl",
    ]


def _verb(method: RequestArguments, default: str) -> str:
    return "" if method.verb == default else f" -X {method.verb}"


def _parts(method: RequestArguments) -> list[str]:
    """Name the parts of a request."""
    parts = []
    if method.payload_keys is not None:
        parts.append(f"a JSON body{f' with {_names(method.payload_keys)}' if method.payload_keys else ''}")
    if method.query_keys:
        parts.append(f"the query parameters {_names(method.query_keys)}")
    return parts


def _names(keys: Sequence[str]) -> str:
    return ", ".join(map(json.dumps, keys))


def _sample(spec: dict[str, Any], folder: Path) -> Path | None:
    """Return the sample that the replicas have answered, or the one of the project."""
    names = (spec.get("readiness"), _SAMPLE_NAME)
    return next(
        (
            folder / name
            for name in names
            if name is not None and not name.startswith("/") and (folder / name).is_file()
        ),
        None,
    )


def _arguments(spec: dict[str, Any], folder: Path) -> RequestArguments:
    handler = spec.get("handler")
    if handler is None or handler["path"] is None:  # a TrafficSplitter, or a model without code
        return _DEFAULT
    try:
        text = (folder / handler["path"]).read_text(errors="replace")
    except OSError:
        return _DEFAULT
    has_models = handler.get("models") is not None
    return request_arguments(text, handler["interface"], handler["type"], has_models, spec["kind"]) or _DEFAULT
