"""The meaning of each field, in Markdown: for editors, and for the tables of `docs/reference/configuration.md`.

`make docs` writes the column `meaning` there. Keys are fields of the current form, without their units.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "name": "the API's name, unique on the operator",
        "kind": (
            "the type of the API: it responds to requests at once or [later](#asyncapi), runs [batch "
            "jobs](#batchapi) or [tasks](#taskapi), or [divides requests](#apis) among other APIs"
        ),
        "readiness": (
            "RealtimeAPI only: the JSON body of a POST request that each new process must process before it "
            "receives requests. `readiness: sample.json`. With `type: command`, the path of a GET request. "
            "`readiness: /health`"
        ),
        "deployment": "only in files with `kind: deployment`, where it is an entry of its own with a `name`",
        "handler.type": (
            "`python`, the type of the exported models that the code uses, or the type of an "
            "[application](../howto/applications.md); `model` detects the format of models without code; "
            "`command` runs a [server of your own](../howto/commands.md)"
        ),
        "handler.path": "the file with the class; without it, cortex itself answers requests with the models",
        "handler.app": (
            "only with `type: asgi` and `wsgi`: the application in `path`, or the function that returns it"
        ),
        "handler.command": (
            "only with `type: command`: the program and its arguments, which may contain `$PORT`, "
            "`$CORTEX_SOCKET` and other environment variables"
        ),
        "handler.strip_prefix": (
            "only with `type: command`: whether the server gets paths without the endpoint: `/v1/models` for "
            "`/llm/v1/models`"
        ),
        "handler.start_timeout": (
            "only with `type: command`: the longest time until the server is ready; then it is ended and started again"
        ),
        "handler.protobuf_path": (
            "the definition of a [gRPC](../howto/grpc.md) service, a `.proto` file of the project; the class then"
            " has a method for each rpc"
        ),
        "handler.python_path": "a folder to add to the Python path, in addition to the project's",
        "handler.config": "passed to `__init__` as `config` (to module functions as `metadata`)",
        "handler.env": "environment variables",
        "handler.model": "only with module functions: a model, passed to `init` as `model_path`",
        "handler.signature_key": (
            "only with `type: tensorflow`: the signature of a model to run, for example `serving_default`, unless"
            " `models` sets another one"
        ),
        "handler.tensorflow_serving": (
            "only with `type: tensorflow`: the TensorFlow Serving server that runs the models; `local` starts "
            "`tensorflow_model_server` from the `PATH`. `tensorflow_serving: serving.internal:8500`"
        ),
        "handler.processes_per_replica": (
            "processes per replica, each with its own object of the class; several processes share the "
            "processors: `OMP_NUM_THREADS` is set accordingly, unless `env` sets it"
        ),
        "handler.threads_per_process": "simultaneous calls per process; `async def` methods need only one",
        "handler.pin_processes": (
            "each process of a replica runs only on [processors of its "
            "own](../explanation/request.md#processors-and-threads), as many for each process. Processes of other"
            " replicas may run on them too"
        ),
        "handler.preload": (
            "the class is constructed once per replica, and its processes are forked from that one: they [share "
            "the memory of the model](../howto/shared-memory.md)"
        ),
        "handler.log_level": "lowest level of the logger that is logged",
        "handler.models.path": (
            "one model: its folder, with or without versions; with `type: onnx` also the file itself. `path: "
            "s3://my-bucket/iris/`"
        ),
        "handler.models.paths": "a list of models, as an alternative to `path` and `dir`",
        "handler.models.dir": "a folder that contains one folder per model, with the model's name. `dir: models`",
        "handler.models.signature_key": (
            "only with `type: tensorflow`: the signature to run, for models without their own"
        ),
        "handler.models.poll_interval": (
            "interval between checks for changes; a change is served within two intervals"
        ),
        "handler.models.cache_size": (
            "maximum number of model versions in memory; others are loaded on their first use"
        ),
        "handler.models.disk_cache_size": "maximum number of this API's model versions on disk",
        "handler.models.cache_memory": (
            "maximum memory of models; others are loaded on their first use. Alone, or together with the two sizes"
        ),
        "handler.models.canary": (
            "RealtimeAPI only: a new version of a model is first [tried with a part of the "
            "requests](../howto/canary.md#try-new-versions-of-a-model), as `update_strategy.canary` says. Not "
            "with `dir` or caching"
        ),
        "handler.models.trust": (
            "only with `type: model`: `pickle` loads joblib and pickle files from outside of the project, and "
            "other models that can run code"
        ),
        "handler.models.paths.name": "the model's name in `get_model` and `predict`",
        "handler.models.paths.path": "the location of the model",
        "handler.models.paths.signature_key": "only with `type: tensorflow`: the signature to run",
        "handler.server_side_batching.max_batch_size": (
            "maximum number of requests per call. With `type: tensorflow` at most processes × threads; with "
            "`type: python` the number of threads does not matter"
        ),
        "handler.server_side_batching.batch_interval": (
            "maximum wait of a batch for further requests, from its first request or from the end of the call "
            "during which that arrived; a single request does not wait"
        ),
        "handler.server_side_batching.isolate_failures": (
            "a failed batch is repeated in halves, so that only the requests that cause the error fail"
        ),
        "handler.dependencies.pip": "pip requirements",
        "handler.dependencies.conda": "conda packages",
        "handler.dependencies.shell": "a bash script",
        "networking.endpoint": "the URL path",
        "networking.timeout": (
            "maximum duration of a request, including its wait in the queue; then the response is 504 and the "
            "call is ended. For an AsyncAPI, maximum duration of a workload"
        ),
        "networking.max_body_size": (
            "maximum size of a request's body; above it the response is 413. For a BatchAPI or TaskAPI: maximum "
            "size of a JSON submission, `10Mi` by default; NDJSON uploads have that of `max_stored_size`"
        ),
        "networking.max_stored_size": (
            "AsyncAPI, BatchAPI and TaskAPI only: maximum size of what callers of the endpoint have stored: "
            "workloads, items, results and dead letters. What has ended makes room in the background, the "
            "oldest first; until then, the response is 503"
        ),
        "networking.max_batch_size": (
            "BatchAPI only: maximum size of a batch in bytes: its items as JSON and the commas between them"
        ),
        "networking.sticky": (
            "RealtimeAPI only: a cookie sends all requests of a client to the [same "
            "process](../howto/applications.md#keep-sessions-in-one-process). On by itself for an application "
            "whose file imports `gradio`. Only in files of the current form"
        ),
        "networking.access_log": (
            "the gateway writes one JSON line per request to the [access log](../howto/monitor.md#the-access-log)"
        ),
        "networking.auth": (
            "whether callers need an [API key](../howto/api-keys.md). A TrafficSplitter also requires one if one "
            "of its APIs does"
        ),
        "networking.docs": (
            "whether `<endpoint>/openapi.json` and the page `<endpoint>/docs` [describe the "
            "API](../howto/openapi.md). They need no API key"
        ),
        "networking.on_disconnect": (
            "RealtimeAPI only: what becomes of [a call whose client "
            "disconnects](interfaces.md#disconnected-clients): it runs to its end, is cancelled, or its process "
            "is also killed if it still runs a second later. Only in files of the current form"
        ),
        "networking.websocket_idle_timeout": (
            "`type: asgi` and `command` only: the longest time without a message in either direction on a "
            "[WebSocket](../howto/applications.md#websockets), which is then closed with the code 1001. Only in "
            "files of the current form"
        ),
        "networking.record.share": "part of the requests that are recorded, chosen by the request id",
        "networking.record.max_cpu": (
            "CPU time that recording takes at most, in each process, as a part of one core; further requests are "
            "counted and not recorded; `100%` is no limit"
        ),
        "networking.record.max_size": "size of the recording in the folder or bucket; the oldest files make room",
        "networking.record.redact": (
            "what is removed: paths in JSON bodies, names of headers and of query parameters. `redact: "
            '["$.user.email", "$..password", X-User]`'
        ),
        "networking.record.to": (
            "a folder of the machine on which a replica runs, or a bucket. `to: s3://my-bucket/recordings`"
        ),
        "networking.cors.origins": (
            "the origins whose pages may read responses; every origin if the section `cors` is missing"
        ),
        "networking.cors.headers": "the headers that requests of these pages may have",
        "networking.cors.credentials": "whether requests of these pages may have cookies",
        "networking.local_paths": (
            "BatchAPI only: folders on the operator's machine that submissions through the endpoint may read and "
            "write. `cortex submit` and the Python client may use any folder"
        ),
        "networking.buckets": (
            "BatchAPI only: buckets, or folders in buckets, that submissions through the endpoint may read and "
            "write. `cortex submit` and the Python client may use any bucket. `buckets: [s3://my-bucket/inbox]`"
        ),
        "networking.webhook_hosts": (
            "BatchAPI and TaskAPI only: hosts, addresses and networks that [webhooks](job-submission.md#places) "
            "of submissions through the endpoint may reach besides public addresses. `webhook_hosts: "
            "[hooks.internal, 10.0.0.0/8]`"
        ),
        "compute.cpu": "cores",
        "compute.mem": "memory",
        "compute.gpu": "whole GPUs",
        "compute.inf": "Inferentia chips; with `type: tensorflow`, models must be compiled for them",
        "compute.mem_limit": "memory limit of a process; a process that exceeds it ends as `out of memory`",
        "compute.node_groups": (
            "the [node groups](../howto/ray.md#node-groups) of a cluster on which replicas may run; without "
            "effect on one machine"
        ),
        "autoscaling.min_replicas": (
            "minimum number of replicas; with 0, an idle API has none, and the first request waits for one"
        ),
        "autoscaling.max_replicas": "maximum number of replicas",
        "autoscaling.init_replicas": "replicas after the first deploy",
        "autoscaling.target_replica_concurrency": "target number of requests in flight per replica",
        "autoscaling.max_replica_concurrency": (
            "maximum number of running and waiting requests per replica; above it the response is 503"
        ),
        "autoscaling.window": "period over which the load is averaged",
        "autoscaling.downscale_stabilization_period": "time for which a lower load must last before scaling down",
        "autoscaling.upscale_stabilization_period": "time for which a higher load must last before scaling up",
        "autoscaling.max_downscale_factor": "limit of one step down, as a factor of the current number",
        "autoscaling.max_upscale_factor": "limit of one step up, as a factor of the current number",
        "autoscaling.downscale_tolerance": "relative decrease of the load that is ignored",
        "autoscaling.upscale_tolerance": "relative increase of the load that is ignored",
        "autoscaling.target_cpu_utilization": (
            "only in files up to 0.13, under `compute`: target CPU usage in percent"
        ),
        "update_strategy.max_surge": "additional replicas during an update",
        "update_strategy.max_unavailable": "unavailable replicas during an update",
        "update_strategy.canary": (
            "a new revision gets a part of the requests first, and replaces the old one only if it is not worse"
        ),
        "update_strategy.canary.shadow": (
            "before the first step, the new revision gets copies of all requests; its responses are discarded"
        ),
        "update_strategy.canary.steps": "parts of the requests that the new revision gets, one after the other",
        "update_strategy.canary.min_requests": "requests that the new revision must answer in each step",
        "update_strategy.canary.max_error_increase": "tolerated increase of the part of requests that fail",
        "update_strategy.canary.max_latency_increase": "tolerated increase of the median and of the 99th percentile",
        "update_strategy.canary.max_prediction_shift": (
            "tolerated change of the part of any class among the predictions; without it, they are not compared"
        ),
        "update_strategy.canary.max_disagreement": (
            "tolerated part of the copied requests with another prediction, or without a `tracker` another "
            "response; without it, they are not compared"
        ),
        "update_strategy.canary.confidence": "probability that a revision that is not worse is not rolled back",
        "update_strategy.canary.give_up_after": "time after which `on_no_decision` applies",
        "update_strategy.canary.on_no_decision": "what happens if the requests do not suffice for a decision",
        "tracker.key": "the key of the value in the response; omit it if the response is the value itself",
        "tracker.model_type": "whether classes are counted or numbers averaged",
        "tracker.baseline": (
            "the distribution with which predictions are compared to detect drift: a JSON list of predictions, "
            'or, for classes, a map of counts, `{"cat": 700, "dog": 300}`'
        ),
        "tracker.window": (
            "minimum number of predictions per comparison. Predictions are read every 5 s, and those of one "
            "reading are in the same window"
        ),
        "tracker.false_alarm_rate": "probability that a window is reported as drift although nothing has changed",
        "apis": "the RealtimeAPIs among which the requests of a TrafficSplitter are divided",
        "apis.name": "the name of the API",
        "apis.weight": "percentage of the requests; for a shadow, percentage of requests that are copied to it",
        "apis.shadow": "the API receives copies of requests, and its responses are discarded; at most one API",
        "schedule.cron": (
            "minute, hour, day of the month, month, day of the week. Names such as `mon` and `jan` are valid, and"
            " so are `@hourly`, `@daily`, `@weekly`, `@monthly` and `@yearly`"
        ),
        "schedule.timezone": "the time zone of `cron`",
        "schedule.submission": "the job to submit, in the form of a POST request's body; required for a BatchAPI",
        "schedule.overlap": (
            "whether a job is submitted (`allow`) or skipped (`skip`) if the previous one has not ended"
        ),
    }
)
