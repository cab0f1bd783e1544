"""Recorded traces in a scenario, as jitter and as speed."""

import contextlib
import json
import os
import re
import socket
from pathlib import Path

import pytest

from paceline.core.errors import JournalError, ScenarioError
from paceline.core.scenario import traces
from paceline.records import read_journal
from paceline.scenario import Scenario, as_data, describe, from_data, load, parse

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
GAVEL = SHARED / "trace_gavel_throughputs" / "simulation_throughputs_alone.csv"
needs_gavel = pytest.mark.skipif(not GAVEL.exists(), reason="../shared/data/trace_gavel_throughputs is not here")

COST = "[compute]\nseconds_per_sample = 0.01\n"


def read(text: str, folder: Path) -> Scenario:
    return parse(text, "mine.toml", folder)


def test_only_the_name_of_an_absolute_trace_path_is_kept(tmp_path: Path) -> None:
    trace = tmp_path / "times.csv"
    trace.write_text("worker,time,seconds\n0,1,2.0\n")
    made = read(f'[compute]\nseconds_per_sample = 1\njitter = "trace:{trace}"\n[[workers]]\n', Path())
    assert as_data(made)["compute"]["jitter"] == "trace:times.csv"
    assert str(tmp_path) not in json.dumps(as_data(made)) + describe(made)
    assert from_data(as_data(made), tmp_path) == made


def test_traces_are_found_beside_the_scenario_file(tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text("worker,time,seconds\n0,1,2.0\n0,2,6.0\n1,1,4.0\n")
    file = tmp_path / "cluster.toml"
    file.write_text('[compute]\nseconds_per_sample = 1\njitter = "trace:times.csv"\n[[workers]]\n')
    made = load(file)
    assert made.name == "cluster"
    assert made.compute.jitter.rows == ((0.5, 1.5), (1.0,))


def test_speeds_from_a_table_are_relative_to_the_largest_used(tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text('job,k80,v100\n"ResNet (batch 64)",1,8\nother,2,100\n"ResNet (batch 64)",3,9\n')
    speed = 'speed = "trace:gpus.csv:ResNet (batch 64)'
    text = f'[[workers]]\n{speed}:v100"\n[[workers]]\n{speed}:k80"\n[[workers]]\nspeed = 0.7\n'
    text += f'[[events]]\nkind = "join"\nat = 1\n{speed}:k80"\n'
    made = read(COST + text, tmp_path)
    assert [worker.speed for worker in made.workers] == [1, 0.125, 0.7]
    assert made.events[0].speed == 0.125


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["cannot read trace", "No such file", "relative to the scenario file"]),
        ("", ["has no rows"]),
        ("worker,seconds\n0,1\n", ["has no column time;"]),
        ("worker,time,x\n0,1,2\n", ["has no column batch_time_norm or seconds"]),
        ("worker,time,seconds\n0,1,2\n0,2,0\n", ["line 3: seconds must be > 0;"]),
        ("worker,time,seconds\n0,1,abc\n", ["line 2: seconds must be a finite number;"]),
        ("worker,time,seconds\n0,1\n", ["line 2: seconds must be a finite number;"]),
    ],
)
def test_a_broken_trace_is_refused(tmp_path: Path, content: str | None, parts: list[str]) -> None:
    if content is not None:
        (tmp_path / "t.csv").write_text(content)
    with pytest.raises(ScenarioError) as refused:
        read('[compute]\nseconds_per_sample = 1\njitter = "trace:t.csv"\n[[workers]]\n', tmp_path)
    for part in ["t.csv", *parts]:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("cell", "part"),
    [
        ("Resnet:v100", "has no row 'Resnet'; its first column"),
        ("ResNet:v10", "has no column 'v10'; its first line"),
        ("ResNet:k80", "k80 must be a finite number;"),
        ("Zero:v100", "v100 must be > 0 to be a speed;"),
    ],
)
def test_a_wrong_cell_is_refused(tmp_path: Path, cell: str, part: str) -> None:
    (tmp_path / "gpus.csv").write_text("job,k80,v100\nResNet,,8\nZero,1,0\n")
    with pytest.raises(ScenarioError) as refused:
        read(COST + f'[[workers]]\nspeed = "trace:gpus.csv:{cell}"\n', tmp_path)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    "table",
    [
        '[compute]\nseconds_per_sample = 1\njitter = "trace:secret"\n[[workers]]\n',
        COST + '[[workers]]\nspeed = "trace:secret:a:b"\n',
    ],
    ids=["jitter", "speed"],
)
@pytest.mark.parametrize(
    "secret",
    ["hunter2:x\nhunter2\n", "worker,time,seconds\nhunter2,hunter2,hunter2\n", "hunter2,b\nhunter2,1\na,hunter2\n",
     "worker,time,seconds,b\n0,1,-22222\na,0,0,-22222\n", '"hunter2' + "x" * 200_000, "hunter2,b\na,-22222\n"],
    ids=["header", "times", "cell", "negative time", "long line", "negative cell"],
)  # fmt: skip
def test_a_refusal_repeats_nothing_of_the_file(tmp_path: Path, table: str, secret: str) -> None:
    """A scenario of somebody else may name any file that its user can read."""
    (tmp_path / "secret").write_text(secret)
    with pytest.raises(ScenarioError, match="trace 'secret'") as refused:
        read(table, tmp_path)
    assert not {"hunter2", "22222"} & set(re.findall(r"hunter2|22222", str(refused.value)))


