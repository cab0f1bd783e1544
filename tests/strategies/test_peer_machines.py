"""Exact numbers: whose turn it is, what is due, what the budget does, and the identities between machines."""

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from peer_network import Network

from laws.test_peer_laws import builder
from paceline import strategies
from paceline.core.actions import Action, Track
from paceline.core.errors import InternalError, OptionError
from paceline.core.events import Event
from paceline.core.peer_actions import Ask, Average, Exchange, Mix, PeerAction, Send
from paceline.core.peer_events import (
    Asked,
    Averaged,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    Received,
    Sent,
    Started,
    Stepped,
)
from paceline.records.journal import spelled_out
from paceline.strategies import Peer
from paceline.strategies.peers import periods
from paceline.strategies.peers.partners import Partners


def stepped(step: int, change: float | None = None, changes: tuple[float, ...] | None = None) -> Stepped:
    return Stepped(float(step), step, change, changes, 8, 1.0, 0.0)


def started(spec: str, sizes: tuple[int, ...] = (400,), peers: int = 1) -> Peer:
    machine = strategies.build_peer(spec, 0, 0)
    machine.handle(Started(0.0, 0, sizes))
    for peer in range(1, peers + 1):
        machine.handle(PeerJoined(0.0, peer))
    return machine


# -- words -------------------------------------------------------------------------------------------------------------

EVENTS: list[Any] = [
    Started(0.0, 3, (400, 0)),
    PeerJoined(0.0, 1),
    PeerLeft(1.0, 1, "crash"),
    Stepped(1.0, 7, 0.5, (math.inf, 0.0), 8, 1.0, 0.0, 2.5),
    Asked(1.0, 2),
    Received(1.0, 2, 9, 0.25, (0, 1)),
    Received(1.0, 2, 9, 1.0, None),
    Sent(1.0, 2, 400, 0.1),
    Averaged(1.0, 4, (0, 1)),
]
ACTIONS: list[Any] = [
    Mix(9, 0.5, "why"),
    Send(1, 0.5, (0,), "why"),
    Send(1, 0.5, None, "why"),
    Ask(1, "why"),
    Exchange(0.3, None, "why"),
    Average(4, "why"),
    Track("interval", 3.0, "why"),
]


def test_words_survive_a_journal() -> None:
    written = msgspec.json.encode(spelled_out(msgspec.to_builtins([EVENTS, ACTIONS])))
    read = msgspec.json.decode(written, type=tuple[list[PeerEvent], list[PeerAction]], strict=False)
    assert read == (EVENTS, ACTIONS)
    assert all(event.at >= 0 for event in EVENTS)


def test_words_of_both_kinds_can_stand_in_one_journal() -> None:
    """Their tags differ wherever the words do."""
    assert msgspec.json.Decoder(Event | PeerEvent)
    assert msgspec.json.Decoder(Action | PeerAction)


# -- whose turn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "others", "ring", "exponential"),
    [
        (0, [1], [1, 1], [1, 1, 1]),
        (1, [0], [0, 0], [0, 0, 0]),
        (0, [1, 2], [1, 1], [1, 2, 1, 2]),
        (2, [0, 1], [0, 0], [0, 1, 0, 1]),
        (4, [0, 1, 2, 3, 5, 6], [5, 5], [5, 6, 1, 5]),
        (7, [0, 1, 2, 3, 4, 5, 6], [0, 0], [0, 1, 3, 0]),
        (30, [10, 20, 40, 50], [40, 40], [40, 50, 20, 40]),
    ],
)
def test_turns(node: int, others: list[int], ring: list[int], exponential: list[int]) -> None:
    for choice, expected in (("ring", ring), ("exponential", exponential)):
        partners = Partners(node=node)
        for peer in random.Random(0).sample(others, len(others)):
            partners.join(peer)
        assert [partners.draw(choice, random.Random(0)) for _ in expected] == expected  # type: ignore[arg-type]


def test_chance_is_fair_and_never_oneself() -> None:
    partners, chance = Partners(node=2), random.Random(1)
    for peer in range(5):
        partners.join(peer)
        partners.join(peer)
    drawn = [partners.draw("random", chance) for _ in range(4000)]
    assert [round(drawn.count(peer) / 1000, 1) for peer in range(5)] == [1.0, 1.0, 0.0, 1.0, 1.0]
    partners.leave(0)
    partners.leave(0)
    partners.leave(9)
    assert partners.others == [1, 3, 4]


# -- what is due -------------------------------------------------------------------------------------------------------


def exchanged(actions: list[PeerAction]) -> Any:
    """`all`, the tensors, or None."""
    found = [action.tensors for action in actions if isinstance(action, Send | Exchange)]
    return None if not found else "all" if found[0] is None else found[0]


