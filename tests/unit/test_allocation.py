"""Freed memory is kept where glibc lets it be, and a user's own setting stands."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import numpy as np
from paceline.engines.local.child import keep_freed_memory
kept = keep_freed_memory()
np.ones(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    a, b, c = np.ones(1 << 18), np.ones(1 << 18), np.ones(1 << 18)
    del a, b, c
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment):
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
    kept, count = done.stdout.split()
    return kept == "1", int(count)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's malloc")
def test_arrays_that_come_and_go_ask_the_kernel_for_no_pages():
    kept, few = faults()
    assert kept
    left, many = faults(MALLOC_ARENA_MAX="4")
    assert not left
    assert few < many / 5
