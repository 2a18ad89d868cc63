"""What of a process that has constructed a class does not survive a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from cortex.worker.forks.fork_safety import (
    find_lost_threads,
    has_cuda,
    known_libraries,
    onnx_problem,
    tensorflow_problem,
)

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("python", "count", "libraries", "findings"),
    [
        ([], 0, {"gRPC"}, []),
        (
            [("refresh", "/project/handler.py:9"), ("other", "")],
            0,
            (),
            [
                'the thread "refresh" (/project/handler.py:9) does not run in the processes; start it in'
                " after_fork(self)",
                'the thread "other" does not run in the processes; start it in after_fork(self)',
            ],
        ),
        (
            [],
            2,
            {"gRPC", "Apache Arrow"},
            [
                "2 native threads do not run in the processes (libraries: Apache Arrow, gRPC); create what starts them"
                " in after_fork(self)"
            ],
        ),
        (
            [],
            1,
            (),
            [
                "a native thread does not run in the processes (libraries: none that is known to start threads); create"
                " what starts it in after_fork(self)"
            ],
        ),
    ],
)
def test_threads_that_no_library_replaces_are_named(
    python: list[tuple[str, str]], count: int, libraries: set[str], findings: list[str]
) -> None:
    assert find_lost_threads(python, count, libraries) == findings


def test_libraries_are_known_by_the_names_of_their_files() -> None:
    files = ("/env/grpc/_cython/cygrpc.so", "/env/tensorflow/libtensorflow_framework.so.2", "/onnxruntime/libc.so.6")
    assert known_libraries(files) == {"gRPC", "TensorFlow"}


def test_threads_are_a_problem_of_tensorflow() -> None:
    assert not tensorflow_problem(0, {"TensorFlow"})
    assert not tensorflow_problem(3, {"gRPC"})
    problem = tensorflow_problem(3, {"TensorFlow"})
    assert "has started 3 threads" in problem
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


def test_a_fork_that_does_not_begin_is_named() -> None:
    output = run("""
        import time
        from cortex.worker.forks import fork_safety

        fork_safety._FORK_S = 0.1
        os.register_at_fork(after_in_child=lambda: time.sleep(1000))
        try:
            check_fork_safety()
        except UserError as error:
            print(error)
    """)
    assert output.startswith("preload: a fork does not begin within 0.1 s: a function of os.register_at_fork")


def test_threads_of_other_libraries_are_counted() -> None:
    output = run("""
        import grpc, numpy

        a = numpy.ones((600, 600))
        a @ a
        channel = grpc.insecure_channel("127.0.0.1:9")
        ready = grpc.channel_ready_future(channel)
        print(check_fork_safety()[-1], flush=True)
        os._exit(0)
    """)
    assert "native threads do not run in the processes (libraries: gRPC)" in output


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
    assert refusal.startswith("preload: TensorFlow or another library has started ")
