"""Malformed HTTP and bodies against the gateway: `python -m benchmarks.fuzz_http`.

For a minute, eight clients send requests that are wrong in some way. All the while good requests must be answered
within two seconds; at the end the same processes must run, in about as much memory. Attempt `n` of seed `s` is
always the same bytes: `--seed s --only n` sends just those.
"""

from __future__ import annotations

import argparse
import collections
import random
import socket
import threading
import time
from dataclasses import dataclass, field

from benchmarks import malformed, processes, systems
from benchmarks.endpoint import Endpoint
from benchmarks.workloads import NOOP, Workload

_CLIENTS = 8
_GOOD_LIMIT_S = 2.0
#: A request that is not finished gets no answer; do not wait for one for long.
_PATIENCE_S = 0.3


@dataclass
class FuzzResult:
    """What came of it."""

    seed: int
    attempts: int = 0
    answers: collections.Counter[str] = field(default_factory=collections.Counter)
    good: int = 0
    slowest_good_s: float = 0.0
    problems: list[str] = field(default_factory=list)


def fuzz(endpoint: Endpoint, seconds: float, seed: int, workload: Workload = NOOP) -> FuzzResult:
    """Send malformed requests for some seconds and good ones in between; `problems` says what went wrong."""
    result = FuzzResult(seed)
    lock = threading.Lock()
    deadline = time.monotonic() + seconds

    def send_bad() -> None:
        while time.monotonic() < deadline:
            with lock:
                number = result.attempts
                result.attempts += 1
            answer = attempt(endpoint, seed, number)
            with lock:
                result.answers[answer] += 1

    clients = [threading.Thread(target=send_bad, name=f"fuzz-{index}") for index in range(_CLIENTS)]
    for client in clients:
        client.start()
    while time.monotonic() < deadline and len(result.problems) < 20:
        start = time.monotonic()
        mistake = endpoint.mistake(workload)
        taken = time.monotonic() - start
        result.good += 1
        result.slowest_good_s = max(result.slowest_good_s, taken)
        if mistake or taken > _GOOD_LIMIT_S:
            result.problems.append(f"about attempt {result.attempts}: {mistake or f'good request took {taken:.1f} s'}")
        time.sleep(0.02)
    for client in clients:
        client.join()
    if mistake := endpoint.mistake(workload):
        result.problems.append(f"at the end: {mistake}")
    return result


def attempt(endpoint: Endpoint, seed: int, number: int) -> str:
    """Send the bytes of one attempt; return the status that came back, or what happened instead."""
    data = malformed.request(random.Random(f"{seed}/{number}"), endpoint.path)
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=_GOOD_LIMIT_S) as connection:
            connection.sendall(data)
            connection.settimeout(_PATIENCE_S)
            answer = connection.recv(65536)
    except TimeoutError:
        return "no answer yet"
    except OSError as error:
        return type(error).__name__
    return answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.") else "closed"


def main() -> None:
    """Start the system, fuzz it, say what came of it; exit 1 if anything is wrong."""
    arguments = _arguments()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    system = systems.named(arguments.system)[0]
    systems.prepare((system,))
    processes.adopt_orphans()
    with system.serve(NOOP) as endpoint:
        if arguments.only is not None:
            print(malformed.request(random.Random(f"{seed}/{arguments.only}"), endpoint.path))
            print(attempt(endpoint, seed, arguments.only))
            return
        print(f"seed {seed}, {arguments.seconds:g} s", flush=True)
        fuzz(endpoint, arguments.seconds / 6, seed + 1)
        before = {process.pid: process.name() for process in processes.descendants()}
        memory_before = processes.pss_mb(processes.descendants())
        result = fuzz(endpoint, arguments.seconds, seed)
        after = {process.pid for process in processes.descendants()}
        memory_after = processes.pss_mb(processes.descendants())
    ended = [f"{name} ({pid}) ended" for pid, name in before.items() if pid not in after]
    problems = result.problems + ended
    if memory_after > memory_before * 1.05 + 2:
        problems.append("memory is not flat")
    print(f"{result.attempts} attempts: {dict(result.answers.most_common())}")
    print(f"{result.good} good requests, the slowest {result.slowest_good_s * 1e3:.0f} ms")
    print(f"memory {memory_before:.1f} MB → {memory_after:.1f} MB")
    print("\n".join(problems) or "no problems")
    raise SystemExit(bool(problems))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_http", description=__doc__)
    parser.add_argument("--system", default="cortex", choices=[system.name for system in systems.SYSTEMS])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="random by default; printed")
    parser.add_argument("--only", type=int, help="send just this attempt and show it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
