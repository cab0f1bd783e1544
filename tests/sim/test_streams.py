"""Streams: each worker reads its own, for a number of steps or until it ends."""

import itertools

import pytest
import torch
from clusters import EVEN, cluster, event, mean_square, network
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.core.errors import OptionError
from paceline.core.events import Left
from paceline.records.journal import Decision, Lines, Observation
from paceline.records.text import facts

STRATEGIES = ["bsp", "ssp", "asp", "fastest_k:k=2", "dasp", "balanced", "gossip", "local_sgd", "elastic"]
WAIT_FOR_NOBODY = ["ssp", "asp", "gossip", "elastic"]


def launch(script, scenario=None, **settings):
    lines = Lines()
    return paceline.launch(
        script, engine="sim", scenario=scenario or cluster(1.0, 0.7, 0.4), sink=lines, **settings
    ), lines


def sample(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(6, generator=generator, dtype=torch.float64)
    return x, x.sum(), number


def batch(number, size=4):
    return [
        torch.stack([torch.as_tensor(part) for part in parts])
        for parts in zip(*map(sample, range(number, number + size)), strict=True)
    ]


class Numbers(IterableDataset):
    """The samples `first`, `first + 1`, ...: as many as `count`, or without end."""

    def __init__(self, first=0, count=None):
        self.first, self.count = first, count

    def __iter__(self):
        numbers = itertools.count(self.first) if self.count is None else range(self.first, self.first + self.count)
        return map(sample, numbers)


class Script:
    """Trains on what `stream(session)` returns and notes what each worker read and where its model ended."""

    def __init__(self, stream, loops=1, **given):
        self.stream, self.loops, self.given = stream, loops, given
        self.read, self.ends, self.lengths = {}, {}, []

    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for _ in range(self.loops):
            batches = session.batches(self.stream(session), **self.given)
            self.lengths.append(len(batches) if "steps" in self.given else None)
            for x, y, numbers in batches:
                optimizer.zero_grad()
                loss = mean_square(model, x, y[:, None])
                loss.backward()
                session.report(loss=loss)
                self.read.setdefault(session.worker, []).append(numbers.tolist())
                optimizer.step()
            self.ends[session.worker] = {name: value.clone() for name, value in model.state_dict().items()}


def phases(lines):
    return [line.data for line in lines if isinstance(line, Observation) and line.what == "phase"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_streams_that_end_at_different_times_are_read_to_their_ends(strategy):
    def stream(session):
        return (batch(1000 * session.worker + 4 * n) for n in range([9, 2, 5][session.worker]))

    script = Script(stream, batch_size=4)
    run, lines = launch(script, strategy=strategy)
    assert run.ended == "done"
    assert {worker: len(read) for worker, read in script.read.items()} == {0: 9, 1: 2, 2: 5}
    assert [read[0] for read in script.read[1]] == [1000, 1004]
    if strategy in WAIT_FOR_NOBODY:
        assert run.summary.samples_used == 16 * 4
    # Who has read all waits in the loop, and leaves it with the trained model.
    for end in script.ends.values():
        assert all(torch.equal(end[name], value) for name, value in run.model_state.items())
    (phase,) = phases(lines)
    assert (phase["sampling"], phase["size"], phase["rounds"]) == ("stream", None, None)
    assert not any("steps" in text for text in run.summary.warnings)
    left = [line.event.worker for line in lines if isinstance(line, Decision) and isinstance(line.event, Left)]
    assert set(left) == {0, 1, 2}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_are_shared_out_by_speed(strategy):
    script = Script(lambda session: Numbers(1000 * session.worker), batch_size=4, steps=10)
    run, lines = launch(script, strategy=strategy)
    assert run.ended == "done"
    assert run.summary.samples_used == 10 * 3 * 4
    assert script.lengths == [10, 10, 10]
    if strategy in WAIT_FOR_NOBODY:
        assert len(script.read[0]) > len(script.read[2])
    for worker, read in script.read.items():  # each its own, in order, without a gap
        assert list(itertools.chain(*read)) == list(range(1000 * worker, 1000 * worker + 4 * len(read)))
    (phase,) = phases(lines)
    assert (phase["sampling"], phase["size"], phase["rounds"]) == ("stream", 120, 10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_others_go_on_when_one_stream_ends_before_the_steps_are_made(strategy):
    script = Script(
        lambda session: Numbers(1000 * session.worker, 8 if session.worker == 0 else None), batch_size=4, steps=6
    )
    run, _ = launch(script, strategy=strategy)
    assert run.summary.samples_used == 6 * 3 * 4
    assert len(script.read[0]) == 2


@pytest.mark.parametrize("strategy", ["bsp", "asp", "balanced", "gossip"])
def test_the_phase_ends_when_all_streams_have_ended_and_says_how_far_it_came(strategy):
    script = Script(lambda session: Numbers(0, 8), batch_size=4, steps=50)
    run, _ = launch(script, strategy=strategy)
    assert run.ended == "done"
    assert "the data streams of all workers ended after 6 of 150 steps" in run.summary.warnings


def test_the_last_batch_of_a_data_set_may_be_smaller_or_dropped():
    script = Script(lambda session: Numbers(0, 10), batch_size=4)
    launch(script, strategy="asp")
    assert [len(numbers) for numbers in script.read[1]] == [4, 4, 2]
    script = Script(lambda session: Numbers(0, 10), batch_size=4, drop_last=True)
    launch(script, strategy="asp")
    assert [len(numbers) for numbers in script.read[1]] == [4, 4]


def test_a_loader_over_an_iterable_data_set_is_used_as_it_is():
    made = []

    def stream(session):
        made.append(
            DataLoader(
                Numbers(0, 10),
                batch_size=5,
                collate_fn=lambda rows: [torch.stack([torch.as_tensor(r[i]) for r in rows]) for i in (0, 1, 2)],
            )
        )
        return made[-1]

    script = Script(stream)
    _, lines = launch(script, strategy="bsp")
    assert script.read[0] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert phases(lines)[0]["batch_size"] == 5
    script = Script(stream, batch_size=2)
    launch(script, strategy="bsp")
    assert script.read[0] == [[n, n + 1] for n in range(0, 10, 2)]
    script = Script(stream)
    launch(script, strategy="bsp", batch_size=10)
    assert script.read[0] == [list(range(10))]


def test_loader_processes_read_a_stream_ahead():
    script = Script(lambda session: Numbers(0, 8), batch_size=4, num_workers=1)
    launch(script, cluster(1.0), strategy="bsp")
    assert script.read == {0: [[0, 1, 2, 3], [4, 5, 6, 7]]}


def test_a_data_set_starts_again_in_the_next_loop_and_an_iterator_goes_on():
    script = Script(lambda session: Numbers(0, 4), loops=2, batch_size=2)
    launch(script, strategy="bsp")
    assert script.read[0] == [[0, 1], [2, 3]] * 2
    going_on = {}

    def stream(session):
        return going_on.setdefault(session.worker, (batch(n) for n in itertools.count()))

    script = Script(stream, loops=2, steps=3)
    launch(script, strategy="bsp")
    assert [read[0] for read in script.read[0]] == list(range(6))


def test_one_object_may_be_looped_over_several_times():
    read = []

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        loader = session.batches(Numbers(0, 4), batch_size=2)
        for _ in range(2):
            for x, y, numbers in loader:
                read.append(numbers.tolist())
                mean_square(model, x, y[:, None]).backward()
                optimizer.step()

    launch(train, cluster(1.0))
    assert read == [[0, 1], [2, 3]] * 2


def test_the_length_of_a_stream():
    lengths = []

    def train():
        session = paceline.init()
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        assert len(session.batches(Numbers(), batch_size=4, steps=7)) == 7
        for data in (Numbers(), (n for n in range(3))):
            with pytest.raises(TypeError):
                len(session.batches(data))
        lengths.append(len(session.batches(set(range(5)))))

    launch(train)
    assert lengths == [5] * 3


def test_a_stream_accumulates_gradients():
    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for number, (x, y, _) in enumerate(session.batches(Numbers(0, 20), batch_size=4), 1):
            mean_square(model, x, y[:, None]).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    run, lines = launch(train, cluster(*EVEN), strategy="bsp")
    pushed = [line.event.samples for line in lines if isinstance(line, Decision) and hasattr(line.event, "samples")]
    assert run.summary.samples_used == 20 * len(EVEN)
    assert set(pushed) == {8, 4}  # the fifth batch is pushed when the stream ends


def test_batches_that_the_script_skips_are_lost():
    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for number, (x, y, _) in enumerate(session.batches(Numbers(), batch_size=4, steps=6)):
            optimizer.zero_grad()
            if number % 2:
                continue
            mean_square(model, x, y[:, None]).backward()
            optimizer.step()

    _, lines = launch(train, cluster(1.0))
    (end,) = [line.data for line in lines if isinstance(line, Observation) and line.what == "end"]
    assert (end["samples_used"], end["samples_lost"]) == (12, 12)


@pytest.mark.parametrize("strategy", ["bsp", "asp", "gossip"])
def test_workers_that_crash_and_join_read_streams_of_their_own(strategy):
    events = event("crash", 0.05, worker=1) + event("join", 0.1)
    script = Script(lambda session: Numbers(1000 * session.worker, 40), batch_size=4)
    run, _ = launch(script, cluster(1.0, 0.7, 0.4, events=events), strategy=strategy)
    assert run.ended == "done"
    assert len(script.read[3]) == 10
    assert len(script.read.get(1, [])) < 10


def test_the_report_says_whose_choice_the_samples_were():
    run, lines = launch(Script(lambda session: Numbers(0, 8), batch_size=4))
    assert run.summary.streams
    assert dict(facts(run.summary))["data"].startswith("streams of the script")
    assert paceline.records.fold_metrics(lines).report(None).streams


class OfSamples:
    def __init__(self):
        self.at = 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.batches(Numbers(), epochs=2), "epochs must be 1, not 2: give steps="),
        (lambda s: s.batches(Numbers(), steps=0), "steps must be a whole number >= 1, not 0"),
        (lambda s: s.batches(Numbers(), steps=True), "steps must be a whole number >= 1, not True"),
        (lambda s: s.batches(Numbers(), batch_size=0), "batch_size must be a whole number >= 1, not 0"),
        (lambda s: s.batches(Numbers(), shuffle=True), "takes no shuffle for a stream"),
        (lambda s: s.batches(Numbers(), num_worker=1), "num_workers"),
        (lambda s: s.batches(Numbers(), sampling="shard"), "leave out sampling='shard'"),
        (lambda s: s.batches([1, 2], steps=3), "steps=3 is for streams"),
        (lambda s: s.batches(iter([1]), num_workers=1), "takes no num_workers for list_iterator"),
        (lambda s: s.batches(OfSamples()), "not OfSamples"),
        (lambda s: s.batches(batch), "not function"),
    ],
)  # fmt: skip
def test_bad_calls_say_what_is_wrong(call, message):
    def train():
        session = paceline.init()
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        call(session)

    with pytest.raises(OptionError, match=message):
        launch(train)


