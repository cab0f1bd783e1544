"""Scripts with several models and optimizers: by themselves, and with all steps of a pass as one update."""

import copy
import itertools

import pytest
import torch
from clusters import UNEVEN, Rows, cluster, event, mean_square, network
from launching import launch
from one_worker import trained

import paceline
from paceline.core.errors import OptionError, ScriptError, UserError

ROWS = Rows()


class Maker(torch.nn.Module):
    """Makes six numbers of two."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.BatchNorm1d(6)).double()

    def forward(self, x):
        return self.body(x)


class Judge(torch.nn.Module):
    """Judges six numbers."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return self.body(x)


def adversaries(seed=0):
    torch.manual_seed(seed)
    maker, judge = Maker(), Judge()
    return maker, judge, torch.optim.Adam(maker.parameters(), lr=0.01), torch.optim.SGD(judge.parameters(), lr=0.02)


def passes(maker, judge, for_maker, for_judge, batches, report=lambda loss: None):
    """A GAN's loop, as people write it: the judge's step, then the maker's against the new judge."""
    for x, _, _ in batches:
        made = maker(x[:, :2])
        for_judge.zero_grad()
        ((judge(x) - 1).square().mean() + judge(made.detach()).square().mean()).backward()
        for_judge.step()
        for_maker.zero_grad()
        loss = (judge(made) - 1).square().mean()
        loss.backward()
        report(loss=loss)
        for_maker.step()


def test_alone_each_step_acts_at_once():
    held = []

    def script(prepare, batches):
        maker, judge, for_maker, for_judge = adversaries()
        prepare(maker, for_maker)
        prepare(judge, for_judge)
        passes(maker, judge, for_maker, for_judge, batches(ROWS, batch_size=10, epochs=2))
        held.append((copy.deepcopy(for_maker.state_dict()), judge.state_dict()))
        return maker

    ours, plain = trained(script)
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name
    torch.testing.assert_close(held[0], held[1], rtol=0, atol=0)
    assert held[0][0]["state"]


def test_alone_optimizers_may_share_parameters():
    """As in a script that changes from one optimizer to another on the way."""

    def script(prepare, batches):
        torch.manual_seed(0)
        model = network()
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.SGD(model.parameters(), lr=0.02)]
        for optimizer in optimizers:
            prepare(model, optimizer)
        for number, (x, y, _) in enumerate(batches(ROWS, batch_size=10, epochs=2)):
            optimizer = optimizers[number >= 4]
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
        return model

    ours, plain = trained(script)
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name


def joint_steps(seen):
    """What one worker of a server makes of these batches: both gradients of a pass are of the same version."""
    maker, judge, for_maker, for_judge = adversaries()
    for index in seen:
        x = ROWS.x[index]
        made = maker(x[:, :2])
        for_judge.zero_grad()
        ((judge(x) - 1).square().mean() + judge(made.detach()).square().mean()).backward()
        kept = [parameter.grad.clone() for parameter in judge.parameters()]
        for_maker.zero_grad()
        (judge(made) - 1).square().mean().backward()
        for parameter, gradient in zip(judge.parameters(), kept, strict=True):
            parameter.grad = gradient
        for_judge.step()
        for_maker.step()
    return maker, judge, for_maker


def script_on(found, optimizers=adversaries, **batches):
    def train():
        session = paceline.init()
        maker, judge, for_maker, for_judge = optimizers(session.worker)
        session.prepare(maker, for_maker)
        session.prepare(judge, for_judge, evaluate=lambda module: {"weight": float(module.body[0].weight.sum())})
        seen = []

        def noted():
            for batch in session.batches(ROWS, **{"batch_size": 10, "epochs": 2, **batches}):
                seen.append(batch[2].tolist())
                yield batch

        passes(maker, judge, for_maker, for_judge, noted(), session.report)
        found[session.worker] = (maker, judge, for_maker.state_dict(), seen)

    return train


