"""Strategies side by side: what is run, who is judged with which options, and what is said about it."""

import csv
import fcntl
import io
import json
import math
import os
import re
import threading
from html.parser import HTMLParser

import msgspec
import pytest
import typer
from rich.console import Console

import paceline
from paceline.cli import main
from paceline.cli.app import app
from paceline.comparison import run_commands, tables, trials
from paceline.comparison.outcome import Trial, chosen, rows_of, verdict
from paceline.core.errors import OptionError
from paceline.records.report import Report, Staleness, TargetReport
from paceline.records.wait_attribution import Culprit

BLANK = Report(
    strategy="", engine="sim", workers=4, seed=0, seconds=10.0, versions=5, pushes=20, samples_used=1_000,
    samples_discarded=0, samples_per_second=100.0, wait_fraction=0.5, staleness=Staleness(0.0, 0, 0),
    bytes_up=1_000_000, bytes_down=1_000_000, exchanges=None, loss=0.3, accuracy=0.9,
    metrics={"loss": 0.3, "accuracy": 0.9}, target=None, per_worker=[], warnings=[], journal=None,
)  # fmt: skip


def report(reached=None, target=True, **changed):
    aim = TargetReport("accuracy", 0.9, reached) if target else None
    return msgspec.structs.replace(BLANK, target=aim, **changed)


def trial(strategy, reached, seed=0, tuning=False, options=None, **changed):
    return Trial(strategy=strategy, options=options or {}, seed=seed, tuning=tuning, report=report(reached, **changed))


class Made:
    """Carries runs out by a table of seconds to the target."""

    def __init__(self, seconds, at_once=1):
        self.at_once, self.seconds, self.asked, self.stopped = at_once, seconds, [], False

    def run(self, trial):
        self.asked.append((trial.strategy, trial.options.get("lr"), trial.seed))
        found = self.seconds(trial)
        if isinstance(found, Exception):
            raise found
        return msgspec.structs.replace(trial, report=report(found))

    def stop(self):
        self.stopped = True


# -- which runs there are ----------------------------------------------------------------------------------------------


def test_each_strategy_is_judged_with_its_own_best_options_and_other_seeds():
    best = {"bsp": "0.2", "asp": "0.1"}
    made = Made(lambda t: 5.0 if t.options["lr"] == best[t.strategy] else 8.0)
    told = []
    found = trials.carried_out(["bsp", "asp"], {"lr": ["0.1", "0.2"]}, 7, 2, made, lambda *how: told.append(how[1:]))
    assert made.asked[:4] == [("bsp", "0.1", 7), ("asp", "0.1", 7), ("bsp", "0.2", 7), ("asp", "0.2", 7)]
    assert made.asked[4:] == [("bsp", "0.2", 8), ("asp", "0.1", 8), ("bsp", "0.2", 9), ("asp", "0.1", 9)]
    assert [each.tuning for each in found] == [True] * 4 + [False] * 4
    assert told == [(done, 8) for done in range(1, 9)]
    assert {row.strategy: row.options["lr"] for row in rows_of(found)} == best


def test_one_set_of_options_needs_no_tuning():
    made = Made(lambda t: 5.0)
    trials.carried_out(["bsp", "asp"], {"lr": ["0.1"]}, 3, 2, made, lambda *_: None)
    assert made.asked == [("bsp", "0.1", 3), ("asp", "0.1", 3), ("bsp", "0.1", 4), ("asp", "0.1", 4)]


def test_runs_side_by_side_come_back_in_their_order():
    gate = threading.Event()

    def seconds(trial):
        if trial.strategy == "bsp":
            assert gate.wait(30)
        else:
            gate.set()
        return 1.0

    found = trials.carried_out(["bsp", "asp"], {}, 0, 1, Made(seconds, at_once=2), lambda *_: None)
    assert [each.strategy for each in found] == ["bsp", "asp"]


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_exception_ends_the_others(at_once):
    made = Made(lambda t: ValueError("a slip") if t.strategy == "bsp" else 1.0, at_once)
    with pytest.raises(ValueError, match="a slip"):
        trials.carried_out(["bsp", "asp"], {}, 0, 3, made, lambda *_: None)
    assert made.stopped is (at_once > 1)


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([], {}),
        (["lr=0.1,0.2", "momentum=0,0.9"], {"lr": ["0.1", "0.2"], "momentum": ["0", "0.9"]}),
        (["lr=0.1,0.2 momentum=0"], {"lr": ["0.1", "0.2"], "momentum": ["0"]}),
        (["lr=0.1,0.1,"], {"lr": ["0.1"]}),
    ],
)
def test_tuned_options_are_read(texts, found):
    assert trials.tuned_options(texts) == found


