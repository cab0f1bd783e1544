"""Epoch loops of a script's own: what `--epochs` means there, and workers that come to epochs that are over."""

import itertools

import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network

import paceline
from paceline.core.errors import OptionError, UserError
from paceline.records.journal import Lines, Observation

ROWS = Rows(24)
LATE = cluster(1.0, 1.0, events=event("join", 0.3))


def launch(script, scenario=None, **settings):
    lines = Lines()
    return paceline.launch(script, engine="sim", scenario=scenario or cluster(1.0, 0.5), sink=lines, **settings), lines


def start(session, model=None):
    model = model or network()
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = mean_square(model, x, y)
    loss.backward()
    optimizer.step()
    return loss


def phases(lines):
    return [line.data for line in lines if isinstance(line, Observation) and line.what == "phase"]


def epochs_of(lines):
    return [data["epochs"] for data in phases(lines)]


# -- --epochs ----------------------------------------------------------------------------------------------------------


def for_range(session, train):
    for _ in range(3):
        train(session.batches(ROWS, batch_size=4, epochs=1))


def made_before(session, train):
    loader = session.batches(ROWS, batch_size=4, epochs=1)
    for _ in range(3):
        train(loader)


def while_loop(session, train):
    done = 0
    while done < 3:
        train(session.batches(ROWS, batch_size=4, epochs=1))
        done += 1


def by_session_epochs(session, train):
    for _ in session.epochs(3):
        train(session.batches(ROWS, batch_size=4, epochs=1))


def comprehension(session, train):
    return [train(session.batches(ROWS, batch_size=4, epochs=1)) for _ in range(3)]


class Script:
    def __init__(self, loops):
        self.loops = loops

    def __call__(self):
        session = paceline.init()
        model, optimizer = start(session)

        def train(batches):
            for x, y, _ in batches:
                step(model, optimizer, x, y)

        self.loops(session, train)


IN_LOOPS = [for_range, made_before, while_loop, by_session_epochs, comprehension]


@pytest.mark.parametrize("loops", IN_LOOPS)
def test_without_a_setting_each_pass_has_what_the_script_says(loops):
    run, lines = launch(Script(loops))
    assert epochs_of(lines) == [1, 1, 1]
    assert not any("--epochs" in text for text in run.summary.warnings)


@pytest.mark.parametrize("strategy", ["bsp", "gossip"])
@pytest.mark.parametrize("loops", IN_LOOPS)
def test_epochs_is_the_total_of_a_loop_of_the_scripts_own(loops, strategy):
    run, lines = launch(Script(loops), epochs=1.5, strategy=strategy)
    assert epochs_of(lines) == [1, 0.5]
    assert run.summary.samples_used == 36
    assert not any("--epochs" in text for text in run.summary.warnings)


@pytest.mark.parametrize("loops", IN_LOOPS)
def test_a_loop_that_ends_before_the_total_is_named_and_session_epochs_goes_on(loops):
    run, lines = launch(Script(loops), epochs=5)
    if loops is by_session_epochs:
        assert epochs_of(lines) == [1] * 5
        assert not any("--epochs" in text for text in run.summary.warnings)
    else:
        assert epochs_of(lines) == [1] * 3
        said = [text for text in run.summary.warnings if "--epochs" in text]
        assert said == [
            "--epochs 5: the script's own loop ended after 3; `for epoch in session.epochs(n)` has as many as asked for"
        ]


def test_outside_of_a_loop_epochs_overrides_what_the_script_says():
    def loops(session, train):
        batches = session.batches(ROWS, batch_size=4, epochs=1)
        assert len(batches) == 6
        train(batches)
        train(session.batches(ROWS, batch_size=4, epochs=3))

    _, lines = launch(Script(loops), epochs=2)
    assert epochs_of(lines) == [2, 2]


def test_the_length_of_batches_made_in_a_loop_is_the_scripts():
    def loops(session, train):
        for _ in range(2):
            batches = session.batches(ROWS, batch_size=4, epochs=1)
            assert len(batches) == 3
            train(batches)

    launch(Script(loops), epochs=2)


# -- epochs that are over ----------------------------------------------------------------------------------------------


class Kept:
    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Late:
    """Notes what the worker that joins late is shown."""

    def __init__(self, by_session=False, streams=False, epochs=4):
        self.by_session, self.streams, self.count = by_session, streams, epochs
        self.seen, self.losses, self.kept, self.changed, self.drawn = {}, [], [], [], []

    def data(self, session):
        if not self.streams:
            return {"dataset": ROWS, "batch_size": 4}
        rows = [slice(4 * n, 4 * n + 4) for n in range(6)]
        batches = ((ROWS.x[rows[n % 6]], ROWS.y[rows[n % 6]], [n]) for n in itertools.count())
        return {"dataset": batches, "batch_size": 4, "steps": 3}

    def __call__(self):
        session = paceline.init()
        norm = torch.nn.Sequential(torch.nn.BatchNorm1d(6), network()).double()
        model, optimizer = start(session, norm)
        kept = Kept()
        session.keep("kept", kept)
        data = self.data(session)
        for epoch in session.epochs(self.count) if self.by_session else range(self.count):
            before = [tensor.clone() for tensor in model.state_dict().values()]
            drawn = torch.get_rng_state()
            batches = 0
            for x, y, numbers in session.batches(**data):
                loss = step(model, optimizer, x, y)
                session.report(loss=loss, of_its_own=session.worker)
                if session.worker == 2:
                    torch.rand(1)
                    kept.steps += 1
                    self.seen.setdefault(epoch, []).append(list(map(int, numbers)))
                    batches += 1
            if session.worker == 2:
                self.losses.append(float(loss.detach()))  # a NameError in a loop without a batch
                self.kept.append(kept.steps)
                after = model.state_dict().values()
                self.changed.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
                self.drawn.append(not torch.equal(drawn, torch.get_rng_state()))
                assert all(p.grad is None for p in model.parameters()) or batches > 1 or self.changed[-1]


