"""Scripts on virtual nodes without a server: every machine trains, and what must hold of the models holds."""

import math

import pytest
import torch
from clusters import Rows, cluster, event, mean_square, network

import paceline
from paceline import strategies
from paceline.core.errors import OptionError
from paceline.core.events import Pushed
from paceline.core.peer_actions import Mix, Send
from paceline.core.peer_events import Averaged, Received, Sent, Stepped
from paceline.records import journal
from paceline.records.journal import Decision, Lines, Observation, PeerDecision
from paceline.records.replay import replay

ROWS = Rows(80)
MODEL_BYTES = sum(p.nbytes for p in network().parameters())
MACHINES = [
    "gossip", "gossip:form=pull", "gossip:form=weighted,peers=ring", "gossip:peers=exponential,period=3",
    "gossip:scope=tensor,period=3", "elastic:period=2", "elastic:scope=tensor,period=2",
    "adaptive_gossip:warmup=2", "adaptive_gossip:mixed=changed",
    "adaptive_gossip:scope=model,form=weighted", "adaptive_elastic:warmup=2,max_interval=5",
    "gossip:wire=int8", "gossip:form=weighted,wire=int8", "adaptive_gossip:steps_power=1,wire=float32",
    "elastic:wire=bfloat16",
    "local_sgd:period=2",
]  # fmt: skip
SLOW_LINE = "latency_ms = 2.0\nbandwidth_mbps = 0.05"


def train(epochs=4, lr=0.02, ended=None):
    def script():
        session = paceline.init()
        torch.manual_seed(3)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model, optimizer = session.prepare(model, optimizer, evaluate=evaluate)
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=epochs):
            optimizer.zero_grad()
            loss = mean_square(model, x, y)
            loss.backward()
            session.report(loss=loss)
            optimizer.step()
        if ended is not None:
            ended[session.worker] = {name: value.clone() for name, value in model.state_dict().items()}

    return script


def evaluate(model):
    return {"loss": float(mean_square(model, ROWS.x, ROWS.y))}


def launch(strategy, scenario=None, script=None, **settings):
    lines = Lines()
    scenario = scenario or cluster(1.0, 1.0, 0.5, 0.25)
    run = paceline.launch(script or train(), engine="sim", scenario=scenario, strategy=strategy, sink=lines, **settings)
    return run, lines


def of_nodes(lines, kind):
    return [
        (line.node, line.event) for line in lines if isinstance(line, PeerDecision) and isinstance(line.event, kind)
    ]


def actions(lines, kind):
    return [
        (line.node, a) for line in lines if isinstance(line, PeerDecision) for a in line.actions if isinstance(a, kind)
    ]


def observed(lines, what):
    return [line for line in lines if isinstance(line, Observation) and line.what == what]


@pytest.mark.parametrize("strategy", MACHINES)
def test_every_machine_trains_settles_every_sample_and_replays(strategy, tmp_path):
    run, lines = launch(strategy, journal=tmp_path / "run.jsonl")
    assert run.ended == "done"
    assert run.summary.samples_used == 4 * len(ROWS)
    losses = [line.data["metrics"]["loss"] for line in observed(lines, "evaluation")]
    assert losses[-1] < losses[0] / 4
    assert replay(tmp_path / "run.jsonl").difference is None
    assert list(journal.read(tmp_path / "run.jsonl")) == list(lines)
    assert run.summary.exchanges > 0
    assert run.summary.peers.consensus is not None
    assert run.summary.staleness.mean is None


@pytest.mark.parametrize("strategy", ["adaptive_gossip:warmup=2,budget=0.2", "elastic:period=2", "local_sgd:period=2"])
def test_the_report_has_the_course_of_intervals_thresholds_and_distances(strategy):
    run, lines = launch(strategy)
    course = run.summary.peers.course
    measured = observed(lines, "consensus")
    assert [(point.at, point.consensus) for point in course] == [(line.at, line.data["distance"]) for line in measured]
    assert len(course) > 3
    thresholds = [point.threshold for point in course]
    assert len(set(thresholds)) > 3 if "budget" in strategy else set(thresholds) == {None}


def loss_of(state):
    model = network()
    model.load_state_dict(state)
    with torch.no_grad():
        return evaluate(model.eval())["loss"]


