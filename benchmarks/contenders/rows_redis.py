"""A table in Redis on loopback: a key for each row, its bytes packed; many keys are asked for with one MGET."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis

from contenders.questions import Gather, Gathered
from contenders.row_numbers import first_values, timed

PATIENCE_S = 20.0


def gather(task: Gather) -> Gathered:
    with _server() as client:
        values = first_values(task)
        pipeline = client.pipeline(transaction=False)
        for row, line in enumerate(values):
            pipeline.set(row, line.tobytes())
        pipeline.execute()

        def fetch(rows: Any) -> Any:
            packed: list[bytes] = client.mget(rows.tolist())  # type: ignore[assignment]
            return np.frombuffer(b"".join(packed), dtype=np.float32).reshape(len(rows), task.width).copy()

        assert np.array_equal(fetch(np.arange(3)), values[:3])
        return Gathered({"fetch": timed(task, fetch, distinct=True)})


@contextmanager
def _server() -> Iterator[Any]:
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("redis-server is not installed: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        try:
            client = redis.Redis(port=port)
            until = time.monotonic() + PATIENCE_S
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.05)
            yield client
            client.close()
        finally:
            process.terminate()
            process.wait()
