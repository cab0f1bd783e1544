"""Runs of the simulator decide as they did when their digests were kept, and recorded runs replay.

`pytest --rewrite tests/sim/test_reference_runs.py` keeps what the runs do today; `zcat` shows a digest. A failure names
the first line that differs in each section.
"""

import dataclasses
import gzip
import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clusters import UNEVEN, cluster
from digests import Digest, as_text, differences, from_text
from reference_runs import RUNS, Train

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


@pytest.mark.parametrize("section", ["decisions", "observations"])
def test_the_times_of_no_run_go_back(section: str) -> None:
    for name in RUNS:
        times = [float(line.split()[0]) for line in kept(name)[section] if not line.startswith("header")]
        assert times == sorted(times), name


class TestTheComparison:
    """It can fail: each fault is told where it shows first, and only there."""

    def test_a_grant_of_one_sample_less_is_named_with_what_was_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from paceline import strategies

        kind = strategies.strategy_class("bsp")
        decide, count = kind.handle, itertools.count()

        def stingy(self: Any, event: Any) -> list[Any]:
            actions = decide(self, event)
            if next(count) < 12:
                return actions
            return [msgspec.structs.replace(a, work=a.work - 1) if hasattr(a, "through") else a for a in actions]

        monkeypatch.setattr(kind, "handle", stingy)
        told = differences(kept("bsp"), RUNS["bsp"].digest())
        (decisions,) = [text for text in told if text.startswith("decisions:")]
        was, comes = re.findall(r"(?:kept|found):   ?(.* -> .*)", decisions)
        assert "grant worker=0 work=5" in was
        assert "grant worker=0 work=4" in comes
        assert was.split(" -> ")[0] == comes.split(" -> ")[0]

    def test_a_push_that_arrives_a_microsecond_later_is_a_difference_of_decisions(self) -> None:
        later = cluster(*UNEVEN, jitter="lognormal:0.2", network="latency_ms = 2.001\nbandwidth_mbps = 10")
        told = differences(kept("asp"), dataclasses.replace(RUNS["asp"], scenario=later).digest())
        (decisions,) = [text for text in told if text.startswith("decisions:")]
        assert re.match(r"decisions: line 6 differs \(kept (\d+) lines, found \1\)", decisions)  # header, 4 joined

    def test_another_learning_rate_shows_in_the_model(self) -> None:
        told = differences(kept("bsp-ties"), dataclasses.replace(RUNS["bsp-ties"], script=Train(lr=0.021)).digest())
        assert {text.split(":")[0] for text in told} >= {"decisions", "model", "observations"}

    @pytest.mark.parametrize(
        ("section", "change"),
        [
            ("observations", lambda lines: lines.pop(3)),
            ("observations", lambda lines: lines.insert(2, "0.1 surprise")),
            ("decisions of node 1", lambda lines: lines.reverse()),
            ("decisions", lambda lines: lines.pop()),
            ("report", lambda lines: lines.append("more 1")),
        ],
    )
    def test_a_section_that_alone_differs_is_the_only_one_named(self, section: str, change: Any) -> None:
        altered = kept("gossip")
        change(altered[section])
        (told,) = differences(kept("gossip"), altered)
        assert told.startswith(f"{section}: line ")

    def test_a_section_that_is_missing_is_a_difference(self) -> None:
        altered = kept("gossip")
        del altered["decisions of node 2"]
        (told,) = differences(kept("gossip"), altered)
        assert "found:  nothing" in told