@pytest.mark.parametrize("strategy", ["adaptive_gossip:warmup=2", "local_sgd:period=2"])
def test_every_nodes_own_final_model_is_measured_and_the_average_stays(strategy, tmp_path):
    run, lines = launch(strategy, journal=tmp_path / "run.jsonl")
    (measured,) = observed(lines, "evaluation_nodes")
    assert measured.data["nodes"] == sorted(run.nodes) == [0, 1, 2, 3]
    own = [loss_of(run.nodes[node]) for node in measured.data["nodes"]]
    assert [each["loss"] for each in measured.data["metrics"]] == pytest.approx(own)
    of_nodes = run.summary.peers.nodes["loss"]
    assert (of_nodes.mean, of_nodes.min, of_nodes.max) == pytest.approx((sum(own) / 4, min(own), max(own)))
    used = {report.worker: report.samples for report in run.summary.per_worker}
    for name, value in run.model_state.items():  # the store has the average again
        mean = sum(state[name] * used[node] for node, state in run.nodes.items()) / sum(used.values())
        torch.testing.assert_close(value, mean)
    assert run.summary.metrics["loss"] == observed(lines, "evaluation")[-1].data["metrics"]["loss"]


def test_a_node_that_crashed_is_not_measured_at_the_end():
    _, lines = launch("gossip", cluster(1.0, 1.0, 1.0, events=event("crash", 0.5, worker=1)))
    (measured,) = observed(lines, "evaluation_nodes")
    assert measured.data["nodes"] == [0, 2]


def test_a_run_that_is_not_evaluated_measures_no_node_and_neither_does_one_with_a_server():
    without, lines = launch("gossip", evaluate_every="off")
    assert (without.summary.peers.nodes, observed(lines, "evaluation_nodes")) == ({}, [])
    assert observed(launch("bsp")[1], "evaluation_nodes") == []


def test_the_same_run_again_is_the_same_to_the_last_byte(tmp_path):
    for name in ("one", "two"):
        launch("adaptive_gossip:warmup=2", journal=tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_everybody_ends_with_the_average_of_all_models_weighted_by_samples():
    ended = {}
    run, _ = launch("gossip", script=train(ended=ended))
    for state in ended.values():
        for name, value in run.model_state.items():
            torch.testing.assert_close(state[name], value)


def test_without_exchanges_a_lone_node_trains_as_torch_does():
    run, _ = launch("gossip", cluster(1.0))
    torch.manual_seed(3)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    orders = []

    def script():
        session = paceline.init()
        torch.manual_seed(3)
        mine = network()
        prepared = session.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.02))
        for x, y, rows in session.batches(ROWS, batch_size=5, epochs=4):
            orders.append(rows)
            prepared[1].zero_grad()
            mean_square(mine, x, y).backward()
            prepared[1].step()

    launch("gossip", cluster(1.0), script)
    for rows in orders:
        optimizer.zero_grad()
        mean_square(model, ROWS.x[rows], ROWS.y[rows]).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.model_state[name], value, rtol=0, atol=0)


def test_a_slow_node_costs_the_others_nothing():
    _, even = launch("gossip", cluster(1.0, 1.0, 1.0, 1.0))
    _, uneven = launch("gossip", cluster(1.0, 1.0, 1.0, 0.25))
    gaps = [
        {node: [e.at for n, e in of_nodes(lines, Stepped) if n == node][:8] for node in range(3)}
        for lines in (even, uneven)
    ]
    assert gaps[0] == gaps[1]


def test_average_of_all_makes_the_members_alike_and_counts_the_wait():
    run, lines = launch("local_sgd:period=2")
    assert {event.members for _, event in of_nodes(lines, Averaged)} >= {(0, 1, 2, 3)}
    assert run.summary.wait_fraction > 0.2  # for the slowest
    for present, spent in (
        (w.compute_s + w.transfer_s + w.wait_s + w.lost_s, run.summary.seconds) for w in run.summary.per_worker
    ):
        assert present == pytest.approx(spent, rel=0.02)


def test_bytes_are_counted_where_they_are_sent():
    run, lines = launch("gossip")
    sends, left = actions(lines, Send), of_nodes(lines, Sent)
    assert run.summary.exchanges == len(sends)
    assert {event.bytes for _, event in left} == {MODEL_BYTES}
    assert run.summary.bytes_up == MODEL_BYTES * len(left)
    halved, _ = launch("adaptive_gossip:threshold=0,wire=bfloat16")
    full, _ = launch("adaptive_gossip:threshold=0")
    itemsize = next(iter(network().parameters())).itemsize
    assert halved.summary.bytes_up == pytest.approx(full.summary.bytes_up * 2 / itemsize, rel=0.05)


