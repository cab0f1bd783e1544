"""A sample of benchmarks/bench_chaos.py: runs in which much goes wrong have no fault, and planted ones are found."""

import tempfile

import pytest

import bench_chaos
import chaos_runs
from chaos_plants import PLANTS
from contenders.bars import Bar

SOUND = (2, 7, 10, 11, 14, 15, 16, 18, 20, 22, 27, 31)  # under each exchange
FOUND = {  # a seed that finds it, and a word of what gives it away
    "a_push_is_applied_twice": (21, "read"),
    "a_push_is_lost": (22, "grant"),
    "a_bound_is_exceeded": (2, "nobody leads by more than"),
    "a_sample_is_never_settled": (1, "ended by error"),
    "a_sample_is_settled_twice": (1, "settled once"),
    "a_second_copy_of_a_push_is_accepted": (0, "every push answers a grant"),
    "a_second_copy_of_a_clock_is_accepted": (44, "in the table instead of"),
    "a_second_copy_of_a_model_is_accepted": (19, "every message arrives once"),
    "a_push_that_was_rolled_back_is_still_counted": (2, "versions are consecutive"),
    "a_roll_back_is_not_told": (2, "what is rolled back is told"),
    "a_checkpoint_is_of_another_moment": (0, "a version that exists"),
    "a_worker_never_finds_the_server_again": (2, "ended by error"),
    "a_parked_worker_is_forgotten": (3, "ended by error"),
}


@pytest.mark.parametrize("seed", SOUND)
def test_a_chaotic_run_has_no_fault(seed):
    judged = bench_chaos.judge(seed)
    assert judged.faults == []
    assert judged.struck


def test_the_sample_has_every_exchange_and_restarted_servers():
    assert {chaos_runs.chaos(seed).kind for seed in SOUND} == {kind for kind, _ in chaos_runs.CASES}
    assert sum("server_crash" in chaos_runs.chaos(seed).scenario for seed in SOUND) >= len(SOUND) / 2


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant):
    seed, word = FOUND[plant]
    found = bench_chaos.judge(seed, plant).faults
    assert word in " ".join(found)
    assert bench_chaos.judge(seed).faults == []


def test_a_failing_seed_is_printed_and_reproduces(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_chaos, "_quiet", lambda: None)  # it is for a process of its own
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        bench_chaos.main(["--seed", "1", "--plant", "a_sample_is_settled_twice"])
    assert ended.value.code == 1
    (about, *faults, count) = capsys.readouterr().out.splitlines()
    assert about.startswith("seed 1: ")
    assert [fault.strip() for fault in faults] == bench_chaos.judge(1, "a_sample_is_settled_twice").faults
    assert count == f"{len(faults)} faults"


def test_bars_are_missed_by_a_fault_and_by_one_that_nobody_finds():
    sound = bench_chaos.Judged(0, "gradients", "bsp", [], 10, list(chaos_runs.FAULTS), 1, 2, 3)
    faulty = bench_chaos.Judged(1, "gradients", "asp:whole_steps=true", ["something"], 10, [], 0, 0, 0)
    caught = [(name, 3, "it") for name in PLANTS]

    def missed(judged, caught) -> list[str]:
        found: list[Bar] = bench_chaos.bars_of(judged, caught, len(judged), 1)
        return [bar.name for bar in found if not bar.passed]

    assert missed([sound], caught) == []
    assert missed([sound, faulty], caught) == ["faults"]
    assert missed([sound], [*caught[1:], (caught[0][0], None, "")]) == ["caught"]
    assert "--seed 1`" in bench_chaos.notes([sound, faulty], caught)
    assert [row["with a fault"] for row in bench_chaos.rows_of([faulty, sound])] == [0, 1]
