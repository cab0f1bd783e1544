"""What a script may do inside its loop: accumulate, clip, skip, break, run several phases, bring a DataLoader along."""

import math

import pytest
import torch
from clusters import EVEN, UNEVEN, Rows, cluster, mean_square, network
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, default_collate

import paceline
from paceline.core.errors import OptionError, ScriptError, UserError
from paceline.core.events import Joined, Pushed
from paceline.records.journal import Decision, Lines, Observation

ROWS = Rows()


def launch(train, scenario=None, **settings):
    lines = Lines()
    run = paceline.launch(train, engine="sim", scenario=scenario or cluster(*EVEN), sink=lines, **settings)
    return run, lines


def events(lines, kind):
    return [line.event for line in lines if isinstance(line, Decision) and isinstance(line.event, kind)]


def observations(lines, what):
    return [line for line in lines if isinstance(line, Observation) and line.what == what]


def start(session, lr=0.05, **optimizer_options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **optimizer_options)
    return session.prepare(model, optimizer)


def plain_loop(session, model, optimizer, **batches):
    for x, y, _ in session.batches(ROWS, **{"batch_size": 5, "epochs": 2, **batches}):
        optimizer.zero_grad()
        mean_square(model, x, y).backward()
        optimizer.step()


def plain():
    session = paceline.init()
    plain_loop(session, *start(session))


def test_the_same_objects_come_back_and_the_model_ends_as_the_final_version():
    ended = {}

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        prepared = session.prepare(model, optimizer)
        assert prepared == (model, optimizer)
        plain_loop(session, model, optimizer)
        ended[session.worker] = {name: value.clone() for name, value in model.state_dict().items()}

    run, _ = launch(train)
    assert list(ended) == [0, 1, 2, 3]
    for state in ended.values():
        assert all(torch.equal(state[name], run.model_state[name]) for name in run.model_state)


@pytest.mark.parametrize("form", ["none", "zero", "model"])
def test_both_forms_of_zero_grad_give_the_same_model(form):
    def train():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=2):
            model.zero_grad() if form == "model" else optimizer.zero_grad(set_to_none=form == "none")
            mean_square(model, x, y).backward()
            optimizer.step()

    run, _ = launch(train)
    expected, _ = launch(plain)
    for name, value in expected.model_state.items():
        torch.testing.assert_close(run.model_state[name], value, rtol=0, atol=1e-12)


def accumulating(passes):
    def train():
        session = paceline.init()
        model, optimizer = start(session)
        optimizer.zero_grad()
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=4), 1):
            (mean_square(model, x, y) / passes).backward()
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()

    return train


def test_gradient_accumulation_pushes_all_passes_of_a_step_and_corrects_the_nominal_work():
    run, lines = launch(accumulating(3))
    pushes = events(lines, Pushed)
    assert pushes[0].samples == 15
    assert [e.work for e in events(lines, Joined)][:4] == [5, 5, 5, 5]
    assert {e.work for e in events(lines, Joined)[4:]} == {15}
    assert run.summary.samples_used == 200
    # A round is sixty samples, so the two hundred make four versions, the last of them short.
    assert run.summary.versions == 4


def test_accumulating_n_pieces_equals_one_batch_of_their_union():
    run, _ = launch(accumulating(2), cluster(1.0))

    def big_batches():
        session = paceline.init()
        plain_loop(session, *start(session), batch_size=10, epochs=4)

    expected, _ = launch(big_batches, cluster(1.0))
    for name, value in expected.model_state.items():
        torch.testing.assert_close(run.model_state[name], value, rtol=1e-9, atol=1e-9)


def test_clipping_acts_on_the_piece_before_it_is_pushed():
    def train():
        session = paceline.init()
        model, optimizer = start(session, lr=1.0)
        for x, y, _ in session.batches(ROWS, batch_size=50, epochs=1):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125)
            optimizer.step()

    run, _ = launch(train, cluster(1.0))
    start_state = network().state_dict()
    moved = math.sqrt(sum(float(((run.model_state[n] - start_state[n]) ** 2).sum()) for n in start_state))
    assert moved == pytest.approx(0.125, rel=1e-3)


def test_skipped_pieces_are_lost_counted_and_not_issued_again():
    seen = []

    def train():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, index in session.batches(ROWS, batch_size=5, epochs=1):
            seen.extend(index.tolist())
            if 7 in index:
                continue
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    run, lines = launch(train)
    assert sorted(seen) == list(range(50))
    skipped = observations(lines, "skipped")
    assert sum(line.data["samples"] for line in skipped) == 5
    assert run.summary.samples_used == 45
    assert any(event.samples == 0 for event in events(lines, Pushed))


