"""Bytes in the report are those that the network has carried."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SUPPORT = Path(__file__).parents[1] / "support"


def own_network():
    """How to run something in a network namespace of its own; None where that is not possible."""
    command = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        return None
    return command


@pytest.mark.parametrize(
    "strategy", ["adaptive_gossip:warmup=8,wire=float32", pytest.param("gossip:period=2", marks=pytest.mark.soak)]
)  # fmt: skip
@pytest.mark.fresh
def test_the_loopback_has_carried_what_the_report_says(strategy, monkeypatch):
    network = own_network()
    if network is None:
        pytest.skip("needs network namespaces: unshare --map-root-user --net")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    command = [*network, sys.executable, str(SUPPORT / "counted_bytes.py"), strategy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first_and_last = 3 * found["workers"] * found["model"]  # everybody's first model up and down, and the last one down
    assert found["sent"] > 10 * found["model"]
    assert found["carried"] - found["gathered"] - first_and_last == pytest.approx(found["sent"], rel=0.02)
