"""The publications' claims: read from results, written nowhere by hand, and the same on the page and in the package."""

import ast
import json
import runpy
from pathlib import Path

import pytest

import publications
from contenders.strategy_code import codes_of
from paceline import strategies
from paceline.cli import main
from paceline.cli.claims import load_claims
from publications import Measured

ROOT = Path(__file__).parents[2]


def write(folder: Path, name: str, *bars: tuple[str, str, str, bool]) -> None:
    """A result with these bars: name, value, bound, passed."""
    told = [{"name": f"words (`{bar}`)", "value": value, "bar": bound, "passed": passed}
            for bar, value, bound, passed in bars]  # fmt: skip
    raw = {"command": f"python {name}.py", "date": "2026-01-02 03:04 UTC", "commit": "abc1234", "verdicts": told}
    (folder / f"{name}.json").write_text(json.dumps(raw))


def judged(folder: Path, **declared: object) -> publications.Claim:
    return publications.judged({"claim": "It gains.", "figure": "10 %", **declared}, folder, {})


def test_what_the_script_writes_is_committed() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "tools" / "write_publications.py"))["pages"]()
    assert len(made) == 2
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"run `make pages`: {path.name} says something else"


@pytest.mark.parametrize(
    ("passed", "wanting", "tests", "verdict"),
    [
        ([True, True], [], [], "met"),
        ([True, False], [], [], "partly"),
        ([False, False], [], [], "missed"),
        ([False], [], ["a test"], "missed"),  # what a measurement misses no test can save
        ([True], ["other: bar"], [], "partly"),
        ([], ["other: bar"], [], "not measured"),
        ([], ["other: bar"], ["a test"], "partly"),
        ([], [], ["a test"], "met"),
        ([], [], [], "not measured"),
    ],
)
def test_a_verdict_is_as_good_as_its_bars(passed, wanting, tests, verdict) -> None:
    found = [Measured("a", f"bar{number}", "1", ">= 1", each) for number, each in enumerate(passed)]
    assert publications.verdict_of(found, wanting, tests) == verdict


def test_a_result_that_is_not_there_yet_is_picked_up_when_it_is(tmp_path: Path) -> None:
    before = judged(tmp_path, bars=["race: dasp_sooner*"])
    assert (before.verdict, before.ours, before.sources) == ("not measured", "not measured yet in race", ())
    write(tmp_path, "race", ("dasp_sooner_4x", "0.2", ">= 0.169", True), ("dasp_waits", "0.2", ">= 0.169", False))
    after = judged(tmp_path, bars=["race: dasp_sooner*"])
    assert (after.verdict, after.ours, after.sources) == ("met", "0.2 (bar >= 0.169)", ("race",))


def test_many_bars_are_told_by_how_many_are_met_and_their_range(tmp_path: Path) -> None:
    write(tmp_path, "a", ("x_1", "0.925", ">= 0.92", True), ("x_2", "1,950", ">= 0.92", True),
          ("x_3", "not measured: no data", ">= 0.92", False), ("y", "4.4e-16", "<= 0.1", True))  # fmt: skip
    assert judged(tmp_path, bars=["a: x_*", "a: y"]).ours == (
        "3 of 3 bars met, 0.925 to 1950 (bar >= 0.92), 0 (bar <= 0.1); not measured yet in a"
    )
    assert judged(tmp_path, bars=["a: x_1"], unit="share").ours == "92.5 % (bar >= 92 %)"
    assert judged(tmp_path, bars=["a: x_*"], unit="none").ours == "2 of 2 bars met; not measured yet in a"
    without = judged(tmp_path, bars=["a: x_3"])
    assert (without.ours, without.verdict, without.wanting) == ("not measured yet in a", "not measured", ("a: x_3",))


def test_a_bar_that_two_patterns_name_counts_once(tmp_path: Path) -> None:
    write(tmp_path, "a", ("x_1", "1", ">= 1", True))
    assert len(judged(tmp_path, bars=["a: x_*", "a: x_1"]).measured) == 1


@pytest.mark.parametrize(("code", "marked"), [({"dasp": "other"}, True), ({"bsp": "other"}, False), ({}, False)])
def test_a_claim_says_that_it_was_measured_with_an_earlier_version(code, marked, tmp_path: Path) -> None:
    """A result is not measured anew for every change of a strategy, but its page does not hide its age."""
    write(tmp_path, "race", ("dasp_sooner", "0.2", ">= 0.169", True))
    raw = json.loads((tmp_path / "race.json").read_text())
    (tmp_path / "race.json").write_text(json.dumps(raw | {"strategy_code": codes_of(["dasp"]) | code}))
    claim = publications.judged(
        {"claim": "It gains.", "figure": "10 %", "bars": ["race: dasp_sooner"]}, tmp_path, {}, ["dasp"]
    )
    assert claim.verdict == "met"
    assert ("measured with an earlier version of the strategy in race" in claim.ours) == marked