def test_a_piece_without_a_step_is_skipped_when_zero_grad_follows():
    def train():
        session = paceline.init()
        model, optimizer = start(session)
        # A grant of three pieces: the middle one's gradient is thrown away.
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=50, epochs=2)):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            if number == 0:
                optimizer.zero_grad()
                continue
            optimizer.step()

    run, lines = launch(train, cluster(1.0))
    assert run.summary.samples_used == 50
    assert sum(line.data["samples"] for line in observations(lines, "skipped")) == 50


def test_break_gives_the_rest_back_and_the_others_finish():
    def train():
        session = paceline.init()
        model, optimizer = start(session)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=2)):
            if session.worker == 1 and number == 2:
                break
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    run, lines = launch(train)
    assert run.summary.samples_used == 100
    assert next((e.worker, e.cause) for e in _left(lines)) == (1, "done")


def _left(lines):
    from paceline.core.events import Left

    return events(lines, Left)


def test_several_phases_start_together_and_schedulers_go_on_through_them():
    sizes = []

    def train():
        session = paceline.init()
        model, optimizer = start(session)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for phase in range(3):
            batches = session.batches(ROWS, batch_size=5, epochs=1)
            sizes.append((phase, len(batches)))
            for x, y, _ in batches:
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05 * 0.125

    run, lines = launch(train, cluster(*UNEVEN), strategy="asp")
    assert run.summary.samples_used == 150
    assert set(sizes) == {(0, 3), (1, 3), (2, 3)}
    phases = observations(lines, "phase")
    assert [line.data["phase"] for line in phases] == [0, 1, 2]
    joined = [e for e in events(lines, Joined) if e.at == phases[1].at]
    assert [e.worker for e in joined] == [0, 1, 2, 3]


def test_a_given_scheduler_follows_the_run_not_the_calls():
    rates = {}

    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        session.prepare(model, optimizer, scheduler)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=8):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            scheduler.step()
        rates[session.worker] = optimizer.param_groups[0]["lr"]

    launch(train, cluster(*UNEVEN), strategy="asp")
    assert list(rates.values()) == [pytest.approx(1e-3 / 21)] * 4  # 400 samples in rounds of 20, whoever made how many


def test_rounds_are_known_before_prepare_and_agree_with_the_loop():
    lengths = []

    def train():
        session = paceline.init()
        loader = DataLoader(ROWS, batch_size=7)
        asked = [session.rounds(ROWS), session.rounds(ROWS, 5, 3)]
        asked += [session.rounds(loader), session.rounds(loader, 3, 0.5)]
        with pytest.raises(OptionError, match="the data set is empty"):
            session.rounds([])
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        loops = [session.batches(ROWS), session.batches(ROWS, 5, 3)]
        loops += [session.batches(loader), session.batches(loader, 3, 0.5)]
        assert asked == [len(loop) for loop in loops]
        lengths.append(asked)

    launch(train)
    launch(train, batch_size=2, epochs=4)
    assert lengths == [[13, 8, 2, 3]] * 4 + [[25] * 4] * 4


@pytest.mark.parametrize(("batch_size", "epochs", "message"), [(0, 1, "batch_size must be"), (1, 0, "epochs must be")])
def test_rounds_of_no_loop_are_refused(batch_size, epochs, message):
    with pytest.raises(OptionError, match=message):
        paceline.init().rounds(ROWS, batch_size, epochs)


def test_stop_ends_the_phase_for_all():
    def train():
        session = paceline.init()
        model, optimizer = start(session)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=50)):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            if session.worker == 2 and number == 3:
                session.stop("enough")
            optimizer.step()
        plain_loop(session, model, optimizer, epochs=1)

    run, lines = launch(train)
    assert [line.data["phase"] for line in observations(lines, "phase")] == [0, 1]
    assert 50 < run.summary.samples_used < 200
    assert any("enough" in text for text in run.summary.warnings)


