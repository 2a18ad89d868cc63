"""Fork safety: find the threads and devices of a process with the user's object that would not survive a fork.

A fork has one thread. The memory of the others is there, but nothing runs them: a call that waits for one never ends.
Libraries differ:

library                      threads after construction           in a fork
--------------------------   ----------------------------------   ---------------------------------------------------
OpenBLAS                     a pool, from the first product on    safe: ended before each fork, and started again
OpenMP                       a pool, from the first loop on       safe: `end_openmp_pools` before the fork ends it
ONNX Runtime                 one since it was imported; a pool    safe without pools. With one, runs use one thread,
                             per session of several threads       and the end of the session waits forever: refused
TensorFlow                   from the first operation on          an operation waits forever: refused
CUDA                         several, and a context               each call fails: refused
threads of Python, others    -                                    reported: they do not run in the fork

Which library has started a native thread is not known. What is left after a fork, of the threads that are not safe, is
counted, and the report names the loaded libraries that are known to start threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType

from cortex.errors import UserError

#: The beginning of each finding in the log of the replica.
FINDING = "warning: preload: "

_OMP_PAUSE_SOFT = 1
_OPENMP = ("libgomp", "libomp", "libiomp5")
#: Libraries that start threads: a part of the file's name, and the name.
_LIBRARIES = {
    "cygrpc": "gRPC",
    "libarrow": "Apache Arrow",
    "libtensorflow": "TensorFlow",
    "libtorch_cpu": "PyTorch",
    "libxla": "JAX",
    "librdkafka": "librdkafka",
    "onnxruntime": "ONNX Runtime",
    "polars": "Polars",
}
#: How long threads may take to end after a fork.
_SETTLE_S = 1.0
_SETTLE_CHECK_S = 0.01
#: Time for a fork to begin, whose handlers may wait for a lock of a thread that it does not have.
_FORK_S = 10.0
_CUDA_DEVICE = "/dev/nvidia-uvm"


def check_fork_safety() -> list[str]:
    """Return a finding for each thread that a fork loses, with its fix.

    Raises: UserError for what would let calls of a fork wait forever or fail.
    """
    end_openmp_pools()
    if has_cuda(_open_files()):
        raise UserError(
            "preload: __init__ has initialized CUDA, and no fork can use it; keep the model in main memory in __init__"
            " and move it to the GPU in after_fork(self), or remove `preload: true`"
        )
    if problem := onnx_problem(_onnx_sessions()):
        raise UserError(problem)
    libraries = known_libraries(_mapped_files())
    count = _count_native_threads(expected="ONNX Runtime" in libraries)
    if problem := tensorflow_problem(count, libraries):
        raise UserError(problem)
    frames = sys._current_frames()
    others = (each for each in threading.enumerate() if each is not threading.current_thread())
    python = [(each.name, _place(frames.get(each.ident or 0))) for each in others]
    return find_lost_threads(python, count, libraries)


def onnx_problem(pools: Sequence[bool]) -> str:
    """Return why a fork can't use sessions of ONNX Runtime, of which some have a thread pool; "" if it can."""
    count = sum(pools)
    if not count:
        return ""
    which = "its session has" if len(pools) == 1 else f"{count} of its sessions have" if count > 1 else "a session has"
    return (
        f"preload: ONNX Runtime: {which} a pool of threads, which a fork does not have; create it with"
        " `options.intra_op_num_threads = 1` and raise processes_per_replica, or create it in after_fork(self)"
    )


def tensorflow_problem(count: int, libraries: Collection[str]) -> str:
    """Return why TensorFlow can't be used in a fork; "" if none of its operations has run."""
    if not count or "TensorFlow" not in libraries:
        return ""
    return (
        f"preload: TensorFlow or another library has started {count} threads, which a fork does not have: operations"
        " of TensorFlow would wait forever; import it in the file, and load the model in after_fork(self), or remove"
        " `preload: true`"
    )


def find_lost_threads(python: Sequence[tuple[str, str]], count: int, libraries: Iterable[str]) -> list[str]:
    """Return findings about threads that do not run in a fork: of Python, by name and place, and native ones."""
    found = [
        f'the thread "{name}"{place and f" ({place})"} does not run in the processes; start it in after_fork(self)'
        for name, place in python
    ]
    if count:
        threads, them = ("a native thread does", "it") if count == 1 else (f"{count} native threads do", "them")
        candidates = ", ".join(sorted(libraries)) or "none that is known to start threads"
        found.append(
            f"{threads} not run in the processes (libraries: {candidates}); create what starts {them} in"
            " after_fork(self)"
        )
    return found


def known_libraries(files: Iterable[str]) -> set[str]:
    """Return the known libraries that start threads, given the paths of mapped files."""
    names = {path.rpartition("/")[2] for path in files}
    return {library for part, library in _LIBRARIES.items() if any(part in name for name in names)}


def has_cuda(open_files: Iterable[str]) -> bool:
    """Return whether CUDA was initialized: only CUDA opens the device of its unified memory."""
    return _CUDA_DEVICE in open_files


def _onnx_sessions() -> list[bool]:
    """Return, for each session of ONNX Runtime in this process, whether it has a pool of threads."""
    onnxruntime = sys.modules.get("onnxruntime")
    kind = getattr(onnxruntime, "InferenceSession", None)
    if onnxruntime is None or not isinstance(kind, type):
        return []
    cores = len(os.sched_getaffinity(0))
    options = [each.get_session_options() for each in gc.get_objects() if issubclass(type(each), kind)]
    is_parallel = [each.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL for each in options]
    return [
        parallel or (each.intra_op_num_threads or cores) > 1
        for each, parallel in zip(options, is_parallel, strict=True)
    ]


def _count_native_threads(expected: int) -> int:
    """Return the number of threads, neither of Python nor `expected`, that are left in this process after a fork.

    OpenBLAS ends its pool at each fork (pthread_atfork(3)); `fork` is the same as those that follow.
    Raises: UserError if forks don't begin.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, about threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    deadline = time.monotonic() + _FORK_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise UserError(
                f"preload: a fork does not begin within {_FORK_S:g} s: a function of os.register_at_fork, or of a"
                " library, does not return; remove `preload: true`"
            )
        time.sleep(_SETTLE_CHECK_S)
    deadline = time.monotonic() + _SETTLE_S
    while True:
        of_python = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
        count = sum(int(name) not in of_python for name in os.listdir("/proc/self/task"))  # noqa: PTH208 - names only
        if count <= expected or time.monotonic() > deadline:
            return max(0, count - expected)
        time.sleep(_SETTLE_CHECK_S)


def _place(frame: FrameType | None) -> str:
    """Return `file:line` of where a thread began: its outermost frame that is not of `threading`."""
    place = ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return place


def end_openmp_pools() -> None:
    """End the threads that OpenMP keeps for the main thread; the next loop starts them again.

    `omp_pause_resource_all` of OpenMP 5.0. GNU's library does not notice a fork: it waits for threads of the parent.
    """
    for path in _mapped_files():
        if any(part in path.rpartition("/")[2] for part in _OPENMP):
            with contextlib.suppress(OSError, AttributeError):  # older than OpenMP 5.0
                ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_SOFT)


def _mapped_files() -> set[str]:
    """Return the files whose code is mapped in this process; proc_pid_maps(5)."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {fields[5] for fields in lines if len(fields) == 6 and "x" in fields[1]}


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115 - as above
    return found
