"""What of a process that has constructed a class does not survive a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from cortex.worker.forks.fork_safety import (
    FileMapping,
    LiveThread,
    find_library,
    find_lost_threads,
    has_cuda,
    onnx_problem,
    parse_maps,
    tensorflow_problem,
)

pytestmark = pytest.mark.processes

MAPS = """\
55d0c0a00000-55d0c0a01000 r-xp 00000000 fe:01 11 /usr/bin/python3.11
7f10a0000000-7f10a0021000 rw-p 00000000 00:00 0
7f10b0000000-7f10b0100000 r-xp 00000000 fe:01 12 /lib/x86_64-linux-gnu/libc.so.6
7f10c0000000-7f10c0100000 r-xp 00000000 fe:01 13 /env/site packages/libgomp-1.so.1.0.0
7f10d0000000-7f10d0100000 r--p 00000000 fe:01 14 /env/data.bin
"""
LIBC, GOMP = 0x7F10B0000010, 0x7F10C0000010


def test_maps_are_parsed_with_spaces_in_paths() -> None:
    assert parse_maps(MAPS) == [
        FileMapping(0x55D0C0A00000, 0x55D0C0A01000, "/usr/bin/python3.11"),
        FileMapping(0x7F10B0000000, 0x7F10B0100000, "/lib/x86_64-linux-gnu/libc.so.6"),
        FileMapping(0x7F10C0000000, 0x7F10C0100000, "/env/site packages/libgomp-1.so.1.0.0"),
    ]


@pytest.mark.parametrize(
    ("addresses", "library"),
    [
        ([], ""),
        ([0x10, 0x7F10D0000010], ""),
        ([LIBC], ""),
        ([LIBC, 0x10, GOMP], "/env/site packages/libgomp-1.so.1.0.0"),
    ],
)
def test_the_library_of_a_thread_is_the_most_recent_on_its_stack_besides_libc(
    addresses: list[int], library: str
) -> None:
    assert find_library(addresses, parse_maps(MAPS)) == library


@pytest.mark.parametrize(
    ("threads", "findings"),
    [
        ([], []),
        ([LiveThread(library="/env/libscipy_openblas64_-1.so"), LiveThread(library="/env/libgomp-1.so.1")], []),
        ([LiveThread(library="/env/onnxruntime/capi/onnxruntime_pybind11_state.so")], []),
        (
            [LiveThread(python_name="refresh", place="/project/handler.py:9")],
            [
                'the thread "refresh" (/project/handler.py:9) does not run in the processes; start it in'
                " after_fork(self)"
            ],
        ),
        (
            [LiveThread(library="/env/grpc/cygrpc.so")] * 2,
            ["2 threads of /env/grpc/cygrpc.so will not run in the processes; create what uses it in after_fork(self)"],
        ),
        (
            [LiveThread()],
            ["a thread of an unknown library will not run in the processes; create what uses it in after_fork(self)"],
        ),
    ],
)
def test_threads_that_no_library_replaces_are_named(threads: list[LiveThread], findings: list[str]) -> None:
    assert find_lost_threads(threads) == findings


def test_threads_of_tensorflow_are_a_problem() -> None:
    assert not tensorflow_problem([LiveThread(library="/env/tensorflow/libscipy_openblas.so")])
    problem = tensorflow_problem([LiveThread(library="/env/tensorflow/libtensorflow_framework.so.2")] * 3)
    assert "TensorFlow has started 3 threads" in problem
    assert "load the model in after_fork(self)" in problem


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ([], ""),
        ([False, False], ""),
        ([True], "its session has a pool"),
        ([True, False], "a session has a pool"),
        ([True, True], "2 of its sessions have a pool"),
    ],
)
def test_sessions_of_onnx_runtime_with_a_pool_are_a_problem(pools: list[bool], words: str) -> None:
    problem = onnx_problem(pools)
    assert bool(problem) == bool(words)
    assert words in problem


def test_cuda_is_recognized_by_its_device() -> None:
    assert has_cuda(["/dev/null", "/dev/nvidia-uvm"])
    assert not has_cuda(["/dev/null", "/dev/nvidiactl"])  # also open for queries of NVML


def run(source: str) -> str:
    """Run code in a process of its own, in which `fork` forks a process that prints the result of a function."""
    prelude = """
        import os, sys
        from cortex.errors import UserError
        from cortex.worker.forks.fork_safety import check_fork_safety

        def fork(function):
            pid = os.fork()
            if pid == 0:
                print(function(), flush=True)
                os._exit(0)
            os.waitpid(pid, 0)
    """
    text = textwrap.dedent(prelude) + textwrap.dedent(source)
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, timeout=300, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pools_of_openblas_and_openmp_are_no_finding_and_calls_in_a_fork_end() -> None:
    output = run("""
        import numpy
        from sklearn.datasets import make_classification
        from sklearn.ensemble import HistGradientBoostingClassifier

        x, y = make_classification(2000, random_state=0)
        model = HistGradientBoostingClassifier(max_iter=3).fit(x, y)
        a = numpy.ones((600, 600))
        expected = model.predict(x).sum() + (a @ a).sum()
        print(check_fork_safety())
        fork(lambda: model.predict(x).sum() + (a @ a).sum() == expected)
    """)
    assert output == "[]\nTrue\n"


def test_a_session_of_onnx_runtime_with_one_thread_works_in_a_fork_and_one_with_two_is_refused() -> None:
    output = run("""
        import numpy, onnx, onnxruntime
        from onnx import TensorProto, helper, numpy_helper

        weights = numpy.ones((64, 64), "float32")
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])], "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 64])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 64])],
            [numpy_helper.from_array(weights, "w")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()

        def session(threads):
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            return onnxruntime.InferenceSession(model, options)

        first = session(1)
        first.run(None, {"x": weights})
        print(check_fork_safety())
        fork(lambda: first.run(None, {"x": weights})[0].sum())
        second = session(2)
        try:
            check_fork_safety()
        except UserError as error:
            print(error)
    """)
    findings, total, refusal = output.splitlines()
    assert (findings, float(total)) == ("[]", 64.0**3)
    assert refusal.startswith("preload: ONNX Runtime: a session has a pool of threads")


@pytest.mark.long
def test_tensorflow_is_refused_after_its_first_operation() -> None:
    output = run("""
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        import tensorflow

        print(check_fork_safety())
        fork(lambda: float(tensorflow.reduce_sum(tensorflow.ones((8, 8)))))
        tensorflow.reduce_sum(tensorflow.ones((8, 8)))
        try:
            check_fork_safety()
        except UserError as error:
            print(error)
    """)
    findings, total, refusal = output.splitlines()
    assert (findings, float(total)) == ("[]", 64.0)
    assert refusal.startswith("preload: TensorFlow has started ")