def test_the_trigger_is_exact() -> None:
    """theta^2 = 0.16 and shares of 1/4 and 3/4: due from 0.2 and 0.3464 after one step, over sqrt(steps) after more."""
    machine = started("adaptive_gossip:threshold=0.4,share_power=1,steps_power=1", (400, 1200))
    assert exchanged(machine.handle(stepped(1, changes=(0.1999, 0.3464)))) is None
    assert exchanged(machine.handle(stepped(2, changes=(0.1414, 0.2450)))) == (1,)
    assert exchanged(machine.handle(stepped(3, changes=(0.1155, 0.3464)))) == (0,)
    assert exchanged(machine.handle(stepped(4, changes=(0.2, 0.2450)))) == "all"


def test_a_share_power_lets_large_tensors_wait() -> None:
    """theta^2 = 0.16 and squared shares of 1/16 and 9/16: due from 0.1 and 0.3."""
    machine = started("adaptive_gossip:threshold=0.4,share_power=2,steps_power=1", (400, 1200))
    assert exchanged(machine.handle(stepped(1, changes=(0.0999, 0.2999)))) is None
    assert exchanged(machine.handle(stepped(2, changes=(0.0708, 0.2121)))) == (0,)
    assert exchanged(machine.handle(stepped(3, changes=(0.0999, 0.1733)))) == (1,)


def test_by_default_change_counts_in_proportion_to_the_steps() -> None:
    """theta^2 = 0.09 and squared shares of 1/16 and 9/16: due from 0.075 and 0.225, over the steps."""
    machine = started("adaptive_gossip", (400, 1200))
    assert exchanged(machine.handle(stepped(1, changes=(0.0749, 0.2249)))) is None
    assert exchanged(machine.handle(stepped(2, changes=(0.0374, 0.1126)))) == (1,)
    assert exchanged(machine.handle(stepped(3, changes=(0.0251, 0.2249)))) == (0,)


@pytest.mark.parametrize(
    ("spec", "wire"),
    [
        ("adaptive_gossip", "int8"),
        ("adaptive_gossip:threshold=0", "float32"),  # gossip with period=1 to the last bit
        ("adaptive_gossip:threshold=0,wire=int8", "int8"),
        ("adaptive_elastic", "bfloat16"),
        ("adaptive_elastic:threshold=0", "float32"),
        ("adaptive_elastic:wire=float32", "float32"),
        ("gossip:wire=int8", "int8"),
        ("elastic:wire=bfloat16", "bfloat16"),
        ("local_sgd", "float32"),
    ],
)
def test_what_is_sent_by_default(spec: str, wire: str) -> None:
    assert strategies.build_peer(spec, 0, 0).wire == wire


def test_the_centre_takes_no_int8() -> None:
    with pytest.raises(OptionError, match="wire"):
        strategies.build_peer("adaptive_elastic:wire=int8", 0, 0)


@pytest.mark.parametrize("spec", ["gossip", "elastic", "adaptive_gossip:scope=model", "adaptive_elastic:scope=model"])
def test_a_share_power_needs_tensors_of_their_own(spec: str) -> None:
    joint = "," if ":" in spec else ":"
    with pytest.raises(OptionError, match=r"share_power=2 is of use with scope=tensor, not with scope=model; change"):
        strategies.build_peer(f"{spec}{joint}share_power=2", 0, 0)


def test_whole_models_compare_with_the_threshold_itself() -> None:
    machine = started("adaptive_elastic:warmup=0,threshold=0.3,scope=model", (400, 1200))
    assert (machine.needs_change, machine.needs_changes, machine.has_centre) == (True, False, True)
    assert exchanged(machine.handle(stepped(1, 0.2999))) is None
    assert exchanged(machine.handle(stepped(2, 0.2122))) == "all"
    assert exchanged(machine.handle(stepped(3, 0.3001))) == "all"


@pytest.mark.parametrize("sizes", [(400,), (200_704, 256, 2560, 40), (0, 12, 32, 4), (1, 1, 1, 1), (10**9, 1)])
@pytest.mark.parametrize("period", [1, 2, 13, 100])
@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_periods_of_tensors_send_as_much_as_the_period_of_the_model(
    sizes: tuple[int, ...], period: int, power: float
) -> None:
    each = periods.of_each(sizes, period, power)
    assert all(one >= 1 for one in each)
    assert sum(size / one for size, one in zip(sizes, each, strict=True)) == pytest.approx(sum(sizes) / period)
    scales = [one / size ** (power / 2) for size, one in zip(sizes, each, strict=True) if one > 1]
    assert max(scales, default=1.0) == pytest.approx(min(scales, default=1.0))
    sent = [0] * len(sizes)
    for step in range(1, 1001):
        chosen = periods.due(step, sizes, each)
        for tensor in range(len(sizes)) if chosen is None else chosen:
            sent[tensor] += 1
    assert [times for size, times in zip(sizes, sent, strict=True) if size] == [
        int(1000 / one + 1e-9) for size, one in zip(sizes, each, strict=True) if size
    ]


