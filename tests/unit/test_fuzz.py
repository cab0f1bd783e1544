"""Whatever a person writes is understood or answered with exit code 2 and one line: no traceback, no exit code 4."""

import functools
from collections import Counter
from pathlib import Path

import pytest
from fuzzing import BY_COMMAND, KINDS, Fuzzer

from paceline import strategies
from paceline.core import values
from paceline.laws.clusters import ClusterPlan, play
from paceline.records.journal import Writer
from paceline.strategies import sources

SCENARIO = (
    "seed = 1\n[compute]\nseconds_per_sample = 0.125\n"
    "[[workers]]\nspeed = 1.0\n[[workers]]\nspeed = 0.5\n[[workers]]\nspeed = 0.25\n"
)
# With a burn-in that these journals do not outlast, a replay of adaptive_k_load does not estimate a frontier.
JOURNALS = [
    "ssp", "dasp", "balanced", "adaptive_sync", "adaptive_k", "k_async:k=2", "adaptive_k_load:burn_in=100", "dssp",
]  # fmt: skip


@pytest.fixture
def journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Short ones of several strategies. What is installed is looked up once: no input changes it."""
    monkeypatch.setattr(sources, "installed", functools.cache(sources.installed))
    found = []
    for spec in JOURNALS:
        path = tmp_path / "sound.jsonl"
        writer = Writer(path)
        for line in play(strategies.build(spec, 0), ClusterPlan(SCENARIO, 4, 0, 64, 1.0, 0.1, 12, 1000)):
            writer.write(line)
        writer.close()
        found.append(path.read_bytes())
    return found


def fuzzed(cases: int, seed: int, folder: Path, journals: list[bytes]) -> Fuzzer:
    fuzzer = Fuzzer(seed, folder, journals)
    fuzzer.run(cases)
    return fuzzer


def described(fuzzer: Fuzzer) -> str:
    by_end = Counter((fault.kind, fault.what.strip().splitlines()[-1]) for fault in fuzzer.faults)
    examples = [f"{fault.kind}: {fault.given[:2000]}\n{fault.what}" for fault in fuzzer.faults[:5]]
    return "\n".join([f"{count} times {end}" for end, count in by_end.items()] + examples)


def test_a_sample_of_bad_input(folder: Path, journals: list[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    cases = 4_000
    fuzzer = fuzzed(cases, 0, folder, journals)
    assert not fuzzer.faults, described(fuzzer)
    # Both answers of every kind occur, or nothing was tried.
    assert sum(fuzzer.answers.values()) == cases
    assert {(kind, answer) for kind in KINDS for answer in ("refused", "understood")} <= set(fuzzer.answers)
    refusals = [line for line in capfd.readouterr().err.splitlines() if line.startswith("paceline: ")]
    assert len(refusals) == sum(count for (_, answer), count in fuzzer.answers.items() if answer == "exit code 2")


@pytest.mark.soak
def test_a_hundred_thousand(folder: Path, journals: list[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    fuzzer = fuzzed(100_000, 1, folder, journals)
    assert not fuzzer.faults, described(fuzzer)
    with capfd.disabled():
        print(dict(sorted(fuzzer.answers.items())))


def test_a_planted_crash_is_found(
    folder: Path, journals: list[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sound = values._number

    def crashing(value: object, info: object) -> object:
        return 1 / 0 if value in ("nan", "inf", "-inf") else sound(value, info)  # type: ignore[arg-type]

    monkeypatch.setattr(values, "_number", crashing)
    fuzzer = fuzzed(2_000, 2, folder, journals)
    assert {"ZeroDivisionError: division by zero"} == {f.what.strip().splitlines()[-1] for f in fuzzer.faults} - {
        "exit code 4"
    }
    assert BY_COMMAND > 1
