"""How large an update is, and what the learning rate is multiplied by: set, carried out, recorded and reported."""

import math

import pytest
import torch
from clusters import EVEN, Rows, cluster, mean_square, network
from launching import launch as launch_processes

import paceline
from paceline.core.errors import OptionError
from paceline.core.settings import RunConfig, resolve, with_shared_batch
from paceline.records.journal import Header, Lines
from paceline.records.text import facts

ROWS = Rows(size=80)


class Train:
    """A script with a scheduler of its own: one that is given to `prepare`, or one that nobody knows of."""

    def __init__(self, lr=0.01, kind="SGD", followed=True, accumulate=1, **options):
        self.lr, self.kind, self.followed, self.accumulate, self.options = lr, kind, followed, accumulate, options

    def __call__(self):
        session = paceline.init()
        model = network()
        optimizer = getattr(torch.optim, self.kind)(model.parameters(), lr=self.lr, **self.options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        session.prepare(model, optimizer, scheduler if self.followed else None)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=2), 1):
            (mean_square(model, x, y) / self.accumulate).backward()
            if number % self.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            session.report(rate=optimizer.param_groups[0]["lr"])


def simulated(train, **settings):
    lines = Lines()
    scenario = settings.pop("scenario", cluster(*EVEN))
    return paceline.launch(train, engine="sim", scenario=scenario, sink=lines, **settings), lines


def same(one, other):
    return all(torch.equal(one.model_state[key], other.model_state[key]) for key in one.model_state)


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("strategy", ["bsp", "asp"])
@pytest.mark.parametrize(("kind", "options"), [("SGD", {"momentum": 0.5}), ("AdamW", {}), ("RMSprop", {})])
def test_a_scaled_rate_is_that_of_a_script_with_the_larger_one_and_no_scheduler_undoes_it(
    kind, options, strategy, followed
):
    scaled, _ = simulated(Train(0.01, kind, followed, **options), strategy=strategy, scale_lr="linear")
    larger, _ = simulated(Train(0.04, kind, followed, **options), strategy=strategy)
    plain, _ = simulated(Train(0.01, kind, followed, **options), strategy=strategy)
    assert same(scaled, larger)
    assert not same(scaled, plain)


def test_the_script_sees_its_own_rate():
    run, _ = simulated(Train(0.01), scale_lr="linear")
    assert max(run.summary.reported["rate"].last, run.summary.reported["rate"].mean) <= 0.01


@pytest.mark.slow
def test_rates_are_scaled_on_real_processes_too():
    train = Train(0.01, momentum=0.5)
    scaled = launch_processes(train, scale_lr="linear")
    assert same(scaled, launch_processes(Train(0.02, momentum=0.5)))
    assert not same(scaled, launch_processes(train))


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_scaling_is_in_the_journal_and_in_the_report(scale, factor):
    run, lines = simulated(Train(), scale_lr=scale)
    assert isinstance(lines[0], Header)
    assert lines[0].options["scale_lr"] == scale
    assert (run.summary.batch.scale_lr, run.summary.batch.rate_factor) == (scale, factor)
    said = dict(facts(run.summary))["rate"]
    assert ("times" in said) == (scale != "none")
    assert said.endswith("for a step over 20 samples")


def test_one_worker_has_nothing_to_scale():
    run, _ = simulated(Train(), scenario=cluster(1.0), scale_lr="sqrt")
    assert same(run, simulated(Train(), scenario=cluster(1.0))[0])
    assert dict(facts(run.summary))["batch"] == "5 samples an update"


