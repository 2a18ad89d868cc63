"""TensorFlow part of `python -m benchmarks.model_clients`.

The direct call in this process is a signature of `tf.saved_model.load` with an array, whose outputs are read as arrays.
The direct call to a server uses the official stub with a prepared request; the server is that of the tests, on a unix
socket.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROW = [5.1, 3.5, 1.4, 0.2]
SERVER = Path(__file__).parents[2] / "tests" / "harness" / "models" / "tensorflow_model_server.py"

Row = tuple[str, Callable[[], Any], Callable[[], Any]]
Open = Callable[[str | None], Any]


def embedded(model: Path, open_clients: Open) -> Iterator[Row]:
    """Compare `predict` with TensorFlow in this process; `open_clients` takes the value of `tensorflow_serving`."""
    clients = open_clients(None)
    clients.registry.load_latest()
    import numpy as np
    import tensorflow as tf

    loaded = tf.saved_model.load(str(model))
    signature = loaded.signatures["serving_default"]
    prepared = clients.registry.get().servable
    predict = clients.client.predict
    for rows in (1, 64):
        array = np.array([ROW] * rows, np.float32)
        lists = array.tolist()

        def bare(array: Any = array) -> Any:
            return {name: value.numpy() for name, value in signature(x=tf.constant(array)).items()}

        def run(array: Any = array) -> Any:
            return prepared.run("serving_default", {"x": array})

        name = f"tensorflow iris, {rows} rows"
        yield f"{name}: our session alone", bare, run
        yield f"{name}: array", bare, lambda array=array: predict({"x": array})
        yield f"{name}: lists", bare, lambda lists=lists: predict({"x": lists})
        yield f"{name}: lists, against our session", run, lambda lists=lists: predict({"x": lists})
    clients.close()


def on_server(model: Path, folder: Path, open_clients: Open, prepend_path: Callable[[str], None]) -> Iterator[Row]:
    """Compare `predict` with the official stub, on a server that the client started."""
    executable = folder / "bin" / "tensorflow_model_server"
    executable.parent.mkdir()
    executable.write_text(f"#!{sys.executable}\nimport runpy; runpy.run_path({str(SERVER)!r}, run_name='__main__')\n")
    executable.chmod(0o755)
    prepend_path(str(executable.parent))
    clients = open_clients("local")
    clients.registry.load_latest()
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    served = clients.registry.get().servable.served
    stub = prediction_service_pb2_grpc.PredictionServiceStub(grpc.insecure_channel(served._connection.target))
    predict = clients.client.predict
    for rows in (1, 64):
        lists = [ROW] * rows
        request = predict_pb2.PredictRequest()
        request.model_spec.name = served.name
        request.inputs["x"].CopyFrom(tf.make_tensor_proto(lists, dtype=tf.float32))

        def bare(request: Any = request) -> Any:
            return stub.Predict(request)

        yield f"tensorflow serving iris, {rows} rows: lists", bare, lambda lists=lists: predict({"x": lists})
    clients.close()
