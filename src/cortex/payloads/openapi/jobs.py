"""Paths of BatchAPIs, TaskAPIs and AsyncAPIs in OpenAPI documents: submissions, jobs and workloads."""

from __future__ import annotations

from cortex.lifecycle import ApiKind, JobStatus, WorkloadStatus
from cortex.payloads.json_object import Json
from cortex.payloads.openapi.api import DocumentedApi
from cortex.payloads.openapi.errors import json_content, of_operator, response, schema
from cortex.payloads.openapi.schemas import SchemaComponents, example_of
from cortex.payloads.signature import BodySignature, MethodSignature

Paths = dict[str, Json]

_JSON = "application/json"
_LINES = "application/x-ndjson"

_TEXT = {"type": "string"}
_TEXT_CONTENT: Json = {"text/plain": {"schema": _TEXT}}
_COUNT = {"type": "integer", "minimum": 0}
_TIME = {"type": ["string", "null"], "format": "date-time"}
_MAP = {"type": "object", "additionalProperties": True}
_BATCH_SIZE = {"type": "integer", "minimum": 1, "default": 1, "description": "Items per batch"}
_WORKERS = {"type": "integer", "minimum": 1, "maximum": 10_000, "description": "Maximum number of workers of the job"}
_GLOBS = {"type": "array", "items": _TEXT, "description": "Globs"}
_OPTIONS: Json = {
    "config": {**_MAP, "description": "Merged into the API's `config`"},
    "timeout": {"type": "integer", "minimum": 1, "description": "Maximum duration of the job in seconds"},
    "max_attempts": {"type": "integer", "minimum": 1, "maximum": 1000, "description": "Attempts at each batch"},
    "webhook": {"type": "string", "format": "uri", "description": "Receives the job in a POST request when it ends"},
}
_BATCH_OPTIONS: Json = {
    **_OPTIONS,
    "batch_timeout": {"type": ["number", "string"], "description": 'Maximum duration of a batch: seconds, or `"5m"`'},
    "isolate_failures": {"type": "boolean", "default": False, "description": "Divide failed batches in half"},
    "output": {"type": "string", "description": "Location to which the results are also written"},
}
_FILES: Json = {
    "type": "object",
    "description": "Requires `paths`",
    "properties": {
        "paths": {"type": "array", "items": _TEXT, "minItems": 1, "description": "Prefixes of the files"},
        "s3_paths": {"type": "array", "items": _TEXT, "deprecated": True, "description": "The older name of `paths`"},
        "includes": _GLOBS,
        "excludes": _GLOBS,
        "batch_size": _BATCH_SIZE,
    },
}
_COUNTS = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}

SCHEMAS: Json = {
    "FileItems": _FILES,
    "TaskSubmission": {"type": "object", "properties": _OPTIONS, "additionalProperties": False},
    "SubmittedJob": {
        "type": "object",
        "required": ["job_id"],
        "properties": {
            "job_id": _TEXT,
            "api_name": _TEXT,
            "kind": _TEXT,
            "workers": {"type": "integer"},
            "config": {"type": ["object", "null"], "additionalProperties": True},
            "start_time": _TIME,
            "total_batch_count": _COUNT,
            "message": {"type": ["string", "null"]},
        },
        "additionalProperties": True,
    },
    "JobStatus": {
        "type": "object",
        "required": ["job_id", "status"],
        "properties": {
            "job_id": _TEXT,
            "status": {"type": "string", "enum": sorted({status.code for status in JobStatus})},
            "message": {"type": ["string", "null"], "description": "Why the job ended, or what it waits for"},
            "start_time": _TIME,
            "end_time": _TIME,
            "batch_metrics": _COUNTS,
            "worker_counts": _COUNTS,
        },
        "additionalProperties": True,
    },
    "Job": {
        "type": "object",
        "required": ["job_status"],
        "properties": {"job_status": schema("JobStatus"), "endpoint": _TEXT, "api_spec": _MAP},
    },
    "StoppedJob": {"type": "object", "required": ["message"], "properties": {"message": _TEXT}},
    "AcceptedWorkload": {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "string", "format": "uuid"}},
    },
}


