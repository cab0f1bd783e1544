"""The judge of the attack on tables: exact counts hold, and one increment too many or too few does not."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from attacks.harness import Ended, Target
from attacks.tables import Job


@pytest.fixture
def job(tmp_path):
    return Job(Target(tmp_path, tmp_path), 1, resumed=True)


def ended(job, own=0, shared=0, thirds=0, code=0, said=""):
    """Judge a run whose tables are off by these."""
    clocks, workers = job.clocks, job.workers
    tables = {
        "own": np.tile(np.array([clocks, sum(range(clocks))]), (workers, 1)),
        "shared": np.zeros((5, 3), dtype=np.int64),
        "floats": np.array([[float(sum(i % 3 == w % 3 for i in range(clocks)))] for w in range(workers)]),
    }
    tables["shared"][2] = 3 * workers * clocks
    tables["own"][-1, 0] += own
    tables["shared"][0, 1] += shared
    tables["floats"][0, 0] += thirds
    folder = job.target.folder / "runs" / "one"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tables, folder / "tables.safetensors")
    return job.judged(Ended(code, said, "", 1.0), 1)


def test_exact_counts_hold(job):
    assert ended(job).held


@pytest.mark.parametrize(
    "off", [{"own": 1}, {"own": -1}, {"shared": 1}, {"thirds": -1}, {"code": 4}, {"said": "WRONG x"}]
)
def test_anything_else_does_not(job, off):
    assert not ended(job, **off).held