def test_on_a_server_a_pass_is_one_update_of_all():
    found = {}
    run = launch(script_on(found), engine="sim", scenario=cluster(1.0), strategy="bsp", evaluate_every="2v")
    maker, judge, state, seen = found[0]
    other_maker, other_judge, for_maker = joint_steps(seen)
    assert run.summary.versions == 10
    torch.testing.assert_close(judge.state_dict(), other_judge.state_dict(), rtol=1e-9, atol=1e-11)
    parameters = dict(maker.named_parameters())
    for name, value in other_maker.named_parameters():
        torch.testing.assert_close(parameters[name], value, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(state["state"], for_maker.state_dict()["state"], rtol=1e-9, atol=1e-11)
    assert set(run.model_state) == {f"Maker.{key}" for key in maker.state_dict()} | {
        f"Judge.{k}" for k in judge.state_dict()
    }
    assert any("all steps of a pass take effect at the next batch" in text for text in run.summary.warnings)
    assert run.summary.metrics["weight"] == pytest.approx(judge.body[0].weight.sum().item())


@pytest.mark.parametrize("strategy", ["bsp", "asp", "ssp", "fastest_k:k=3", "dasp", "adaptive_k_load", "balanced"])
def test_several_workers_hold_the_same_models_in_the_end(strategy):
    found = {}
    launch(script_on(found, epochs=4), engine="sim", scenario=cluster(*UNEVEN), strategy=strategy)
    assert set(found) == {0, 1, 2, 3}
    for worker in (1, 2, 3):
        for place in (0, 1):
            for name, value in found[0][place].state_dict().items():
                assert torch.equal(found[worker][place].state_dict()[name], value), (worker, name)


@pytest.mark.parametrize("zero", ["before", "after", "in place"])
def test_a_model_may_have_two_optimizers(zero):
    found = []

    def zeroed(optimizer, when):
        if when == ("before" if zero == "before" else "after"):
            optimizer.zero_grad(set_to_none=zero != "in place")

    def train():
        session = paceline.init()
        torch.manual_seed(0)
        model = network()
        weights = [p for p in model.parameters() if p.ndim > 1]
        biases = [p for p in model.parameters() if p.ndim == 1]
        optimizers = [torch.optim.SGD(weights, lr=0.05, momentum=0.9), torch.optim.AdamW(biases, lr=0.01)]
        for optimizer in optimizers:
            session.prepare(model, optimizer)
        for x, y, index in session.batches(ROWS, batch_size=10, epochs=2):
            for optimizer in optimizers:
                zeroed(optimizer, "before")
            mean_square(model, x, y).backward()
            for optimizer in optimizers:
                optimizer.step()
                zeroed(optimizer, "after")
            found.append(index.tolist())
        found.append(model)

    run = launch(train, engine="sim", scenario=cluster(1.0), strategy="bsp")
    model = found.pop()
    torch.manual_seed(0)
    plain = network()
    reference = [
        torch.optim.SGD([p for p in plain.parameters() if p.ndim > 1], lr=0.05, momentum=0.9),
        torch.optim.AdamW([p for p in plain.parameters() if p.ndim == 1], lr=0.01),
    ]
    for index in found:
        for optimizer in reference:
            optimizer.zero_grad()
        mean_square(plain, ROWS.x[index], ROWS.y[index]).backward()
        for optimizer in reference:
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-11)
    assert set(run.model_state) == set(model.state_dict())