@pytest.mark.parametrize(
    "texts", [["lr"], ["=1"], ["lr=1", "lr=2"], ["lr="], ["lr=,"], ["a=" + ",".join(map(str, range(1_001)))]]
)
def test_other_options_are_refused(texts):
    with pytest.raises(OptionError, match="--tune: "):
        trials.tuned_options(texts)


# -- what they show ----------------------------------------------------------------------------------------------------


def test_options_that_reach_the_target_more_often_are_better_than_faster_ones():
    fast, sure = {"lr": "1"}, {"lr": "0.1"}
    made = [trial("bsp", 2.0, 0, options=fast), trial("bsp", None, 1, options=fast)]
    made += [trial("bsp", 9.0, seed, options=sure) for seed in (0, 1)]
    assert chosen(made) == sure
    assert chosen(made[:1] + made[2:]) == fast


def test_without_a_target_the_metric_chooses():
    def side(lr, **changed):
        return trial("bsp", None, options={"lr": lr}, target=False, **changed)

    assert chosen([side("1", metrics={"accuracy": 0.8}), side("2", metrics={"accuracy": 0.9})]) == {"lr": "2"}
    lossy = [side("1", accuracy=None, metrics={"loss": 0.1}), side("2", accuracy=None, metrics={"loss": 0.9})]
    assert chosen(lossy) == {"lr": "1"}
    broken = [side("1", accuracy=None, metrics={"loss": math.nan}), side("2", accuracy=None, metrics={"loss": 0.9})]
    assert chosen(broken) == {"lr": "2"}


def test_rows_are_compared_with_the_first_seed_by_seed():
    first, second = rows_of([
        trial("bsp", 8.0, 0), trial("asp", 2.0, 0), trial("bsp", 10.0, 1), trial("asp", 10.0, 1),
        trial("bsp", 4.0, 2), trial("asp", None, 2), trial("asp", 0.1, 9, tuning=True),
    ])  # fmt: skip
    assert (first.speedup, first.runs, first.reached) == (1.0, 3, 3)
    assert second.speedup == pytest.approx(2.0)  # of 4 and 1; the third seed has no ratio
    assert (second.runs, second.reached, second.seconds.median) == (3, 2, 6.0)
    assert (first.megabytes, first.wait_fraction, first.metric.median) == (2.0, 0.5, 0.9)


def judged(*made, target="accuracy=0.9", culprits=None):
    return verdict(rows_of(made), target, culprits or {})


def test_a_verdict_names_the_first_and_why():
    slow = trial("bsp", 20.0, samples_per_second=50.0, wait_fraction=0.5)
    fast = trial("balanced", 5.0, samples_per_second=200.0, wait_fraction=0.04, samples_used=900)
    said = judged(slow, fast, culprits={"bsp": Culprit(3, 9.0, {"compute": 8.0, "transfer": 1.0})})
    assert said.startswith(
        "balanced is first: accuracy=0.9 is reached after 5 s in the median of 1 run, 4 times sooner"
    )
    assert "balanced trains on 4 times as many samples a second" in said
    assert "wait 4% of their time, those of bsp 50%, mostly for worker 3 (compute)" in said
    assert said.endswith("it needs 0.9 times as many samples.")
    assert said.count(". ") == 1


def test_verdicts_of_other_outcomes():
    assert "take equally long, within 3%" in judged(trial("bsp", 5.0), trial("asp", 5.1))
    assert judged(trial("bsp", None), trial("asp", None)).startswith("No strategy gets to accuracy=0.9")
    assert judged(trial("bsp", None), trial("asp", 4.0)).endswith("bsp did not get there.")
    surer = judged(trial("bsp", 5.0, 0), trial("bsp", 5.0, 1), trial("asp", 1.0, 0), trial("asp", None, 1))
    assert surer.startswith("bsp is first: accuracy=0.9 is reached after 5 s")
    assert "in the median of 2 runs; asp gets there in 1 of 2." in surer
    assert "the run ends after" in judged(
        trial("bsp", None, target=False), trial("asp", None, target=False, seconds=5.0), target=None
    )
    assert judged() == "Nothing was compared."