def test_a_tensor_without_bytes_is_never_due_and_never_missing() -> None:
    machine = started("adaptive_gossip:warmup=1,max_interval=3", (400, 0, 400))
    assert exchanged(machine.handle(stepped(1, changes=(0.0, math.inf, 0.0)))) == "all"
    assert exchanged(machine.handle(stepped(2, changes=(0.0, math.inf, 0.0)))) is None
    assert exchanged(machine.handle(stepped(3, changes=(0.0, math.inf, 5.0)))) == (2,)
    assert exchanged(machine.handle(stepped(4, changes=(0.0, math.inf, 5.0)))) == "all"


def test_a_step_without_its_changes_is_an_engines_mistake() -> None:
    with pytest.raises(InternalError, match="step 1 came without the change of each tensor"):
        started("adaptive_gossip:warmup=0").handle(stepped(1, change=0.1))
    with pytest.raises(InternalError, match="step 1 came without the change of each model"):
        started("adaptive_gossip:warmup=0,scope=model").handle(stepped(1, changes=(0.1,)))


def test_a_new_life_begins_with_nothing_of_the_old_one() -> None:
    machine = started("gossip:form=weighted", peers=3)
    machine.handle(stepped(1))
    machine.handle(PeerLeft(2.0, 0, "done"))
    machine.handle(Started(3.0, 0, (400,)))
    assert machine.handle(stepped(1)) == []
    machine.handle(PeerJoined(4.0, 2))
    assert [(action.peer, action.weight) for action in machine.handle(stepped(2))] == [(2, 0.5)]


def test_what_engines_read() -> None:
    assert strategies.build_peer("adaptive_gossip:wire=bfloat16", 0, 0).wire == "bfloat16"
    assert strategies.build_peer("adaptive_elastic:wire=bfloat16", 0, 0).wire == "bfloat16"
    gossip = strategies.build_peer("gossip", 0, 0)
    assert (gossip.wire, gossip.has_centre, gossip.needs_change, gossip.needs_changes) == (
        "float32", False, False, False
    )  # fmt: skip
    assert strategies.build_peer("adaptive_gossip", 0, 0).needs_changes


# -- the budget --------------------------------------------------------------------------------------------------------


class Drift:
    """Tensors that move by `rate` a step, half in one direction and half at random; exchanging resets the reference."""

    def __init__(self, spec: str, sizes: tuple[int, ...]) -> None:
        self.machine, self.sizes = started(spec, sizes), sizes
        self.moved = np.zeros((len(sizes), 2))
        self.chance = np.random.default_rng(0)
        self.step = 0

    def traffic(self, steps: int, rate: float) -> float:
        """Share of the bytes of period=1 that these steps send."""
        sent = 0
        for _ in range(steps):
            self.step += 1
            self.moved += rate * np.column_stack([np.ones(len(self.sizes)), self.chance.normal(size=len(self.sizes))])
            changes = tuple(np.linalg.norm(self.moved, axis=1) * (1 + np.arange(len(self.sizes))))
            tensors = exchanged(self.machine.handle(stepped(self.step, float(max(changes)), changes)))
            for tensor in range(len(self.sizes)) if tensors == "all" else tensors or ():
                self.moved[tensor] = 0
                sent += self.sizes[tensor]
        return sent / steps / sum(self.sizes)


@pytest.mark.parametrize("spec", ["adaptive_gossip", "adaptive_elastic", "adaptive_gossip:scope=model"])
@pytest.mark.parametrize("budget", [0.08, 0.3])
def test_a_budget_is_met_whatever_the_learning_rate_does(spec: str, budget: float) -> None:
    drift = Drift(f"{spec}{',' if ':' in spec else ':'}budget={budget},warmup=5", (400, 1600, 100))
    assert drift.traffic(5, 0.01) == 1
    for rate in (0.01, 0.1, 0.01, 0.001):
        drift.traffic(800, rate)
        assert drift.traffic(800, rate) == pytest.approx(budget, rel=0.1)


