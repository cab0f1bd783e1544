"""Two commits of a small repository are compared, each by its own benchmark and sources."""

import json
import subprocess

import pytest

import compare_commits
from compare_commits import Comparison, compare, judge, loss

BENCH = """
import paceline

def make_scenario(workers):
    return workers

def run_paceline(scenario, pushes): ...
def run_with_journal(scenario, pushes): ...

def _cpu_us(run, scenario, pushes):
    return paceline.US * (2 if run is run_with_journal else 1)
"""


def git(tree, *arguments):
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *arguments], cwd=tree, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Its second commit takes 11 microseconds for what took the first 10."""
    tree = tmp_path / "repository"
    for name in ("src/paceline", "benchmarks"):
        (tree / name).mkdir(parents=True)
    (tree / "benchmarks/bench_simulator.py").write_text(BENCH)
    git(tree, "init", "-q")
    for us in (10.0, 11.0):
        (tree / "src/paceline/__init__.py").write_text(f"US = {us}\n")
        git(tree, "add", "-A")
        git(tree, "commit", "-q", "--no-verify", "-m", f"{us}")
    return tree


def test_each_commit_is_measured_with_its_own_sources(repository, capsys):
    compare_commits.main(["HEAD~1", "--quick", "--json", "--only", "simulator", "--pairs", "3"], repository)
    told = json.loads(capsys.readouterr().out)
    assert told["old"] == git(repository, "rev-parse", "--short", "HEAD~1")
    plain, journalled = told["comparisons"]
    assert (plain["old"], plain["new"], journalled["new"]) == (10.0, 11.0, 22.0)
    assert plain["losses"] == pytest.approx([0.1] * 3)
    order = [row["side"] for row in told["rows"] if row["number"] == "push_us"]
    assert order == ["old", "new", "new", "old", "old", "new"]
    assert len(git(repository, "worktree", "list").splitlines()) == 1, "the checkouts are gone"


def test_a_run_that_was_cut_off_goes_on_with_the_rows_that_it_kept(repository, tmp_path, capsys):
    kept, ask = tmp_path / "rows.jsonl", ["HEAD~1", "--quick", "--json", "--only", "simulator", "--rows"]
    compare_commits.main([*ask, str(kept), "--pairs", "1"], repository)
    rows = [{**json.loads(line), "value": 7.0} for line in kept.read_text().splitlines()]
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    compare_commits.main([*ask, str(kept), "--pairs", "2"], repository)
    told = json.loads(capsys.readouterr().out)
    assert [row["value"] for row in told["rows"] if row["number"] == "push_us"] == [7.0, 7.0, 11.0, 10.0]


def test_lanes_share_no_core():
    assert compare_commits.split_cores(range(7), 3) == [{0, 1}, {2, 3}, {4, 5}]
    with pytest.raises(SystemExit, match="--lanes must be <= 2, the number of cores, not 3"):
        compare_commits.split_cores([4, 6], 3)


def test_a_benchmark_that_fails_says_so_and_leaves_no_checkout(repository):
    (repository / "benchmarks/bench_simulator.py").write_text("raise RuntimeError('broken bench')")
    git(repository, "commit", "-qam", "broken", "--no-verify")
    with pytest.raises(SystemExit, match=r"simulator failed on new(.|\n)*broken bench"):
        compare_commits.main(["HEAD~1", "--quick", "--only", "simulator"], repository)
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_sources_from_elsewhere_are_refused(repository):
    git(repository, "rm", "-rq", "src")
    (repository / "src/paceline").mkdir(parents=True)
    (repository / "src/paceline/unused.toml").write_text("")
    (repository / "benchmarks/bench_simulator.py").write_text("")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "without sources", "--no-verify")
    with pytest.raises(SystemExit, match=r"paceline is imported from .*, not from .*new"):
        compare_commits.main(["HEAD~1", "--quick", "--only", "simulator"], repository)


def test_an_unknown_revision_is_named(repository):
    with pytest.raises(SystemExit, match="no_such_revision"):
        compare_commits.main(["no_such_revision", "--quick", "--only", "simulator"], repository)


def test_a_loss_is_more_time_or_fewer_in_a_second():
    assert loss("push_us", 10.0, 10.5) == pytest.approx(0.05)
    assert loss("steps_per_s", 100.0, 95.0) == pytest.approx(0.05)
    assert loss("steps_per_s", 100.0, 110.0) == pytest.approx(-0.1)


def test_the_median_of_the_pairs_own_losses_is_flagged_beyond_three_percent():
    def rows(benchmark, *pairs):
        return [
            {"benchmark": benchmark, "number": "push_us", "pair": pair, "side": side, "value": value}
            for pair, values in enumerate(pairs)
            for side, value in zip(("old", "new"), values, strict=True)
        ]

    # A machine that is twice as slow in one pair strikes both commits.
    found = compare([*rows("simulator", (10, 10.2), (20, 20.4), (10, 15)), *rows("tables", (10, 10.4), (20, 20.8))])
    assert [each.flagged for each in found] == [False, True]
    assert [verdict.passed for verdict in judge(found)] == [True, False]
    assert judge(found)[1].value == "+4.0% (push_us)"
    assert compare_commits.shown(found)[0]["behind in"] == "3 of 3 pairs"


def test_the_parts_of_a_loop_explain_and_are_not_judged():
    found = [Comparison("overhead:cnn", f"cnn_{what}", 1.0, 1.0, [0.1]) for what in ("ours_ms", "model_ms")]
    assert [each.flagged for each in found] == [False, False]
    assert judge(found) == []
    assert judge([*found, Comparison("overhead:cnn", "cnn_samples_per_s", 1.0, 1.0, [0.1])])[0].value.startswith("+10")


def test_a_number_that_one_commit_lacks_is_left_out():
    rows = [{"benchmark": "tables", "number": "get_us", "pair": 0, "side": "new", "value": 1.0}]
    assert compare(rows) == []
    assert judge([Comparison("tables", "get_us", 1.0, 1.0, [0.0])])[0].passed