@pytest.mark.parametrize(
    ("strategy", "batch", "rate"),
    [
        ("bsp", "4 workers x 5 = 20 samples an update (1 worker: 5)", "for a step over 20 samples"),
        (
            "asp",
            "1 push of 5 samples an update; 4 workers x 5 = 20 a round",
            "of 20 samples: an update is 1/4 of",
        ),
        ("fastest_k:k=3", "3 pushes of 15 samples an update; 4 workers x 5 = 20 a round", "step over 15 samples"),
        ("k_async:k=2", "2 pushes of 10 samples an update; 4 workers x 5 = 20 a round", "an update is 1/2 of a step"),
        ("gossip", "5 samples a step of each node; no update is common to all", None),
    ],
)
def test_the_report_says_how_many_samples_an_update_takes(strategy, batch, rate):
    said = dict(facts(simulated(Train(), strategy=strategy)[0].summary))
    assert said["batch"] == batch
    assert rate is None or rate in said["rate"]
    assert ("rate" in said) == (rate is not None)


def test_the_first_lines_are_the_batch_and_the_rate():
    assert [label for label, _ in facts(simulated(Train())[0].summary)][:2] == ["batch", "rate"]


def test_a_script_that_accumulates_has_larger_updates():
    said = dict(facts(simulated(Train(accumulate=2))[0].summary))
    assert said["batch"] == "4 workers x 10 = 40 samples an update (1 worker: 10)"


def test_a_global_batch_is_shared_by_the_workers():
    shared, lines = simulated(Train(), global_batch=8)
    assert lines[0].options["global_batch"] == 8
    assert (shared.summary.batch.batch_size, shared.summary.batch.update_samples) == (2, 8)
    assert same(shared, simulated(Train(), batch_size=2)[0])


def test_a_global_batch_that_cannot_be_shared_names_those_that_can():
    with pytest.raises(OptionError, match=r"--global-batch: 30 samples .* 4 workers; give 28 or 32, or another"):
        simulated(Train(), global_batch=30)
    with pytest.raises(OptionError, match=r"give 4, or another number of workers"):
        simulated(Train(), global_batch=3)


def test_settings_that_contradict_each_other_are_refused():
    for settings, why in (
        ({"batch_size": 5, "global_batch": 20}, "--batch-size 5 is per worker and --global-batch 20 for all of them"),
        ({"scale_lr": "sqrt", "global_batch": 20}, "--scale-lr sqrt is for updates that grow with the workers"),
        ({"scale_lr": "linear", "strategy": "gossip"}, "under gossip each node steps by itself"),
    ):
        with pytest.raises(OptionError, match=why):
            simulated(Train(), **settings)


def test_a_source_that_ranks_higher_decides_how_the_batch_is_given():
    assert resolve({"global_batch": "20"}, {"PACELINE_BATCH_SIZE": "3"}, {"batch_size": 2}).batch_size is None
    assert resolve({"batch_size": "3"}, {}, {"global_batch": 20}).global_batch is None
    both = resolve({}, {}, {"global_batch": 20, "batch_size": 5})
    assert (both.batch_size, both.global_batch) == (5, 20)  # refused by `require_possible`


def test_tables_have_neither_batches_nor_rates():
    def on_tables():
        session = paceline.init()
        session.table("w", rows=2)
        session.clock()

    for settings in ({"scale_lr": "sqrt"}, {"global_batch": 8}):
        with pytest.raises(OptionError, match="the script works on tables, without batches and rates"):
            simulated(on_tables, **settings)


def test_a_number_without_workers_to_share_it_stays():
    assert with_shared_batch(RunConfig(), 3) == RunConfig()
    assert with_shared_batch(RunConfig(global_batch=9), 3).batch_size == 3


def test_numbers_of_the_script_are_in_the_report():
    def train():
        session = paceline.init()
        model = network()
        session.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.01))
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=20, epochs=1), 1):
            mean_square(model, x, y).backward()
            session.report(pieces=number, constant=2.5)
            optimizer.step()

    run, _ = simulated(train, scenario=cluster(1.0))
    assert run.summary.reported["pieces"].last == 4
    assert run.summary.reported["pieces"].mean == 2.5
    assert run.summary.reported["pieces"].count == 4
    assert math.isclose(run.summary.reported["constant"].mean, 2.5)
    assert dict(facts(run.summary))["reported"] == "pieces 4 (mean 2.5 of 4); constant 2.5 (mean 2.5 of 4)"
