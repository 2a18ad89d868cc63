"""Where a job's items come from, as the JSON that is stored with it: enough to begin anew, without the items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.jobs.spec import DelimitedFiles, FilePathLister, ItemList, RetryOf, Source, TaskCall, Upload

_FILES: dict[str, type[FilePathLister]] = {"file_path_lister": FilePathLister, "delimited_files": DelimitedFiles}


def source_to_json(source: Source) -> dict[str, Any]:
    """Return a source without its items."""
    if isinstance(source, RetryOf):
        return {"kind": "retry_of", "retry_of": source.job_id}
    if isinstance(source, TaskCall):
        return {"kind": "task"}
    if isinstance(source, FilePathLister):
        kind = next(name for name, kind in _FILES.items() if kind is type(source))
        globs = {"includes": list(source.includes), "excludes": list(source.excludes)}
        return {"kind": kind, "paths": list(source.paths), **globs, "batch_size": source.batch_size}
    return {"kind": "item_list" if isinstance(source, ItemList) else "upload", "batch_size": source.batch_size}


def source_from_json(data: Mapping[str, Any]) -> Source:
    """Return the source; an item list comes back without items."""
    if "retry_of" in data:
        return RetryOf(data["retry_of"])
    kind = data["kind"]
    if kind == "task":
        return TaskCall()
    if kind in _FILES:
        return _FILES[kind](tuple(data["paths"]), data["batch_size"], tuple(data["includes"]), tuple(data["excludes"]))
    return ItemList([], data["batch_size"]) if kind == "item_list" else Upload(data["batch_size"])