@pytest.mark.parametrize("strategy", ["bsp", "asp", "balanced"])
def test_a_loop_without_data_has_so_many_rounds_for_all_together(strategy):
    rounds = {}

    def train():
        session = paceline.init()
        model, optimizer = start(session)
        steps = session.steps(6)
        assert len(steps) == 6
        for number in steps:
            rounds.setdefault(session.worker, []).append(number)
            optimizer.zero_grad()
            mean_square(model, ROWS.x, ROWS.y).backward()
            optimizer.step()
        for number in session.steps(2):
            assert number in (0, 1)
            optimizer.step()

    launch(train, scenario=cluster(*UNEVEN), strategy=strategy)
    assert sum(map(len, rounds.values())) == 6 * len(UNEVEN)
    assert all(numbers == sorted(numbers) and numbers[-1] <= 5 for numbers in rounds.values())
    if strategy == "bsp":
        assert rounds == {worker: list(range(6)) for worker in range(len(UNEVEN))}


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "many"])
def test_steps_needs_a_number_of_them(count):
    def train():
        session = paceline.init()
        start(session)
        session.steps(count)

    with pytest.raises(OptionError, match=r"steps\(count\) needs a whole number >= 1, not"):
        launch(train)


def test_losses_travel_with_pushes_and_other_numbers_are_observed():
    def train():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=1):
            optimizer.zero_grad()
            loss = mean_square(model, x, y)
            loss.backward()
            session.report(loss=loss, mine=session.worker)
            optimizer.step()

    run, lines = launch(train)
    assert all(event.loss is not None and event.loss > 0 for event in events(lines, Pushed))
    assert {line.data["value"] for line in observations(lines, "report")} == {0.0, 1.0, 2.0, 3.0}
    assert run.summary.loss is not None


def test_options_come_in_the_defaults_type_and_objects_once():
    made, got = [], {}

    def train():
        session = paceline.init()
        got[session.worker] = (session.option("lr", 0.1), session.option("n", 3), session.option("on", False))
        got["name"] = session.option("name", "x")
        session.once("data", lambda: made.append(1))
        plain_loop(session, *start(session), epochs=1)

    launch(train, options={"lr": "1e-2", "n": "7", "on": "true"})
    assert got[3] == (0.01, 7, True)
    assert got["name"] == "x"
    assert made == [1]


def test_an_option_nobody_asks_for_is_an_error_after_the_first_round():
    with pytest.raises(OptionError, match=r"--set lrr: .*asks for: none"):
        launch(plain, options={"lrr": "1"})


def test_an_option_of_the_wrong_type_names_its_value():
    def train():
        paceline.init().option("lr", 0.1)

    with pytest.raises(OptionError, match=r"--set lr must be a number, not 'fast'"):
        launch(train, options={"lr": "fast"})


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_settings(workers):
    def collate(items):
        return torch.stack([x for x, _, _ in items]), torch.stack([y for _, y, _ in items]), "collated"

    def train():
        session = paceline.init()
        model, optimizer = start(session)
        for x, y, word in session.batches(ROWS, batch_size=5, epochs=1, num_workers=workers, collate_fn=collate):
            assert word == "collated"
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    run, _ = launch(train, cluster(1.0, 1.0))
    assert run.summary.samples_used == 50


def doubled(samples):
    x, y, number = default_collate(samples)
    return 2 * x, y, number


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_stands_for_its_data_set_batch_size_and_collate_function(workers):
    def script(given, **options):
        def train():
            session = paceline.init()
            model, optimizer = start(session)
            batches = session.batches(given, epochs=2, **options)
            assert (batches.dataset, batches.batch_size, len(batches)) == (ROWS, 5, 5)
            for x, y, _ in batches:
                optimizer.zero_grad()
                mean_square(model, x, y).backward()
                optimizer.step()

        return train

    settings = {"scenario": cluster(*UNEVEN), "strategy": "asp"}
    expected, _ = launch(script(ROWS, batch_size=5, collate_fn=doubled), **settings)
    loader = DataLoader(ROWS, 5, shuffle=True, drop_last=True, collate_fn=doubled, num_workers=workers)
    run, lines = launch(script(loader), **settings)
    assert all(torch.equal(value, expected.model_state[name]) for name, value in run.model_state.items())
    said = [line.data["text"] for line in observations(lines, "warning") if "DataLoader" in line.data["text"]]
    assert said == [
        "the run shares samples out, shuffled from --seed; the DataLoader's RandomSampler is not used, "
        "nor is drop_last: every sample is used"
    ]


class Pairs(Sampler):
    """Batches of the script's own."""

    def __iter__(self):
        return iter([[0, 1]])


def test_what_the_call_says_comes_before_what_the_loader_says():
    def train():
        session = paceline.init()
        start(session)
        assert session.batches(DataLoader(ROWS, 5), batch_size=2).batch_size == 2
        assert session.batches(DataLoader(ROWS, batch_sampler=Pairs()), batch_size=2).batch_size == 2
        for loader in (DataLoader(ROWS, batch_size=None), DataLoader(ROWS, batch_sampler=Pairs())):
            with pytest.raises(OptionError, match=r"no batch size: give one, batches\(loader, batch_size=...\)"):
                session.batches(loader)
        assert session.batches(DataLoader(Stream(), 5)).batch_size == 5
        assert session.batches(DataLoader(Stream(), 5), batch_size=2).batch_size == 2

    launch(train)


