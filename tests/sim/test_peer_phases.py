"""Several loops in one script, without a server: each begins anew, and nothing of one is taken for another's."""

import pytest
import torch
from clusters import Rows, cluster, mean_square, network

import paceline
from paceline.core.peer_actions import Exchange
from paceline.core.peer_events import Averaged
from paceline.records.journal import Lines, Observation, PeerDecision
from paceline.records.replay import replay

ROWS = Rows(60)


class Loops:
    """`stops` and `leaves` say after how many batches of the first loop worker 0 ends it, and who else leaves it.

    Whoever leaves it ends there, unless `returns`.
    """

    def __init__(self, loops=2, stops=None, leaves=None, returns=False, rate=0.02):
        self.loops, self.stops, self.leaves, self.returns, self.rate = loops, stops, leaves or {}, returns, rate

    def __call__(self):
        session = paceline.init()
        torch.manual_seed(3)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        model, optimizer = session.prepare(model, optimizer)
        for loop in range(self.loops):
            for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=4, epochs=1), 1):
                optimizer.zero_grad()
                loss = mean_square(model, x, y)
                loss.backward()
                session.report(loss=loss)
                optimizer.step()
                if loop == 0 and session.worker == 0 and number == self.stops:
                    session.stop("enough")
                if loop == 0 and number == self.leaves.get(session.worker):
                    if not self.returns:
                        return
                    break


def launch(strategy, scenario, script, tmp_path, engine="sim"):
    lines = Lines()
    run = paceline.launch(
        script, engine=engine, scenario=scenario, strategy=strategy, sink=lines, evaluate_every="off",
        runs_dir=tmp_path / "runs", journal=tmp_path / "run.jsonl",
    )  # fmt: skip
    assert replay(tmp_path / "run.jsonl").difference is None
    return run, lines


def consensus(lines):
    return [line for line in lines if isinstance(line, Observation) and line.what == "consensus"]


@pytest.mark.parametrize("engine", ["sim", pytest.param("local", marks=pytest.mark.soak)])
@pytest.mark.parametrize("strategy", ["elastic:period=1", "local_sgd:period=1"])
def test_an_answer_that_is_under_way_when_a_loop_is_stopped_is_nobodys(strategy, engine, tmp_path):
    scenario = cluster(0.8, 1.0, 0.7, network="latency_ms = 60.0")  # worker 1 has asked again when worker 0 stops
    run, lines = launch(strategy, scenario, Loops(stops=2), tmp_path, engine)
    assert run.ended == "done"
    assert len(consensus(lines)) == 2
    if strategy.startswith("elastic") and engine == "sim":
        asked = sum(isinstance(a, Exchange) for line in lines if isinstance(line, PeerDecision) for a in line.actions)
        assert run.summary.exchanges < asked  # that of worker 1's last step in the first loop is void


def test_rounds_of_a_second_loop_have_everybody(tmp_path):
    """15 batches: one of two nodes makes 8 steps and the other 7, in each loop; once the 8th is a round's."""
    _, lines = launch("local_sgd:period=3", cluster(1.0, 1.0), Loops(loops=4), tmp_path)
    averaged = [line.event.members for line in lines
                if isinstance(line, PeerDecision) and isinstance(line.event, Averaged)]  # fmt: skip
    assert len(averaged) >= 12
    assert [members for members in averaged if len(members) == 1] == [(0,)]


@pytest.mark.parametrize("engine", ["sim", pytest.param("local", marks=pytest.mark.soak)])
def test_who_left_in_the_first_loop_does_not_count_in_the_second(engine, tmp_path):
    run, lines = launch("gossip:period=100", cluster(1.0, 1.0, 1.0), Loops(leaves={2: 2}), tmp_path, engine)
    assert [line.data["nodes"] for line in consensus(lines)] == [3, 2]
    assert sorted(run.nodes) == [0, 1]


@pytest.mark.parametrize("engine", ["sim", pytest.param("local", marks=pytest.mark.soak)])
def test_who_left_the_first_loop_may_take_part_in_the_second(engine, tmp_path):
    script = Loops(leaves={2: 2}, returns=True)
    run, lines = launch("gossip:period=100", cluster(1.0, 1.0, 1.0), script, tmp_path, engine)
    assert [line.data["nodes"] for line in consensus(lines)] == [3, 3]
    assert sorted(run.nodes) == [0, 1, 2]


@pytest.mark.parametrize("engine", ["sim", pytest.param("local", marks=pytest.mark.soak)])
def test_a_loop_that_everybody_leaves_ends_with_their_average(engine, tmp_path):
    script = Loops(loops=1, leaves={0: 2, 1: 3})
    run, _ = launch("gossip:period=100", cluster(1.0, 1.0), script, tmp_path, engine)
    for name, value in run.model_state.items():
        used = {report.worker: report.samples for report in run.summary.per_worker}
        mean = sum(run.nodes[node][name] * used[node] for node in (0, 1)) / sum(used.values())
        torch.testing.assert_close(value, mean)
        assert not torch.equal(run.nodes[0][name], run.nodes[1][name])


@pytest.mark.parametrize("engine", ["sim", pytest.param("local", marks=pytest.mark.soak)])
def test_an_average_is_weighted_by_the_samples_of_its_own_loop(engine, tmp_path):
    """In the first loop node 1 makes one step and node 0 the rest; in the second both make about as many."""
    script = Loops(leaves={1: 1}, returns=True)
    run, lines = launch("gossip:period=100", cluster(1.0, 1.0), script, tmp_path, engine)
    second = next(i for i, line in enumerate(lines) if isinstance(line, Observation) and line.data.get("phase") == 1)
    used = {0: 0, 1: 0}
    for line in lines[second:]:
        if isinstance(line, PeerDecision) and hasattr(line.event, "samples"):
            used[line.node] += line.event.samples
    assert sum(used.values()) == 60
    for name, value in run.model_state.items():
        mean = sum(run.nodes[node][name] * count for node, count in used.items()) / 60
        torch.testing.assert_close(value, mean)