def job_paths(api: DocumentedApi, method: MethodSignature, schemas: SchemaComponents) -> Paths:
    """Return the paths of a BatchAPI or TaskAPI; the method's payload is one item."""
    is_task = api.kind is ApiKind.TASK
    content = _task_content(api) if is_task else _batch_content(api, method, schemas)
    errors = json_content("JobErrorResponse")
    uploads = [] if is_task else _upload_parameters()
    body = {"content": content, "required": not is_task}
    submit = {
        "operationId": "submit_job",
        "summary": method.summary or "Submit a job",
        "description": method.description or "The response means that the job is stored.",
        "parameters": uploads,
        "requestBody": body,
        "responses": {
            "200": response("The job", json_content("SubmittedJob")),
            **of_operator(api, errors, has_body=True, not_found=""),
        },
    }
    dry_run = {
        "operationId": "dry_run_job",
        "summary": "Only validate a submission",
        "parameters": [
            _parameter("dryRun", "query", {"const": True}, "Otherwise a job is submitted", required=True),
            *uploads,
        ],
        "requestBody": body,
        "responses": {
            "200": response(
                "The files that the job would read, one per line, then `validations passed`", _TEXT_CONTENT
            ),
            **of_operator(api, {**_TEXT_CONTENT, **errors}, has_body=True, not_found=""),
        },
    }
    not_found = of_operator(api, errors, has_body=False, not_found="The API has no job with this id")
    query = _parameter("jobID", "query", {"type": "string"}, "Id of the job", required=True)
    path = _parameter("job_id", "path", {"type": "string"}, "Id of the job", required=True)

    def operations(suffix: str, parameter: Json) -> Json:
        get = {
            "operationId": f"get_job{suffix}",
            "summary": "Get a job: its status and progress",
            "parameters": [parameter],
            "responses": {"200": response("The job", json_content("Job")), **not_found},
        }
        stop = {
            "operationId": f"stop_job{suffix}",
            "summary": "Stop a job",
            "parameters": [parameter],
            "responses": {"200": response("The job is stopped", json_content("StoppedJob")), **not_found},
        }
        return {"get": get, "delete": stop}

    return {
        # The same path with a slash: clients that are generated read one content type of each operation.
        f"{api.endpoint.rstrip('/')}/": {"post": dry_run},
        api.endpoint: {"post": submit, **operations("_by_query", query)},
        f"{api.endpoint.rstrip('/')}/{{job_id}}": operations("", path),
    }


def _class_name(api: DocumentedApi, suffix: str) -> str:
    """Return the name of a component of one API, after which generated clients name their class."""
    return "".join(part.capitalize() for part in api.name.split("-")) + suffix


def _task_content(api: DocumentedApi) -> Json:
    return {_JSON: {"schema": schema("TaskSubmission"), **api.examples}}


def _batch_content(api: DocumentedApi, method: MethodSignature, schemas: SchemaComponents) -> Json:
    item_schema = (method.payload or BodySignature()).schema
    item = schemas.add(item_schema)
    item_list = {
        "type": "object",
        "description": "The items themselves",
        "required": ["items"],
        "properties": {"items": {"type": "array", "items": item, "minItems": 1}, "batch_size": _BATCH_SIZE},
    }
    sources = {
        "item_list": schemas.register(_class_name(api, "Items"), item_list),
        "file_path_lister": {**schema("FileItems"), "description": "Paths of files as items"},
        "delimited_files": {**schema("FileItems"), "description": "JSON values in files as items"},
    }
    submission = {
        "type": "object",
        "description": "A job; exactly one of `item_list`, `file_path_lister` and `delimited_files` has its items.",
        "required": ["workers"],
        "properties": {"workers": _WORKERS, **sources, **_BATCH_OPTIONS},
    }
    return {
        _JSON: {
            "schema": schemas.register(_class_name(api, "Submission"), submission),
            **_submission_example(api, item_schema),
        },
        _LINES: {"schema": {**_TEXT, "description": "One item per line, as JSON; other fields are in the query"}},
    }


