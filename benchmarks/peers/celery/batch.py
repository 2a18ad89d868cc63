"""Celery over Redis: one task per batch, acknowledged after it ran, with results in Redis.

As a program it starts Redis and the workers, and drives them; as a module it is the Celery app.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from batch_driver import Totals, batches, serve
from batch_total import total as _total
from celery import Celery
from redis import ConnectionError as RedisConnectionError
from redis import Redis

SOCKET = f"{os.environ['BATCH_FOLDER']}/redis.sock"

app = Celery("batch", broker=f"redis+socket://{SOCKET}", backend=f"redis+socket://{SOCKET}")
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_send_task_events=False,
    result_extended=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="total")
def total(numbers: list[int]) -> int:
    return _total(numbers)


def main() -> None:
    with contextlib.ExitStack() as running:
        redis = _redis(running)
        _workers(running)
        assert total.delay([1, 2]).get(timeout=60) == 3

        def run(items: int, batch_size: int) -> Totals:
            sent = []
            # One connection for all of them.
            with app.producer_pool.acquire(block=True) as producer:
                for numbers in batches(items, batch_size):
                    sent.append(total.apply_async((numbers,), producer=producer).id)
            return _recorded(redis, sent)

        serve(run)


def _redis(running: contextlib.ExitStack) -> Redis:
    """Start Redis with its defaults: periodic snapshots, no append-only file."""
    command = ["redis-server", "--port", "0", "--unixsocket", SOCKET, "--dir", os.environ["BATCH_FOLDER"]]
    _start(running, command)
    redis = Redis(unix_socket_path=SOCKET)
    deadline = time.monotonic() + 20
    while True:
        try:
            redis.ping()
            return redis
        except RedisConnectionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _workers(running: contextlib.ExitStack) -> None:
    command = [sys.executable, "-m", "celery", "-A", "batch", "worker", "--concurrency", os.environ["WORKERS"]]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"]
    _start(running, command)


def _start(running: contextlib.ExitStack, command: list[str]) -> None:
    process = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=sys.stderr)
    running.callback(process.wait)
    running.callback(process.terminate)


def _recorded(redis: Redis, sent: list[str]) -> Totals:
    """Wait until Redis has every result. Polling is cheaper than the notifications of `GroupResult.get`."""
    keys = [app.backend.get_key_for_task(task) for task in sent]
    left = keys
    while left:
        some = left[:500]
        if redis.exists(*some) == len(some):
            left = left[500:]
        else:
            time.sleep(0.02)
    return lambda: [app.backend.decode(value)["result"] for value in redis.mget(keys)]


if __name__ == "__main__":
    main()
