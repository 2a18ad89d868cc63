"""Clients of the Open Inference Protocol through the gateway get the numbers of the class, bit by bit."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import uv
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from harness.installations.installation import Installation, installation, write_project

HANDLER = """
    import numpy as np

    class Handler:
        def __init__(self, config):
            self.weights = np.linspace(-1, 1, 6).reshape(3, 2)

        def handle_v2(self, inputs, parameters):
            found = {"scores": inputs["x"] @ self.weights, "flags": inputs["x"].sum(axis=1) > 0}
            if "text" in inputs:
                found["upper"] = np.array([text.upper() for text in inputs["text"].reshape(-1)], dtype=object)
            if "half" in inputs:
                found["half"] = inputs["half"]
            return found
"""
CONFIG = """
    - name: scores
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {endpoint: /deep/scores}
    - name: both
      kind: TrafficSplitter
      networking: {endpoint: /both}
      apis:
        - {name: scores, weight: 100}
"""
X = np.random.default_rng(7).normal(size=(4, 3))


@pytest.fixture(scope="module")
def cortex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installation(flags=("--v2-at-root",)) as made:
        made.cortex("deploy", write_project(tmp_path_factory.mktemp("project"), HANDLER, CONFIG))
        yield made


@pytest.fixture
def handler(tmp_path: Path) -> Any:
    """An object of the same class, in this process."""
    (tmp_path / "handler.py").write_text(textwrap.dedent(HANDLER))
    spec = importlib.util.spec_from_file_location("handler", tmp_path / "handler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Handler({})


def _input(name: str, array: NDArray[Any], datatype: str, binary: bool) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def _same(found: NDArray[Any] | None, expected: NDArray[Any]) -> bool:
    return found is not None and found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("path", "model"), [("/deep/scores", "scores"), ("/both", "both"), ("", "scores"), ("", "both")]
)
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_tritonclient_gets_the_numbers_of_the_class(
    cortex: Installation, handler: Any, path: str, model: str, binary: bool
) -> None:
    client = triton.InferenceServerClient(f"{cortex.host}:{cortex.gateway_port}{path}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model)
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    assert client.get_model_metadata(model)["name"] == model
    expected = handler.handle_v2({"x": X}, {})
    names = ("flags", "scores")
    asked = None if binary else [triton.InferRequestedOutput(name, binary_data=False) for name in names]
    result = client.infer(model, [_input("x", X, "FP64", binary)], outputs=asked, request_id="7")
    assert result.get_response()["id"] == "7"
    assert all(_same(result.as_numpy(name), expected[name]) for name in names)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_tritonclient_may_compress_and_send_bytes_and_halves(cortex: Installation, algorithm: str) -> None:
    client = triton.InferenceServerClient(f"{cortex.host}:{cortex.gateway_port}/deep/scores")
    text, half = np.array([b"a\xff", "ä".encode()], np.object_), np.array([0.1, np.nan], np.float16)
    inputs = [_input("x", X, "FP64", True), _input("text", text, "BYTES", True), _input("half", half, "FP16", True)]
    result = client.infer(
        "scores", inputs, request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
    )
    assert result.as_numpy("upper").tolist() == [b"A\xff", "ä".encode()]
    assert _same(result.as_numpy("half"), half)


def test_the_async_client_of_triton_gets_the_numbers_of_the_class(cortex: Installation, handler: Any) -> None:
    async def call() -> list[NDArray[Any] | None]:
        async with triton_aio.InferenceServerClient(f"{cortex.host}:{cortex.gateway_port}/deep/scores") as client:
            calls = (client.infer("scores", [_input("x", X, "FP64", True)]) for _ in range(8))
            return [result.as_numpy("scores") for result in await asyncio.gather(*calls)]

    expected = handler.handle_v2({"x": X}, {})["scores"]
    assert all(_same(found, expected) for found in asyncio.run(call()))


def test_tritonclient_shows_the_reason_of_an_error(cortex: Installation) -> None:
    client = triton.InferenceServerClient(f"{cortex.host}:{cortex.gateway_port}/deep/scores")
    with pytest.raises(InferenceServerException, match=r"\[404\] the API scores has no model 'iris'"):
        client.infer("iris", [_input("x", X, "FP64", True)])
    with pytest.raises(InferenceServerException, match=r"\[404\] the model 'scores' has no version '3'"):
        client.get_model_metadata("scores", "3")
    with pytest.raises(InferenceServerException, match=r"\[500\] internal server error: .* in handle_v2\(\)"):
        client.infer("scores", [_input("y", X, "FP64", True)])


def test_curl_needs_no_content_type(cortex: Installation) -> None:
    body = '{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP64", "data": [[1, 2, 3]]}]}'
    url = cortex.url("/deep/scores/v2/models/scores/infer")
    done = subprocess.run(["curl", "-sS", url, "-d", body], check=True, capture_output=True, text=True)
    assert '"name":"flags","shape":[1],"datatype":"BOOL","data":[true]' in done.stdout


KSERVE = """
    import asyncio, sys
    import numpy as np
    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

    async def main(base, model, path):
        client = InferenceRESTClient(RESTConfig(protocol="v2"))
        assert await client.is_server_live(base)
        assert await client.is_server_ready(base)
        assert await client.is_model_ready(base, model)
        x = np.load(path + "/x.npy")
        for binary in (True, False):
            tensor = InferInput("x", list(x.shape), "FP64")
            tensor.set_data_from_numpy(x, binary_data=binary)
            request = InferRequest(model, [tensor], request_id="7", parameters={"binary_data_output": binary})
            response = await client.infer(base, request, model_name=model)
            assert response.id == "7", response
            scores = next(output for output in response.outputs if output.name == "scores")
            np.save(f"{path}/{binary}.npy", scores.as_numpy())

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.long
def test_the_client_of_kserve_gets_the_numbers_of_the_class(cortex: Installation, handler: Any, tmp_path: Path) -> None:
    python = tmp_path / "kserve" / "bin" / "python"
    subprocess.run([uv.find_uv_bin(), "venv", "-q", "--python", sys.executable, tmp_path / "kserve"], check=True)
    done = subprocess.run(
        [uv.find_uv_bin(), "pip", "install", "-q", "--python", python, "kserve"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"kserve can't be installed: {done.stderr[-300:]}")
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "client.py").write_text(textwrap.dedent(KSERVE))
    expected = handler.handle_v2({"x": X}, {})["scores"]
    for path, model in (("/deep/scores", "scores"), ("", "scores")):
        command = [python, tmp_path / "client.py", cortex.url(path), model, tmp_path]
        called = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert called.returncode == 0, called.stderr
        for binary in (True, False):
            assert _same(np.load(tmp_path / f"{binary}.npy"), expected)