def test_a_tensor_data_set_gives_what_default_collate_would():
    data = TensorDataset(torch.arange(12.0)[:, None], torch.arange(12))
    batches = []

    def train():
        session = paceline.init()
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in session.batches(data, batch_size=4, epochs=1):
            batches.append(batch)
            model(batch[0]).sum().backward()

    launch(train, cluster(1.0))
    assert [type(batch) for batch in batches] == [list] * 3
    assert sorted(int(i) for batch in batches for i in batch[1]) == list(range(12))


def test_batch_norm_statistics_move_with_the_pushes():
    def train():
        session = paceline.init()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(ROWS, batch_size=7, epochs=20):
            assert len(x) >= 2
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    run, _ = launch(train)
    torch.testing.assert_close(run.model_state["0.running_mean"], ROWS.x.mean(0), rtol=0, atol=0.15)
    assert run.model_state["0.num_batches_tracked"] > 10


def test_tied_frozen_and_unused_parameters():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.first = torch.nn.Linear(6, 6).double()
            self.second = torch.nn.Linear(6, 6).double()
            self.second.weight = self.first.weight
            self.last = torch.nn.Linear(6, 1).double()
            self.unused = torch.nn.Linear(3, 3).double()
            self.first.bias.requires_grad_(False)

        def forward(self, x):
            return self.last(self.second(self.first(x)))

    before = Odd().state_dict()

    def train():
        session = paceline.init()
        model = Odd()
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01, weight_decay=0.5)
        session.prepare(model, optimizer)
        plain_loop(session, model, optimizer)

    run, _ = launch(train)
    assert set(run.model_state) == set(before)
    assert torch.equal(run.model_state["first.bias"], before["first.bias"])
    assert torch.equal(run.model_state["unused.weight"], before["unused.weight"])  # no gradient: not even decayed
    assert torch.equal(run.model_state["first.weight"], run.model_state["second.weight"])
    assert not torch.equal(run.model_state["last.weight"], before["last.weight"])
    Odd().load_state_dict(run.model_state)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.batches(ROWS, batch_size=0), "batch_size must be a whole number >= 1, not 0"),
        (lambda s: s.batches(ROWS, epochs=-1), "epochs must be > 0"),
        (lambda s: s.batches(ROWS, shuffle=True), "takes no shuffle"),
        (lambda s: s.batches(ROWS, sampling="all"), "epoch, shard, replacement"),
        (lambda s: s.batches([], batch_size=2), "empty"),
    ],
)
def test_bad_calls_say_what_is_wrong(call, message):
    def train():
        session = paceline.init()
        start(session)
        call(session)

    with pytest.raises(UserError, match=message):
        launch(train)


def test_batches_before_prepare_and_step_outside_of_the_loop():
    with pytest.raises(UserError, match="before prepare"):
        launch(lambda: paceline.init().batches(ROWS))

    def early_step():
        start(paceline.init())[1].step()

    with pytest.raises(UserError, match="outside of"):
        launch(early_step)


def test_workers_with_different_models_are_told_apart():
    def train():
        session = paceline.init()
        model = torch.nn.Linear(6 + session.worker, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(
        OptionError, match=r"worker 1 has weight \[1, 7\] torch.float32 where worker 0 has weight \[1, 6\]"
    ):
        launch(train)


def test_a_script_that_raises_names_worker_and_batch():
    def train():
        session = paceline.init()
        model, optimizer = start(session)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=2)):
            if session.worker == 2 and number == 1:
                raise ValueError("broken data")
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    lines = Lines()
    with pytest.raises(ScriptError, match=r"ValueError in worker 2, batch 2, .*broken data") as caught:
        paceline.launch(train, engine="sim", scenario=cluster(*EVEN), sink=lines)
    assert isinstance(caught.value.__cause__, ValueError)
    assert lines[-1].what == "end"
    assert lines[-1].data["cause"] == "error"


def test_a_finished_run_leaves_no_session_in_memory():
    import gc
    import weakref

    sessions = []

    def train():
        session = paceline.init()
        sessions.append(weakref.ref(session))
        plain_loop(session, *start(session))

    launch(train)
    gc.collect()
    assert len(sessions) == 4
    assert all(session() is None for session in sessions)