@pytest.mark.parametrize("strategy", ["bsp", "asp", "balanced", "gossip"])
def test_a_phase_that_is_over_is_shown_in_one_batch_without_effect(strategy):
    script = Late()
    run, lines = launch(script, LATE, strategy=strategy, evaluate_every="off")
    assert run.ended == "done"
    over = [epoch for epoch, kept in enumerate(script.kept) if kept == 0]
    assert over
    assert over == list(range(len(over)))
    assert len(script.losses) == 4
    for epoch in over:
        assert script.seen[epoch] == [[0, 1, 2, 3]]
        assert not script.changed[epoch] or epoch == 0  # the first answer brings the run's model
        assert not script.drawn[epoch]
    assert script.kept[-1] > 0
    assert run.summary.samples_used == 4 * 24
    notes = [line for line in lines if isinstance(line, Observation) and line.what == "report" and line.worker == 2]
    assert len(notes) == script.kept[-1]
    last = over[-1]
    which = "phase 0 is" if last == 0 else f"phases 0-{last} are"
    said = [text for text in run.summary.warnings if "without effect" in text]
    assert said == [
        f"{which} over: a script that comes to them is shown one batch of each, without effect; "
        "`for epoch in session.epochs(n)` skips them"
    ]


@pytest.mark.parametrize("strategy", ["bsp", "gossip"])
def test_session_epochs_starts_where_the_run_stands(strategy):
    plain, skipping = Late(), Late(by_session=True)
    one, _ = launch(plain, LATE, strategy=strategy, evaluate_every="off")
    other, lines = launch(skipping, LATE, strategy=strategy, evaluate_every="off")
    assert min(skipping.seen) > 0
    assert len(skipping.losses) == 4 - min(skipping.seen)
    assert other.summary.samples_used == one.summary.samples_used
    if strategy == "bsp":  # a node that skips starts from a peer's model, not from the last phase's average
        assert all(torch.equal(value, other.model_state[name]) for name, value in one.model_state.items())
    assert not any("without effect" in text for text in other.summary.warnings)
    assert [data["phase"] for data in phases(lines)] == [0, 1, 2, 3]


def test_a_stream_that_is_shown_loses_no_batch():
    script = Late(streams=True)
    launch(script, LATE, strategy="bsp", evaluate_every="off")
    over = [epoch for epoch, kept in enumerate(script.kept) if kept == 0]
    assert over
    assert all(script.seen[epoch] == [[0]] for epoch in over)
    read = [number for epoch in sorted(script.seen) if epoch not in over for (number,) in script.seen[epoch]]
    assert read == list(range(len(read)))


def test_session_epochs_with_several_phases_in_an_epoch():
    shown = []

    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=4):
            step(model, optimizer, x, y)
        for epoch in session.epochs(3):
            for part in range(2):
                for x, y, _ in session.batches(Rows(12 + 12 * part), batch_size=4):
                    step(model, optimizer, x, y)
                    if session.worker == 2:
                        shown.append((epoch, part))

    run, lines = launch(script, cluster(1.0, 1.0, events=event("join", 0.45)))
    assert run.summary.samples_used == 24 + 3 * 36
    assert [data["size"] for data in phases(lines)] == [24, 12, 24, 12, 24, 12, 24]
    assert min(epoch for epoch, _ in shown) > 0


def test_session_epochs_ends_with_the_run():
    epochs = []

    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for epoch in session.epochs(50):
            epochs.append(epoch)
            for x, y, _ in session.batches(ROWS, batch_size=4):
                step(model, optimizer, x, y)
        epochs.append("over")

    run, _ = launch(script, cluster(1.0), max_versions=8)
    assert run.ended == "limit"
    assert epochs == [0, 1, "over"]


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "3"])
def test_session_epochs_takes_a_number_of_epochs(count):
    def script():
        session = paceline.init()
        start(session)
        session.epochs(count)

    with pytest.raises(OptionError, match="needs a whole number >= 1"):
        launch(script)


def test_session_epochs_comes_after_prepare():
    with pytest.raises(UserError, match="before prepare"):
        launch(lambda: paceline.init().epochs(3))


# -- session.stop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["bsp", "asp", "balanced", "dasp", "gossip", "local_sgd", "elastic"])
@pytest.mark.parametrize("steps", [True, False])
def test_who_stops_the_phase_gets_no_further_batch(strategy, steps):
    seen = {}

    def script():
        session = paceline.init()
        model, optimizer = start(session)
        for loop in range(2):
            for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=2, epochs=3)):
                seen.setdefault((loop, session.worker), []).append(number)
                if loop == 0 and session.worker == 0 and number == 3:
                    session.stop("enough")
                    if not steps:
                        continue
                step(model, optimizer, x, y)

    run, _ = launch(script, cluster(1.0, 0.7, 0.4), strategy=strategy)
    assert run.ended == "done"
    assert seen[0, 0] == [0, 1, 2, 3]
    assert sum(len(numbers) for (loop, _), numbers in seen.items() if loop == 1) >= 36