def test_a_result_has_the_claims_that_are_read_from_it_beside_its_own_bars() -> None:
    for question, figure, bar in (
        ("gossip", "92 % less", "_bytes_saved`"),
        ("unevenness", "16.9 % to 82.1 % less time", "`dasp_sooner`"),
        ("mixed_gpus", "less staleness", "`dasp_staleness`"),
    ):
        line = next(line for line in publications.beside(question).splitlines() if bar in line)
        assert figure in line
    assert publications.beside("datapath").count("\n") == 1  # a head without rows


def test_parts_that_are_named_and_not_measured_are_wanting(tmp_path: Path) -> None:
    """A contest that was held says nothing of those that were not."""
    write(tmp_path, "a", ("one_saved", "0.94", ">= 0.92", True))
    found = judged(tmp_path, bars=["a: {one,two,three}_saved"])
    assert (found.verdict, found.wanting) == ("partly", ("a: two_saved", "a: three_saved"))
    assert found.ours == "0.94 (bar >= 0.92); 2 bars not measured yet in a"


def test_braces_stand_for_each_of_their_parts() -> None:
    assert publications.spelled_out("a: x{1,2}_{,b}") == ["a: x1_", "a: x1_b", "a: x2_", "a: x2_b"]
    assert publications.spelled_out("a: x_*") == ["a: x_*"]


def test_bars_are_left_out_by_name() -> None:
    names = ["x_behind", "x_nodes_behind", "faults_behind", "x_ahead"]
    assert [name for name in names if publications.fits(name, "*_behind !*_nodes_behind !faults_behind")] == [
        "x_behind"
    ]


@pytest.mark.parametrize(("key", "value"), [("bar", ["a: b"]), ("value", "92 %"), ("unit", "percent")])
def test_a_claim_says_nothing_else(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        judged(tmp_path, **{key: value})


def test_every_claim_has_a_source_and_its_tests_exist() -> None:
    found = publications.read()
    assert len({each.name for each in found}) == len(found) >= 6
    for publication in found:
        for name in publication.strategies:
            strategies.machine_class(name)
        for claim in publication.claims:
            assert claim.measured or claim.wanting or claim.tests, claim.claim
            for test in claim.tests:
                file, _, name = test.partition("::")
                body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
                assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, test


def test_a_bar_of_a_committed_result_has_the_name_that_is_asked_for() -> None:
    """Where a result is there, a name it does not have is a mistake, or a bar that it has lost."""
    committed = {path.stem for path in publications.results.FOLDER.glob("*.json")}
    wanting = {each for publication in publications.read() for claim in publication.claims for each in claim.wanting}
    known = {name for each in NOT_YET for name in publications.spelled_out(each)}
    assert {each for each in wanting if each.partition(":")[0] in committed} <= known


NOT_YET = {  # bars that a result has only once it is measured anew
    "fastest_k: load_computed_*",
    "fastest_k: load_sent_*",
    "fastest_k: load_time_*",
    "fastest_k: tuned_adaptive",
    "fastest_k: tuned_load_*",
    "gossip: time_saved",
    "gossip: real_shaped_time_saved{,_overlap}",
    "gossip: {cifar8,mnist16,cifar16,float32,step8,elastic8}_{bytes_saved,behind,nodes_behind}",
    "gossip: {cifar8,mnist16,cifar16,float32,step8,elastic8}_{ahead_of,loss_below}_fixed",
    "mixed_gpus: dasp_fit_none_*",
    "unevenness: dasp_free_batch{,_behind}",
    "unevenness: resampled_states_{behind,ahead}",
}


def test_the_package_says_of_a_strategy_what_the_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    page = (ROOT / "docs" / "results" / "publications.md").read_text(encoding="utf-8")
    assert main(["strategies"]) == 0
    listed = capsys.readouterr().out
    for name, claims in load_claims().items():
        assert main(["strategies", name]) == 0
        shown = capsys.readouterr().out
        assert f"claims: {claims.standing}" in listed
        for claim in claims.claims:
            row = next(line for line in shown.splitlines() if claim.claim in line)
            assert claim.ours in row
            assert claim.verdict in row
            assert claim.claim in page


def test_a_baseline_has_no_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bsp" not in load_claims()
    assert main(["strategies", "bsp"]) == 0
    assert "Claims of" not in capsys.readouterr().out