def test_int8_takes_a_quarter_and_the_scales_whatever_the_machine():
    from paceline.peers.packing import on_wire

    packed = sum(on_wire(p.detach(), "int8", copy=True).nbytes for p in network().parameters())
    for machine in ("gossip", "adaptive_gossip:threshold=0"):
        full, _ = launch(with_wire(machine, "float32"))
        quarter, _ = launch(with_wire(machine, "int8"))
        assert quarter.summary.exchanges == full.summary.exchanges
        assert quarter.summary.bytes_up == full.summary.bytes_up * packed / MODEL_BYTES


def with_wire(machine, wire):
    return f"{machine}{',' if ':' in machine else ':'}wire={wire}"


def test_threshold_0_is_gossip_to_the_last_bit():
    plain, _ = launch("gossip:period=1")
    adaptive, _ = launch("adaptive_gossip:threshold=0")
    for name, value in plain.model_state.items():
        assert torch.equal(adaptive.model_state[name], value)


def test_elastic_averaging_keeps_the_sum_of_models_and_centre(monkeypatch):
    from paceline.peers.virtual import VirtualPeerExchange

    pull = VirtualPeerExchange._pull
    sums = []

    def checked(self, worker, message):
        tensors = self._models[worker].tensors()
        before = [t.double() + c.double() for t, c in zip(tensors, self._centre.tensors, strict=True)]
        answer = pull(self, worker, message)
        after = [
            t.double() - p + c.double() for t, p, c in zip(tensors, answer.values, self._centre.tensors, strict=True)
        ]
        sums.append(max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)))
        return answer

    monkeypatch.setattr(VirtualPeerExchange, "_pull", checked)
    launch("elastic:period=1,alpha=0.3")
    assert sums
    assert max(sums) < 1e-9


@pytest.mark.parametrize("strategy", ["gossip", "adaptive_gossip:warmup=3", "local_sgd:period=2", "elastic:period=2"])
def test_nodes_may_die_and_come_at_any_moment(strategy):
    events = event("crash", 0.12, worker=1) + event("join", 0.2, speed=1.0) + event("crash", 0.33, worker=3)
    run, lines = launch(strategy, cluster(1.0, 1.0, 0.5, 0.25, events=events))
    assert run.ended == "done"
    assert run.summary.samples_used == 4 * len(ROWS)
    assert not [a for node, a in actions(lines, Send) if a.peer == node]
    assert 4 in {line.event.worker for line in lines if isinstance(line, Decision) and isinstance(line.event, Pushed)}


def test_what_was_on_its_way_to_a_dead_node_comes_back():
    slow = cluster(1.0, 1.0, network=SLOW_LINE, events=event("crash", 0.3, worker=1))
    _, lines = launch("gossip:form=weighted", slow)
    returned = [event for node, event in of_nodes(lines, Received) if event.peer == node]
    assert returned
    assert [mix for node, mix in actions(lines, Mix) if mix.message == returned[0].message]


def test_messages_take_their_links_time_and_the_third_waits():
    seconds = MODEL_BYTES / (0.05e6 / 8)
    run, lines = launch("gossip", cluster(1.0, 1.0, network=SLOW_LINE))
    assert min(event.seconds for _, event in of_nodes(lines, Sent)) == pytest.approx(seconds)
    free, _ = launch("gossip", cluster(1.0, 1.0))
    blocked, _ = launch("gossip:overlap=false", cluster(1.0, 1.0, network=SLOW_LINE))
    assert free.summary.seconds < run.summary.seconds <= blocked.summary.seconds
    steps = len(of_nodes(lines, Stepped)) / 2
    assert blocked.summary.seconds == pytest.approx(steps * (0.05 + seconds), rel=0.1)


def test_a_node_that_comes_back_is_not_held_up_by_what_it_sent_before():
    events = event("crash", 0.2, worker=1) + event("rejoin", 0.25, worker=1)
    _, lines = launch("gossip:overlap=false", cluster(1.0, 1.0, network=SLOW_LINE, events=events))
    first = min(e.at for node, e in of_nodes(lines, Stepped) if node == 1 and e.at > 0.25)
    assert first == pytest.approx(0.3)  # a batch takes 0.05 s


