"""Collective calls between real processes: both transports, deaths, respawns, a resumed run, a lost server."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network
from launching import launch

import paceline
from paceline.core.errors import UserError
from paceline.records import journal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]
BIG = 300_000  # elements: more than fits beside a message


class CollectiveJob:
    """A script with calls before `prepare`, between two loops and after them, which notes what came back."""

    def __init__(self, notes, **how):
        self.notes = Path(notes)
        self.how = how  # what to do otherwise

    def __call__(self):
        session = paceline.init()
        self.act("begin", session)
        found = [session.gather({"worker": session.worker, "text": "ä", "odd": [None, True, 0.5]})]
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        evaluate = self.evaluate if self.how.get("evaluates") else None
        session.prepare(model, optimizer, evaluate=evaluate)
        passes = 0
        for number in range(2):
            for x, y, _ in session.batches(Rows(48), batch_size=4, epochs=self.how.get("epochs", 1)):
                passes += session.progress.fraction < 1  # else the phase is over, and the batch has no effect
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()
                self.act("pass", session)
                if self.how.get("leaves") == session.worker and number == 0:
                    break
            self.act("between", session)
            found.append(session.gather(passes))
        session.barrier()
        parts = [torch.full((BIG,), float(session.worker)), torch.empty(0), torch.tensor(session.worker)]
        mean = session.mean(parts)
        assert [tuple(part.shape) for part in mean] == [(BIG,), (0,), ()]
        found.append([float(mean[0].sum()) / BIG, float(mean[2])])
        (self.notes / f"{session.worker}.json").write_text(json.dumps(found))

    def evaluate(self, model):
        return {"one": float(sum(p.numel() for p in model.parameters()) > 0)}

    def act(self, where, session):
        if self.how.get("dies") == (where, session.worker):
            first = self.notes / "died"
            if not first.exists():
                first.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if self.how.get("sleeps", (None,))[0] == where:
            time.sleep(self.how["sleeps"][1])


def found_by(notes):
    return {int(file.stem): json.loads(file.read_text()) for file in sorted(notes.glob("*.json"))}


def hello(*workers):
    return [{"worker": worker, "text": "ä", "odd": [None, True, 0.5]} for worker in workers]


@pytest.mark.parametrize("transport", ["shm", "zeromq"])
@pytest.mark.parametrize("strategy", ["bsp", "gossip"])
def test_all_workers_get_the_same_values(tmp_path, transport, strategy):
    launch(CollectiveJob(tmp_path), tmp_path, workers=3, transport=transport, strategy=strategy)
    found = found_by(tmp_path)
    assert sorted(found) == [0, 1, 2]
    assert found[0] == found[1] == found[2]
    before, one, two, mean = found[0]
    assert before == hello(0, 1, 2)
    assert sum(one) == 12
    assert sum(two) == 24
    assert mean == [1.0, 1.0]


def test_the_evaluator_runs_through_calls_before_prepare(tmp_path):
    run = launch(CollectiveJob(tmp_path, evaluates=True), tmp_path, workers=3, evaluate_every="0.5e")
    assert found_by(tmp_path)[2][0] == hello(0, 1, 2)
    measured = [
        line
        for line in journal.read(run.journal)
        if isinstance(line, journal.Observation) and line.what == "evaluation"
    ]
    assert measured
    assert all(line.data["metrics"] == {"one": 1.0} for line in measured)


@pytest.mark.parametrize("where", ["begin", "pass", "between"])
def test_a_worker_that_is_killed_is_not_waited_for(tmp_path, where):
    launch(CollectiveJob(tmp_path, dies=(where, 1)), tmp_path, workers=3)
    found = found_by(tmp_path)
    assert sorted(found) == [0, 2]
    assert found[0] == found[2]
    assert found[0][0] == hello(*([0, 2] if where == "begin" else [0, 1, 2]))
    assert [len(values) for values in found[0][1:3]] == [2, 2]
    assert found[0][3] == [1.0, 1.0]


def test_a_respawned_worker_gets_the_answers_of_the_others(tmp_path):
    job = CollectiveJob(tmp_path, dies=("pass", 1), epochs=6, sleeps=("pass", 0.05))
    launch(job, tmp_path, workers=3, respawn=True)
    found = found_by(tmp_path)
    assert sorted(found) == [0, 1, 2]
    assert found[0] == found[1] == found[2]
    assert found[0][0] == hello(0, 1, 2)
    assert len(found[0][1]) == len(found[0][2]) == 3


@pytest.mark.parametrize("stop_at", [2, 6], ids=["in the first loop", "after a part of the calls"])
def test_a_resumed_run_exchanges_again(tmp_path, stop_at):
    part = launch(CollectiveJob(tmp_path), tmp_path, workers=3, checkpoint_every="1v", max_versions=stop_at)
    assert part.ended == "limit"
    for file in tmp_path.glob("*.json"):
        file.unlink()
    rest = launch(CollectiveJob(tmp_path), tmp_path, workers=3, resume=part.folder)
    assert rest.ended == "done"
    found = found_by(tmp_path)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == hello(0, 1, 2)
    assert found[0][3] == [1.0, 1.0]
    assert sum(found[0][2]) == 24 - 3 * stop_at


def test_calls_survive_a_server_that_is_killed_while_workers_wait_in_one(tmp_path):
    scenario = cluster(1.0, 1.0, 1.0, events=event("server_crash", 0.6))
    job = CollectiveJob(tmp_path, leaves=0, epochs=4)  # worker 0 waits in its second call when the server dies
    run = launch(job, tmp_path, scenario=scenario, checkpoint_every="2v")
    found = found_by(tmp_path)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == hello(0, 1, 2)
    assert found[0][1][0] == 1
    lines = list(journal.read(run.journal))
    assert len([line for line in lines if isinstance(line, journal.Header)]) == 2


class Disagreeing:
    """Worker 1 does something else than worker 0, which waits in `mean`."""

    def __init__(self, what):
        self.what = what

    def __call__(self):
        session = paceline.init()
        model = network()
        if self.what in ("loop", "inside"):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        if session.worker == 0 and self.what != "inside":
            session.mean(1.0)
        elif self.what == "call":
            session.barrier()
        elif self.what == "prepare":
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        elif self.what in ("loop", "inside"):
            for _ in session.batches(Rows(48), batch_size=4):
                session.mean(1.0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("call", r"worker 0 waits in mean\(\), call 1 of its script, worker 1 in barrier\(\), call 1"),
        ("prepare", r"worker 0 waits in mean\(\).*worker 1 has come to prepare\(\)"),
        ("loop", r"worker 0 waits in mean\(\).*worker 1 has come to its next loop"),
        ("end", r"worker 0 waits in mean\(\).*the script of worker 1 has ended without it"),
        ("inside", r"mean\(\) inside a batches\(\) or steps\(\) loop"),
    ],
)
def test_disagreement_is_an_error_and_not_a_hang(tmp_path, what, message):
    with pytest.raises(UserError, match=message):
        launch(Disagreeing(what), tmp_path)