def test_an_optimizer_that_does_not_step_in_a_pass_stands_still():
    found = []

    def train():
        session = paceline.init()
        maker, judge, for_maker, for_judge = adversaries()
        session.prepare(maker, for_maker)
        session.prepare(judge, for_judge)
        for number, (x, _, _) in enumerate(session.batches(ROWS, batch_size=10)):
            before = copy.deepcopy(list(maker.parameters()))
            for_judge.zero_grad()
            judge(maker(x[:, :2])).square().mean().backward()  # fills the maker's gradients too
            for_judge.step()
            if number % 2:
                for_maker.zero_grad()
                (judge(maker(x[:, :2])) - 1).square().mean().backward()
                for_maker.step()
            found.append((number % 2, before))
        found.append((None, list(maker.parameters())))

    launch(train, engine="sim", scenario=cluster(1.0), strategy="bsp")
    for (stepped, before), (_, after) in itertools.pairwise(found):
        assert bool(stepped) == any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_pass_that_ends_in_a_break_is_pushed_too():
    def train():
        session = paceline.init()
        maker, judge, for_maker, for_judge = adversaries()
        session.prepare(maker, for_maker)
        session.prepare(judge, for_judge)
        for number, batch in enumerate(session.batches(ROWS, batch_size=10)):
            passes(maker, judge, for_maker, for_judge, [batch])
            if number == 2:
                break

    run = launch(train, engine="sim", scenario=cluster(1.0), strategy="bsp")
    assert run.summary.versions == 3


def test_what_no_optimizer_trains_is_named():
    def train():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(list(model.parameters())[:1], lr=0.01)
        session.prepare(model, optimizer)
        for x, y, _ in session.batches(ROWS, batch_size=10):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()

    run = launch(train, engine="sim", scenario=cluster(1.0), strategy="bsp")
    assert any("no prepared optimizer has the parameters 0.bias, " in text for text in run.summary.warnings)


def refused(*calls):
    def train():
        session = paceline.init()
        for call in calls:
            call(session)

    return train


MODEL = network()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda s: s.prepare(MODEL, OPTIMIZER), "twice with the same optimizer"),
        (lambda s: s.prepare(MODEL, torch.optim.Adam(MODEL.parameters())), "a parameter is stepped by one optimizer"),
        (lambda s: (list(s.batches(ROWS)), s.prepare(network(), OPTIMIZER)), "after the first loop"),
    ],
)
def test_what_cannot_be_prepared_beside_the_first_is_refused(second, message):
    train = refused(lambda s: s.prepare(MODEL, OPTIMIZER), second)
    with pytest.raises((OptionError, UserError, ScriptError), match=message):
        launch(train, engine="sim", scenario=cluster(1.0), strategy="bsp")


def test_a_function_that_measures_comes_with_the_last_call():
    def train():
        session = paceline.init()
        maker, judge, for_maker, for_judge = adversaries()
        session.prepare(maker, for_maker, evaluate=lambda module: {"x": 1.0})
        session.prepare(judge, for_judge)

    with pytest.raises(UserError, match="give it to the last one"):
        launch(train, engine="sim", scenario=cluster(1.0), strategy="bsp")


def test_workers_that_prepare_different_numbers_are_named():
    def train():
        session = paceline.init()
        maker, judge, for_maker, for_judge = adversaries()
        session.prepare(maker, for_maker)
        if session.worker == 0:
            session.prepare(judge, for_judge)
        list(session.batches(ROWS, batch_size=10))

    with pytest.raises(OptionError, match=r"worker 1 began its loop after 1 of the 2 calls of prepare\(\)"):
        launch(train, engine="sim", scenario=cluster(1.0, 1.0), strategy="bsp")


def test_nodes_train_one_model_each():
    with pytest.raises(UserError, match="nodes of a run without a server train one model"):
        launch(script_on({}), engine="sim", scenario=cluster(1.0, 1.0), strategy="gossip")


def test_a_worker_that_joins_or_comes_back_gets_all_models():
    found = {}
    events = event("crash", 0.12, worker=1) + event("rejoin", 0.3, worker=1) + event("join", 0.4, speed=1.0)
    launch(script_on(found, epochs=8), engine="sim", scenario=cluster(1.0, 1.0, 1.0, events=events), strategy="asp")
    assert set(found) == {0, 1, 2, 3}
    for worker in (1, 3):
        for name, value in found[0][1].state_dict().items():
            assert torch.equal(found[worker][1].state_dict()[name], value)