def test_a_comparison_where_all_failed_says_why():
    with pytest.raises(OptionError, match="no such file"):
        trials.summary([Trial(strategy="bsp", options={}, seed=0, failure="no such file")])


class Text(HTMLParser):
    """Fails on tags that do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        if tag not in ("rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("rect", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_notebook_shows_verdict_table_and_plot_with_everything_escaped():
    found = trials.summary([trial("bsp", 8.0), trial("<b>mine.py:Mine</b>", 2.0), trial("asp", None)])
    page = Text()
    page.feed(found._repr_html_())
    assert page.open == []
    assert "<b>mine.py:Mine</b> is first" in page.text
    assert "not reached" in page.text
    assert found._repr_html_().count("<rect") == 2


@pytest.mark.parametrize("width", [30, 40, 80, 140])
def test_no_number_is_cut_in_a_narrow_terminal(width):
    found = trials.summary([trial("bsp", 8.25, options={"lr": "0.05", "momentum": "0.9"}), trial("balanced", 1234.5)])
    file = io.StringIO()
    tables.show(found, Console(file=file, width=width))
    shown = " ".join(file.getvalue().split())
    headings, *rows = tables.grid(found)
    assert [cell for row in rows for cell in row if " ".join(cell.split()) not in shown and " " not in cell] == []
    assert [heading for heading in headings[1:] if heading not in shown] == []
    assert ("strategy" in shown) == (width >= 80)  # a table; otherwise one below the other
    assert all(len(line) <= width for line in file.getvalue().splitlines())


def test_a_spreadsheet_gets_every_run():
    failed = Trial(strategy="asp", options={"lr": "1"}, seed=0, tuning=True, failure="a slip")
    found = trials.summary([failed, trial("bsp", 8.0, options={"lr": "2"})])
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(found))))
    assert [(row["strategy"], row["lr"], row["to_target_s"], row["failure"]) for row in rows] == [
        ("asp", "1", "", "a slip"), ("bsp", "2", "8.0", ""),
    ]  # fmt: skip


# -- commands ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import paceline, torch
from torch.utils.data import TensorDataset

session = paceline.init()
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=session.option("lr", 0.01))
session.prepare(model, optimizer)
for x, y in session.batches(data, batch_size=4, epochs=2):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    session.report(loss=loss)
    optimizer.step()
"""


def digest(folder, script, *options, strategy="bsp", seed=0):
    made = run_commands.Commands(options, [str(script)], folder, 1)
    return made._digest(Trial(strategy=strategy, options={}, seed=seed))


@pytest.mark.parametrize("hindrance", ["file", "link"])
def test_a_place_for_runs_that_cannot_be_a_folder_is_refused(tmp_path, hindrance):
    (tmp_path / "compare").mkdir() if hindrance == "link" else (tmp_path / "compare").write_text("")
    made = run_commands.Commands([], ["train.py"], tmp_path, 1)
    trial = Trial(strategy="bsp", options={}, seed=0)
    if hindrance == "link":
        (tmp_path / "compare" / made._digest(trial)).symlink_to(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="--runs-dir: cannot make the folder"):
        made.run(trial)


def test_a_page_that_cannot_be_written_is_refused_before_any_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").write_text("raise SystemExit('it runs')")
    words = ["compare", "--strategy", "bsp", "--strategy", "asp", "--report"]
    assert main([*words, str(tmp_path / "none" / "page.html"), str(tmp_path / "train.py")]) == 2
    assert "cannot write into the folder" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main([*words, str(tmp_path / "page.html"), str(tmp_path / "train.py")]) == 2
    assert "pip install 'paceline[report]'" in capsys.readouterr().err


