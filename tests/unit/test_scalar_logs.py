"""Scalars for other tools while a run goes on: each gets the journal's numbers, and none can end the run."""

import csv
import logging
import sys
import types

import pytest
from journals import decision, header, joined, observed, pushed

import paceline
import paceline.tasks
from paceline.cli import main
from paceline.core.actions import Apply, Track
from paceline.core.errors import OptionError
from paceline.records import scalar_logs
from paceline.records.scalars import points

LINES = [
    header(),
    joined(0.0, 0),
    decision(pushed(1.0, 0, 1, loss=2.0), Apply((1,), (1.0,), "one"), Track("k", 3.0, ""), Track("lag", 1.0, "", 0)),
    observed(1.5, "report", 0, name="rate", value=0.1),
    observed(1.5, "report", 0, name="rate", value="nan"),
    observed(2.0, "evaluation", version=1, samples_used=8, epoch=0.5, metrics={"accuracy": 0.5, "loss": 1.25}),
    decision(pushed(3.0, 0, 2, loss=1.0), Apply((2,), (1.0,), "one")),  # the loss is the evaluation's from then on
]
FOUND = [
    (1.0, 1, {"loss": 2.0, "track/k": 3.0, "track/lag/worker 0": 1.0}),
    (1.5, 1, {"report/rate": 0.1}),
    (2.0, 1, {"accuracy": 0.5, "loss": 1.25}),
]


def test_scalars_of_a_journal():
    assert list(points(LINES)) == FOUND


def logged(tool, folder):
    with scalar_logs.opened([tool], folder, header()) as log:
        for line in LINES:
            log.write(line)


def test_a_csv_file_has_a_line_for_each_number(tmp_path):
    logged("csv", tmp_path)
    rows = list(csv.DictReader((tmp_path / "scalars.csv").read_text().splitlines()))
    assert {(row["name"], float(row["value"])) for row in rows} == {each for _, _, of in FOUND for each in of.items()}
    assert (rows[-1]["seconds"], rows[-1]["version"]) == ("2.0", "1")


def test_an_event_file_of_tensorboard_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    logged("tensorboard", tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    wanted = [(version, name, value) for _, version, of in FOUND for name, value in of.items()]
    assert [(step, tag) for step, tag, _ in found] == [(step, tag) for step, tag, _ in wanted]
    assert [value for _, _, value in found] == pytest.approx([value for _, _, value in wanted])


class ForeignRun:
    """What `wandb.init` and `trackio.init` return."""

    def __init__(self, **told):
        self.told, self.points, self.ended, self.steps = told, [], False, None

    def define_metric(self, name, step_metric):
        self.steps = (name, step_metric)

    def log(self, values):
        self.points.append(values)

    def finish(self):
        self.ended = True


@pytest.fixture
def foreign(monkeypatch):
    """Stand-ins for wandb and trackio; the runs that were begun."""
    runs = []

    def init(**told):
        runs.append(ForeignRun(**told))
        return runs[-1]

    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        module.init, module.Settings, module.finish = init, dict, lambda: runs[-1].finish()
        monkeypatch.setitem(sys.modules, name, module)
    return runs


@pytest.mark.parametrize("tool", ["wandb", "trackio"])
def test_other_tools_get_numbers_with_their_version_and_second(tmp_path, foreign, tool):
    logged(tool, tmp_path)
    (run,) = foreign
    assert run.points == [{**values, "version": version, "seconds": at} for at, version, values in FOUND]
    assert run.ended
    assert (run.told["project"], run.told["name"]) == ("paceline", tmp_path.name)
    assert run.told["config"]["strategy"] == "bsp"
    if tool == "wandb":
        assert (run.told["mode"], run.told["dir"], run.steps) == ("offline", str(tmp_path), ("*", "version"))


def test_tools_for_people_do_not_get_thousands_of_points_a_second(tmp_path, foreign):
    with scalar_logs.opened(["wandb", "csv"], tmp_path, header()) as log:
        for number in range(1000):
            log.write(observed(float(number), "report", 0, name="x", value=number))
        log.write(observed(1000.0, "report", 0, name="y", value=1.0))
    (run,) = foreign
    assert len(run.points) < 500
    assert run.points[-1]["report/y"] == 1.0
    assert len((tmp_path / "scalars.csv").read_text().splitlines()) == 1 + 1001


def test_a_tool_that_fails_is_left_out_and_the_others_go_on(tmp_path, foreign, caplog, monkeypatch):
    def fail(self, values):
        raise ConnectionError("no route")

    monkeypatch.setattr(ForeignRun, "log", fail)
    caplog.set_level(logging.WARNING, "paceline")
    with scalar_logs.opened(["wandb", "csv"], tmp_path, header()) as log:
        for line in LINES:
            log.write(line)
    assert [record.getMessage() for record in caplog.records] == [
        "--log wandb: ConnectionError: no route; it gets nothing more of this run"
    ]
    assert len((tmp_path / "scalars.csv").read_text().splitlines()) == 1 + 6


def test_a_tool_that_cannot_begin_is_an_error_and_the_others_are_closed(tmp_path, foreign, monkeypatch):
    def fail(**told):
        raise RuntimeError("not logged in")

    monkeypatch.setattr(sys.modules["wandb"], "init", fail)
    both = scalar_logs.opened(["trackio", "wandb"], tmp_path, header())
    with pytest.raises(OptionError, match="--log wandb: it cannot begin a log: RuntimeError: not logged in"):
        both.__enter__()
    assert foreign[0].ended


@pytest.mark.parametrize(
    ("tool", "module", "hint"),
    [
        ("tensorboard", "tensorboard.summary.writer.event_file_writer", "pip install 'paceline[export]'"),
        ("wandb", "wandb", "pip install wandb"),
        ("trackio", "trackio", "pip install trackio"),
    ],
)
def test_a_tool_that_is_missing_is_named_with_how_to_get_it(monkeypatch, capsys, tmp_path, tool, module, hint):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--engine", "sim", "--log", tool]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline: --log {tool}: {tool} cannot be imported")
    assert line.endswith(hint)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OptionError, match="cannot be imported"):
        paceline.launch(paceline.tasks.get("digits"), engine="sim", log=[tool])


def test_unknown_tools_and_missing_folders_are_refused(capsys):
    assert main(["run", "--log", "tensorbord"]) == 2
    assert "--log: must be one of csv, tensorboard, trackio, wandb, not 'tensorbord'" in capsys.readouterr().err
    with pytest.raises(OptionError, match="--log csv needs a folder to write to: give runs_dir, too"):
        paceline.launch(paceline.tasks.get("digits"), engine="sim", log=["csv"])


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("engine", ["sim", "local"])
def test_a_run_writes_its_metrics_as_it_goes_on(tmp_path, monkeypatch, capsys, engine):
    monkeypatch.chdir(tmp_path)
    where = ["--engine", engine, "--threads", "1", *(["--workers", "2"] if engine == "local" else [])]
    assert main(["run", "-q", *where, "--epochs", "1", "--log", "csv", "--log", "tensorboard"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    names = {row["name"] for row in csv.DictReader((folder / "scalars.csv").read_text().splitlines())}
    assert {"accuracy", "loss"} <= names
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert '"log"' not in (folder / "journal.jsonl").read_text().splitlines()[0]
