"""Runs of the simulator decide as they did when their digests were kept, and recorded runs replay.

`pytest --rewrite tests/sim/test_reference_runs.py` keeps what the runs do today; `zcat` shows a digest. A failure names
the first line that differs in each section.
"""

import gzip
from pathlib import Path

import pytest

from sim.digests import Digest, as_text, differences, from_text
from sim.reference_runs import RUNS

KEPT = Path(__file__).parents[1] / "reference" / "simulated"


def kept(name: str) -> Digest:
    with gzip.open(KEPT / f"{name}.txt.gz", "rt") as file:
        return from_text(file.read())


def keep(name: str, found: Digest) -> None:
    path = KEPT / f"{name}.txt.gz"
    if not path.exists() or kept(name) != found:
        path.write_bytes(gzip.compress(as_text(found).encode(), mtime=0))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_decides_as_it_did(name: str, request: pytest.FixtureRequest) -> None:
    found = from_text(as_text(RUNS[name].digest()))
    if request.config.getoption("--rewrite"):
        keep(name, found)
    told = differences(kept(name), found)
    assert not told, f"{name}\n" + "\n".join(told)


def test_every_digest_belongs_to_a_run() -> None:
    assert {path.name.removesuffix(".txt.gz") for path in KEPT.iterdir()} == set(RUNS)