def test_a_run_is_made_again_when_something_has_changed(tmp_path, monkeypatch):
    script, beside, own = (tmp_path / name for name in ("train.py", "data.py", "mine.py"))
    for file in (script, beside, own):
        file.write_text("a = 1\n")
    before = digest(tmp_path, script)
    assert digest(tmp_path, script) == before
    assert digest(tmp_path, script, "--workers", "4") != before
    assert digest(tmp_path, script, seed=1) != before
    assert digest(tmp_path, script, strategy="asp") != before
    beside.write_text("a = 2\n")
    assert digest(tmp_path, script) != before
    mine = digest(tmp_path, script, strategy=f"{own}:Mine")
    own.write_text("a = 3\n")
    assert digest(tmp_path, script, strategy=f"{own}:Mine") != mine
    after = digest(tmp_path, script)
    monkeypatch.setenv("PACELINE_BATCH_SIZE", "2")
    assert digest(tmp_path, script) != after


def test_given_settings_become_words_again():
    given = {
        "workers": "4",
        "respawn": True,
        "spread": False,
        "options": ["a=1", "b=2"],
        "epochs": None,
        "scenario": "x",
    }
    assert run_commands.written(given) == [
        "--workers", "4", "--respawn", "--pack", "--set", "a=1", "--set", "b=2", "--scenario", "x"
    ]  # fmt: skip


def parsed(*words):
    command = typer.main.get_command(app).commands["compare"]
    return command.make_context("compare", list(words)).params


TWO = ("lr=0.1,0.2", "momentum=0,0.9")


@pytest.mark.parametrize(
    "words",
    [
        ("--tune", *TWO, "--seeds", "5", "train.py"),
        ("--seeds", "5", "--tune", *TWO, "train.py"),
        ("--seeds=5", "--tune", *TWO, "train.py"),
        ("--tune=lr=0.1,0.2", "momentum=0,0.9", "--seeds", "5", "train.py"),
        ("--tune", TWO[0], "--seeds", "5", TWO[1], "train.py"),
        ("--tune", TWO[0], "--json", "--seeds", "5", TWO[1], "train.py"),
        ("--tune", TWO[0], "--tune", TWO[1], "--seeds", "5", "train.py"),
        ("--tune", " ".join(TWO), "--seeds", "5", "train.py"),
        ("--tune", *TWO, "-q", "--seeds", "5", "--spread", "train.py"),
        ("--tune", *TWO, "--pack", "--seeds", "5", "train.py"),
    ],
    ids=" ".join,
)
def test_tuned_options_may_stand_in_any_order_before_the_script(words):
    found = parsed("--strategy", "bsp", *words)
    assert trials.tuned_options(found["tune"]) == {"lr": ["0.1", "0.2"], "momentum": ["0", "0.9"]}
    assert (found["seeds"], found["script"], found["arguments"] or []) == (5, "train.py", [])


@pytest.mark.parametrize(
    "own",
    [("lr=1,2",), ("--tune", "lr=1,2", "b=3"), ("--seeds", "9", "x=1"), ("--", "a=1"), ("--tune=lr=1", "-q")],
    ids=" ".join,
)
def test_words_after_the_script_are_its_own(own):
    found = parsed("--tune", *TWO, "--seeds", "5", "train.py", *own)
    assert trials.tuned_options(found["tune"]) == {"lr": ["0.1", "0.2"], "momentum": ["0", "0.9"]}
    assert (found["seeds"], found["script"]) == (5, "train.py")
    assert found["arguments"] == list(own)
    assert not found["quiet"]