@pytest.mark.parametrize(("mixed", "closer"), [("exchanged", 1.0), ("changed", 0.25)])
def test_models_apart_come_together_without_a_step_if_what_is_mixed_in_counts(mixed: str, closer: float) -> None:
    """One message begins it: without that nobody knows that others are far away."""
    network = Network(builder(f"adaptive_gossip:warmup=0,max_interval=100000,mixed={mixed}"))
    for number in range(4):
        network.join(number)
    for node in network.present:
        while node.news:
            network.tell(node)
    network.step(network.nodes[0], size=1.0)
    network.settle()
    before = _spread(network)
    for turn in range(200):
        network.step(network.nodes[turn % 4], size=0.0)
        network.settle()
    after = _spread(network)
    assert after <= closer * before
    assert mixed == "changed" or after > 0.5 * before


def test_without_a_budget_traffic_follows_the_change() -> None:
    drift = Drift("adaptive_gossip:warmup=0,max_interval=1000", (400, 1600, 100))
    dense, sparse = drift.traffic(500, 0.05), drift.traffic(500, 0.001)
    assert dense > 5 * sparse > 0


def test_the_threshold_is_tracked_when_it_moves() -> None:
    machine = started("adaptive_gossip:warmup=0,budget=0.5,threshold=0.1")
    tracks = [a for a in machine.handle(stepped(1, changes=(1.0,))) if isinstance(a, Track)]
    assert [(track.name, track.value) for track in tracks] == [
        ("interval", 1.0), ("threshold", 0.1 * math.exp(0.05))
    ]  # fmt: skip


# -- identities --------------------------------------------------------------------------------------------------------


def models_after(spec: str) -> list[np.ndarray]:
    """Of a run whose messages are delayed and whose nodes come and go, always in the same way."""
    network, chance = Network(builder(spec)), random.Random(3)
    for number in range(5):
        network.join(number)
    for turn in range(300):
        node = chance.choice(network.present)
        network.step(node)
        while node.news:
            network.tell(node)
        delivered, place = chance.random() < 0.8, chance.random()
        if network.flying and delivered:
            network.deliver(int(place * len(network.flying)))
        if turn == 100:
            network.leave(network.nodes[1], "leave")
        if turn == 200:
            network.leave(network.nodes[3], "crash")
            network.join(1)
    network.settle()
    return [tensor for node in network.listening for tensor in node.model]


@pytest.mark.parametrize(
    ("adaptive", "plain"),
    [
        ("adaptive_gossip:threshold=0", "gossip"),
        ("adaptive_gossip:threshold=0,warmup=0,peers=ring", "gossip:peers=ring"),
        ("adaptive_gossip:threshold=0,mixed=changed", "gossip"),
        ("adaptive_gossip:threshold=0,scope=model,form=pull", "gossip:form=pull"),
        ("adaptive_gossip:threshold=0,scope=model,form=weighted", "gossip:form=weighted"),
        ("gossip:scope=tensor", "gossip"),
        ("adaptive_elastic:threshold=0", "elastic:period=1"),
        ("elastic:scope=tensor,period=1", "elastic:period=1"),
        ("adaptive_elastic:threshold=0,scope=model,alpha=0.2", "elastic:period=1,alpha=0.2"),
        ("adaptive_elastic:alpha=0", "elastic:alpha=0"),
    ],
)
def test_a_threshold_of_zero_is_a_period_of_one_bit_for_bit(adaptive: str, plain: str) -> None:
    pairs = zip(models_after(adaptive), models_after(plain), strict=True)
    assert all((one == other).all() for one, other in pairs)


def test_machines_that_differ_train_other_models() -> None:
    """The comparison above can tell machines apart."""
    one, other = models_after("gossip"), models_after("gossip:period=2")
    assert any((a != b).any() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("form", ["push", "pull", "weighted"])
@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_gossip_alone_brings_models_together(form: str, nodes: int) -> None:
    network, chance = Network(builder(f"gossip:form={form}")), random.Random(0)
    for number in range(nodes):
        network.join(number)
    for node in network.present:
        while node.news:
            network.tell(node)
    before = _spread(network)
    for _ in range(40 * nodes):
        network.step(chance.choice(network.present), size=0.0)
        while network.flying and chance.random() < 0.8:
            network.deliver(chance.randrange(len(network.flying)))
    network.settle()
    assert _spread(network) < before / 1000
    if form == "weighted":
        mean = [tensor / nodes for tensor in network.expected]
        for node in network.present:
            for tensor, expected in zip(node.model, mean, strict=True):
                assert np.abs(tensor - expected).max(initial=0.0) < 1e-2


def _spread(network: Network) -> float:
    flat = np.array([np.concatenate(node.model) for node in network.present])
    return float(np.linalg.norm(flat - flat.mean(axis=0)))