def _submission_example(api: DocumentedApi, item_schema: Json) -> Json:
    """Return the sample as an example: a submission, a list of items, or one item; an item of the type without one."""
    if api.sample is None:
        item = example_of(item_schema, item_schema.get("$defs", {}))
        item_list = {"items": [1 if item is None else item], "batch_size": 1}
        return {"examples": {"one": {"summary": "One item", "value": {"workers": 1, "item_list": item_list}}}}
    value = api.sample.value
    if not isinstance(value, dict) or "workers" not in value:
        items = value if isinstance(value, list) and value else [value]
        value = {"workers": 1, "item_list": {"items": items, "batch_size": 1}}
    return {"examples": {"sample": {"summary": api.sample.title, "value": value}}}


def _upload_parameters() -> list[Json]:
    """Return the fields of an upload of lines."""
    with_lines = "only with the content type application/x-ndjson"
    return [
        _parameter("workers", "query", _WORKERS, f"As in a submission, {with_lines}"),
        # Without its default: generated clients would send that, and submissions in JSON refuse it.
        _parameter("batch_size", "query", {"type": "integer", "minimum": 1}, f"Items per batch, {with_lines}"),
    ]


def _parameter(name: str, place: str, of: Json, description: str, *, required: bool = False) -> Json:
    return {"name": name, "in": place, "required": required, "description": description, "schema": of}


def workload_paths(api: DocumentedApi, method: MethodSignature, schemas: SchemaComponents) -> Paths:
    """Return the paths of an AsyncAPI."""
    payload, result = method.payload or BodySignature(), schemas.add(method.result.schema)
    is_older = api.is_of_older_file
    accepted, place = ("200", ()) if is_older else ("202", ("Location", "Retry-After"))
    errors = _TEXT_CONTENT if is_older else json_content("ErrorResponse")
    workload = {
        "type": "object",
        "required": ["id", "status"],
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "status": {"type": "string", "enum": [status.value for status in WorkloadStatus]},
            "result": result,
            "error": {"type": "string", "description": "Why the workload failed"},
            "timestamp": {"type": "string", "format": "date-time", "description": "When the workload ended"},
        },
    }
    wait = _parameter(
        "wait", "query", {"type": "number", "minimum": 0, "default": 0}, "Seconds to wait for the end of the workload"
    )
    name = _parameter("id", "path", {"type": "string", "format": "uuid"}, "Id of the workload", required=True)
    send = {
        "operationId": "send_workload",
        "summary": method.summary or "Send a workload",
        "description": method.description or "The response means that the workload is stored.",
        "requestBody": {
            "content": {
                each.media_type: {"schema": schemas.add(each.schema), **(api.examples if each is payload else {})}
                for each in (payload, *payload.alternatives)
            },
            "required": True,
        },
        "responses": {
            accepted: response("The workload is stored", json_content("AcceptedWorkload"), *place),
            **of_operator(api, errors, has_body=True, not_found=""),
        },
    }
    get = {
        "operationId": "get_workload",
        "summary": "Get a workload: its status and its result",
        "parameters": [name, wait],
        "responses": {
            "200": response(
                "The workload", {_JSON: {"schema": schemas.register(_class_name(api, "Workload"), workload)}}
            ),
            **of_operator(api, errors, has_body=False, not_found="The API has no workload with this id, or no longer"),
        },
    }
    return {api.endpoint: {"post": send}, f"{api.endpoint.rstrip('/')}/{{id}}": {"get": get}}