def test_a_script_whose_name_reads_as_a_tuned_option_is_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "momentum=0,0.9").write_text("")
    found = parsed("--tune", *TWO, "--seeds", "7")
    assert (found["tune"], found["script"], found["arguments"]) == (["lr=0.1,0.2"], "momentum=0,0.9", ["--seeds", "7"])
    assert parsed("a=1,2", "--seeds", "7")["script"] == "a=1,2"  # no --tune, so it is a script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--strategy", "bsp"), "only 'bsp' is given; give two"),
        ((), "none is given; give two"),
        (("--tune", "lr=0.1,0.2"), "none is given; give two"),
        (("--strategy", "bsp", "--strategy", "dsap"), "did you mean 'dasp'"),
        (("--strategy", "bsp", "--strategy", "asp", "--json", "--csv"), "not both"),
        (("--strategy", "bsp", "--strategy", "asp", "--csv", "-"), "print to standard output without it"),
        (("--strategy", "bsp", "--strategy", "asp", "--tune", "lr"), "--tune: must be a name and values"),
        (("--strategy", "bsp", "--strategy", "asp", "nothing.py"), "does not exist"),
        (("--strategy", "bsp", "--strategy", "asp", "--report", "page.txt"), "must end in .html"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, said, capsys):
    assert main(["compare", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def kept_as(place):
    place.mkdir(parents=True, exist_ok=True)
    body = msgspec.json.encode(report(4.0)).decode()
    (place / run_commands.RESULT).write_text(f'{{"code":0,"report":{body}}}')


def test_a_run_that_another_comparison_makes_is_waited_for(tmp_path, monkeypatch):
    made = run_commands.Commands([], ["train.py"], tmp_path, 1)
    asked = Trial(strategy="bsp", options={}, seed=0)
    place = tmp_path / "compare" / made._digest(asked)
    place.mkdir(parents=True)
    other = os.open(place, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(made, "_made", lambda *_: pytest.fail("the other makes it"))

    def finished(_):
        kept_as(place)
        os.close(other)

    monkeypatch.setattr(run_commands.time, "sleep", finished)
    found = made.run(asked)
    assert (found.reused, found.seconds) == (True, 4.0)


def test_a_comparison_that_waits_for_another_can_be_ended(tmp_path, monkeypatch):
    made = run_commands.Commands([], ["train.py"], tmp_path, 1)
    asked = Trial(strategy="bsp", options={}, seed=0)
    place = tmp_path / "compare" / made._digest(asked)
    place.mkdir(parents=True)
    (place / "of the other").touch()
    other = os.open(place, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(run_commands.time, "sleep", lambda _: made.stop())
    assert made.run(asked).failure == "it ended with exit code 130"
    assert (place / "of the other").exists()
    os.close(other)


def test_an_interrupt_says_what_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    done = []

    def run(self, trial):
        if done:
            raise KeyboardInterrupt
        done.append(trial)
        return msgspec.structs.replace(trial, report=report(4.0))

    monkeypatch.setattr(run_commands.Commands, "run", run)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert main(["compare", "--strategy", "bsp", "--strategy", "asp", "--seeds", "2"]) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("paceline: 1 of 4: bsp, seed 0: ")
    assert said[1:] == ["paceline: interrupted: 1 run is kept, and the same command goes on with the others"]


@pytest.mark.slow
def test_the_command_compares_reuses_and_says_who_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["compare", "--strategy", "bsp", "--strategy", "asp", "--seeds", "1", "--evaluate-every", "off"]
    assert main([*words, "--csv", "train.py"]) == 0
    first = capsys.readouterr()
    assert [row["strategy"] for row in csv.DictReader(io.StringIO(first.out))] == ["bsp", "asp"]
    assert re.search(r"2 of 2: (bsp|asp), seed 0: [\d.]+ s\n", first.err)
    assert main([*words, "--json", "--report", "page.html", "train.py"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert all(f'id="{name}"' in page for name in ("times", "spent"))
    again = capsys.readouterr()
    assert again.err.count("(made before)") == 2
    found = json.loads(again.out)
    assert found["engine"] == "sim"
    assert [row["strategy"] for row in found["rows"]] == ["bsp", "asp"]
    assert found["verdict"].startswith(("bsp", "asp"))
    (tmp_path / "train.py").write_text("raise ValueError('a slip')")
    assert main([*words, "train.py"]) == 2
    assert "a slip" in capsys.readouterr().err


def test_functions_are_compared_in_this_process():
    space = {}
    exec(f"def train():\n{'    '.join(SCRIPT.splitlines(keepends=True))}", space)
    found = paceline.compare(space["train"], ["bsp", "asp"], seeds=1, tune={"lr": [0.01, 0.02]}, evaluate_every="off")
    assert [row.strategy for row in found.rows] == ["bsp", "asp"]
    assert len(found.trials) == 6
    assert "mostly for worker" in found.verdict or "of their time" in found.verdict
    with pytest.raises(OptionError, match="fewer than two"):
        paceline.compare(space["train"], ["bsp"])
    with pytest.raises(OptionError, match="fewer than two"):
        paceline.compare(space["train"], [], tune={"lr": [0.01, 0.02]})
    with pytest.raises(OptionError, match="tune: lr has no values"):
        paceline.compare(space["train"], ["bsp", "asp"], tune={"lr": []})
    with pytest.raises(OptionError, match="seeds: must be >= 1"):
        paceline.compare(space["train"], ["bsp", "asp"], seeds=0)