def test_traces_are_read_once_and_are_not_larger_than_they_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "worker,time,seconds\n0,1,2.0\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv").write_text(text)
    one, other = (f'[[workers]]\njitter = "trace:{name}.csv"\n' for name in "ab")
    monkeypatch.setattr(traces, "MAX_BYTES", 2 * len(text) - 1)
    assert read(COST + one * 50, tmp_path).count == 50
    with pytest.raises(ScenarioError, match=r"trace 'b.csv': it has more than .* \(all traces of a scenario together"):
        read(COST + one * 50 + other, tmp_path)


@pytest.mark.parametrize("kind", ["a named pipe", "a device", "a folder", "a socket"])
def test_only_files_are_read(tmp_path: Path, kind: str) -> None:
    """A pipe that nobody writes to would be waited for, and a device may have no end."""
    place = tmp_path / "it"
    with contextlib.ExitStack() as until_then:
        match kind:
            case "a named pipe":
                os.mkfifo(place)
            case "a device":
                place.symlink_to("/dev/zero")
            case "a folder":
                place.mkdir()
            case "a socket":
                until_then.enter_context(socket.socket(socket.AF_UNIX)).bind(str(place))
        with pytest.raises(ScenarioError, match=f"cannot read trace 'it': it is {kind}, not a file"):
            read('[compute]\nseconds_per_sample = 1\njitter = "trace:it"\n[[workers]]\n', tmp_path)
        with pytest.raises(ScenarioError, match=f"cannot read scenario .*: it is {kind}, not a file"):
            load(place)
        with pytest.raises(JournalError, match=f"cannot open journal .*: it is {kind}, not a file"):
            list(read_journal(place))


@pytest.mark.shared
@needs_gavel
def test_mixed_gpus_has_the_ratios_of_the_recorded_table() -> None:
    row = f"trace:{GAVEL.name}:ResNet-50 (batch size 64)"
    text = "".join(f'[[workers]]\nspeed = "{row}:{gpu}"\n' for gpu in ("v100", "p100", "k80"))
    recorded = [worker.speed for worker in read(COST + text, GAVEL.parent).workers]
    assert recorded == pytest.approx([1.0, 2.6194694 / 4.3947748, 0.6190282 / 4.3947748], rel=1e-6)
    assert [spec.speed for _, spec in load("mixed_gpus12").groups()] == pytest.approx(recorded, rel=2e-3)
