"""Fork safety: find the threads and devices of a process with the user's object that would not survive a fork.

A fork has one thread. The memory of the others is there, but nothing runs them: a call that waits for one never ends.
So each thread is named, with its library and the fix. Libraries differ:

library                      threads after construction           in a fork
--------------------------   ----------------------------------   ---------------------------------------------------
OpenBLAS, BLIS               a pool, from the first product on    safe: they end and restart their pools themselves
OpenMP of LLVM and Intel     a pool, from the first loop on       safe: likewise
OpenMP of GNU (PyTorch)      likewise                             a loop waits forever; `end_openmp_pools` before it
                                                                  ends the pool, and the fork starts another
ONNX Runtime                 one since it was imported; a pool    safe without pools. With one, runs use one thread,
                             per session of several threads       and the end of the session waits forever: refused
TensorFlow                   from the first operation on          an operation waits forever: refused
CUDA                         several, and a context               each call fails: refused
threads of Python, others    -                                    reported: they do not run in the fork

Native threads have no names that tell their library, so the return addresses on their stacks are looked up among the
mapped files, most recent first.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cortex.errors import UserError

#: The beginning of each finding in the log of the replica.
FINDING = "warning: preload: "

_STACK_BYTES = 16 * 1024
_WORD = 8
_OMP_PAUSE_SOFT = 1
#: Parts of file names of libraries whose threads survive forks, because the libraries or `end_openmp_pools` end them.
#: The pools of ONNX Runtime are found by their sessions.
_SAFE = ("libopenblas", "libscipy_openblas", "libblis", "libgomp", "libomp", "libiomp5", "onnxruntime")
_TENSORFLOW = "tensorflow"
#: How long threads may run after construction before they wait for work, in which state their library is found.
_SETTLE_S = 1.0
_SETTLE_CHECK_S = 0.01
#: Files that belong to no library in particular.
_ANY = ("libc.so", "libc-", "libpthread", "libm.so", "ld-linux", "libstdc++", "libgcc", "libpython", "[vdso]")
_CUDA_DEVICE = "/dev/nvidia-uvm"


@dataclass(frozen=True, slots=True)
class LiveThread:
    """A thread of this process besides the main one: one of Python with its name and place, or a native one."""

    python_name: str = ""
    place: str = ""  #: `file:line` of a thread of Python
    library: str = ""  #: path of the library of a native thread; "" if it is not found


@dataclass(frozen=True, slots=True)
class FileMapping:
    """One executable mapping of this process."""

    start: int
    end: int
    path: str


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
    threads = live_threads()
    if problem := tensorflow_problem(threads):
        raise UserError(problem)
    return find_lost_threads(threads)


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


def tensorflow_problem(threads: Iterable[LiveThread]) -> str:
    """Return why TensorFlow can't be used in a fork; "" if none of its operations has run."""
    count = sum(_TENSORFLOW in os.path.basename(thread.library) for thread in threads)  # noqa: PTH119 - any text
    if not count:
        return ""
    return (
        f"preload: TensorFlow has started {count} threads, which a fork does not have: its operations would wait"
        " forever; import it in the file, and load the model in after_fork(self), or remove `preload: true`"
    )


def find_lost_threads(threads: Iterable[LiveThread]) -> list[str]:
    """Return one line for each thread that does not run in a fork, and that no library replaces."""
    counts: Counter[str] = Counter()
    for thread in threads:
        if thread.python_name:
            at = f" ({thread.place})" if thread.place else ""
            counts[
                f'the thread "{thread.python_name}"{at} does not run in the processes; start it in after_fork(self)'
            ] += 1
        elif not any(part in os.path.basename(thread.library) for part in _SAFE):  # noqa: PTH119 - any text
            of = f"of {thread.library}" if thread.library else "of an unknown library"
            counts[f"{{}} {of} will not run in the processes; create what uses it in after_fork(self)"] += 1
    return [text.replace("{}", "a thread" if n == 1 else f"{n} threads") for text, n in counts.items()]


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


def live_threads() -> list[LiveThread]:
    """List the threads of this process besides the calling one, which is the main thread."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        threads = _list_threads()
        if all(each.python_name or each.library for each in threads) or time.monotonic() > deadline:
            return threads
        time.sleep(_SETTLE_CHECK_S)


def _list_threads() -> list[LiveThread]:
    frames = sys._current_frames()
    of_python: Mapping[int | None, threading.Thread] = {each.native_id: each for each in threading.enumerate()}
    mappings = parse_maps(Path("/proc/self/maps").read_text())
    found = []
    for name in os.listdir("/proc/self/task"):  # noqa: PTH208 - names only
        thread_id = int(name)
        if thread_id == threading.get_native_id():
            continue
        if (thread := of_python.get(thread_id)) is not None:
            found.append(LiveThread(python_name=thread.name, place=_place(frames.get(thread.ident or 0))))
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            found.append(LiveThread(library=_library(thread_id, mappings)))
    return found


def _place(frame: FrameType | None) -> str:
    """Return where a thread began: its outermost frame that is not of `threading`."""
    place = ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return place


def parse_maps(text: str) -> list[FileMapping]:
    """Return the executable mappings of files in the text of /proc/PID/maps; proc_pid_maps(5)."""
    found = []
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1]:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            found.append(FileMapping(start, end, fields[5]))
    return found


def find_library(addresses: Sequence[int], mappings: Sequence[FileMapping]) -> str:
    """Return the first file of a library of its own that contains one of `addresses`; "" if none does."""
    for address in addresses:
        for mapping in mappings:
            if mapping.start <= address < mapping.end:
                if not any(part in os.path.basename(mapping.path) for part in _ANY):  # noqa: PTH119 - any text
                    return mapping.path
                break
    return ""


def _library(thread_id: int, mappings: Sequence[FileMapping]) -> str:
    """Return the library of a native thread, by its program counter and its stack. Raises: OSError, ValueError."""
    fields = Path(f"/proc/self/task/{thread_id}/syscall").read_text().split()
    if len(fields) < 3:  # it runs
        return ""
    stack, counter = int(fields[-2], 16), int(fields[-1], 16)
    return find_library([counter, *_words_at(stack)], mappings)


def _words_at(address: int) -> list[int]:
    """Return the words from `address` on, up to the end of the mapping that contains it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            size = min(int(end, 16) - address, _STACK_BYTES) // _WORD * _WORD
            data = ctypes.string_at(address, size)
            return [int.from_bytes(data[at : at + _WORD], sys.byteorder) for at in range(0, size, _WORD)]
    return []


def end_openmp_pools() -> None:
    """End the threads that OpenMP keeps for the main thread; the next loop starts them again.

    `omp_pause_resource_all` of OpenMP 5.0. GNU's library does not notice a fork: it waits for threads of the parent.
    """
    for path in {each.path for each in parse_maps(Path("/proc/self/maps").read_text()) if "libgomp" in each.path}:
        with contextlib.suppress(OSError, AttributeError):  # older than OpenMP 5.0
            ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_SOFT)


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115 - as above
    return found