def test_settings_that_mean_nothing_to_a_stream_are_named():
    script = Script(lambda session: (batch(n) for n in range(3)))
    run, _ = launch(script, epochs=3, batch_size=7)
    assert any("--epochs does not apply to a stream" in text for text in run.summary.warnings)
    assert any(
        "--batch-size does not change the batches that generator brings" in text for text in run.summary.warnings
    )
    assert [len(numbers) for numbers in script.read[0]] == [4, 4, 4]


def test_who_evaluates_by_epochs_is_told_that_streams_have_none():
    class Evaluated(Script):
        def __call__(self):
            session = paceline.init()
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            session.prepare(model, optimizer, evaluate=lambda module: {"weight": float(module[0].weight.sum())})
            for x, y, _ in session.batches(self.stream(session), **self.given):
                optimizer.zero_grad()
                mean_square(model, x, y[:, None]).backward()
                optimizer.step()

    def evaluations(lines):
        return [line.data["version"] for line in lines if isinstance(line, Observation) and line.what == "evaluation"]

    script = Evaluated(lambda session: Numbers(0, 40), batch_size=4)
    run, lines = launch(script)
    assert evaluations(lines) == [0, run.summary.versions]
    assert any("no epochs to evaluate by" in text for text in run.summary.warnings)
    run, lines = launch(script, evaluate_every="2v")
    assert evaluations(lines) == list(range(0, 11, 2))
    assert not any("no epochs to evaluate by" in text for text in run.summary.warnings)
    run, lines = launch(Evaluated(lambda session: Numbers(), batch_size=4, steps=10), evaluate_every="0.5e")
    assert evaluations(lines) == [0, 5, 10]
    assert not any("no epochs to evaluate by" in text for text in run.summary.warnings)