def test_a_gradient_that_is_not_finite_is_refused_and_the_model_stays():
    def script():
        session = paceline.init()
        torch.manual_seed(3)
        model = network()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=1)):
            optimizer.zero_grad()
            (mean_square(model, x, y) * (math.nan if number == 1 and session.worker == 0 else 1.0)).backward()
            optimizer.step()

    run, lines = launch("gossip", cluster(1.0, 1.0), script)
    assert all(bool(torch.isfinite(value).all()) for value in run.model_state.values())
    assert len(observed(lines, "refused")) == 1
    used = {report.worker: report.samples for report in run.summary.per_worker}
    assert sum(used.values()) == len(ROWS) - 5
    for name, value in run.model_state.items():  # what was refused gives its node no weight
        mean = sum(run.nodes[node][name] * used[node] for node in (0, 1)) / sum(used.values())
        torch.testing.assert_close(value, mean)


def test_batch_statistics_are_averaged_and_counters_are_not():
    ended, tracked = {}, {}

    def script():
        session = paceline.init()
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
        model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        for x, y, _ in session.batches(ROWS, batch_size=5, epochs=2):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            ended[session.worker] = model[1].running_mean.clone()  # the last step brings everybody's average back
            tracked[session.worker] = int(model[1].num_batches_tracked)
            optimizer.step()

    run, _ = launch("elastic:alpha=0", cluster(1.0, 0.5), script)  # nothing is exchanged on the way
    used = {worker.worker: worker.samples for worker in run.summary.per_worker}
    mean = sum(ended[node] * used[node] for node in ended) / sum(used.values())
    torch.testing.assert_close(run.model_state["1.running_mean"], mean)
    assert tracked[0] != tracked[1]
    assert int(run.model_state["1.num_batches_tracked"]) == max(tracked.values())


def test_what_cannot_be_is_refused():
    for engine in ("local", "sim"):
        with pytest.raises(OptionError, match="gossip has no server that could go on under bsp"):
            paceline.launch(train(), engine=engine, strategy="gossip", on_divergence="bsp")

    def on_tables():
        paceline.init().table("x", 3)

    with pytest.raises(OptionError, match="has no server that could keep tables"):
        launch("gossip", script=on_tables)


def test_every_machine_is_tried_here():
    assert {spec.split(":")[0] for spec in MACHINES} == set(strategies.peer_names())


def test_what_is_on_its_way_when_the_loop_ends_arrives_and_is_counted():
    run, lines = launch("gossip:form=weighted", cluster(1.0, 1.0, network="latency_ms = 30.0\nbandwidth_mbps = 0.2"))
    sent, mixed = actions(lines, Send), actions(lines, Mix)
    assert run.summary.bytes_up == len(sent) * MODEL_BYTES
    assert len(mixed) == len(sent)
    weight = {0: 1.0, 1: 1.0}
    for line in lines:
        if isinstance(line, PeerDecision):
            weight[line.node] -= sum(action.weight for action in line.actions if isinstance(action, Send))
            weight[line.node] += line.event.weight if isinstance(line.event, Received) else 0.0
    assert sum(weight.values()) == pytest.approx(2.0)


@pytest.mark.parametrize("how", ["leaves", "is sent away"])
def test_a_leaver_hands_its_weight_on_and_what_it_had_not_read_comes_back(how):
    def script():
        session = paceline.init()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        session.prepare(model, optimizer)
        for number, (x, y, _) in enumerate(session.batches(ROWS, batch_size=5, epochs=4)):
            optimizer.zero_grad()
            mean_square(model, x, y).backward()
            optimizer.step()
            if how == "leaves" and session.worker == 1 and number == 6:
                break

    events = event("leave", 0.5, worker=1) if how == "is sent away" else ""
    scenario = cluster(1.0, 1.0, 1.0, network="latency_ms = 20.0\nbandwidth_mbps = 1.0", events=events)
    run, lines = launch("gossip:form=weighted", scenario, script)
    weight = dict.fromkeys(range(3), 1.0)
    for line in lines:
        if isinstance(line, PeerDecision):
            weight[line.node] -= sum(action.weight for action in line.actions if isinstance(action, Send))
            weight[line.node] += line.event.weight if isinstance(line.event, Received) else 0.0
    assert weight[1] == pytest.approx(0.0)
    assert sum(weight.values()) == pytest.approx(3.0)
    assert set(run.nodes) == ({0, 1, 2} if how == "leaves" else {0, 2})
