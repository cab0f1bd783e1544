"""Every registered peer machine keeps the laws, whatever the network does with messages and news.

A machine is tested by being registered.
"""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_checker import Checker
from peer_network import Line, Network

from paceline import strategies
from paceline.records.journal import spelled_out
from paceline.strategies import Peer

EXAMPLES = 20
TRIGGER = "warmup=2,max_interval=5,threshold=0.6"
VARIATIONS = {
    "gossip": [
        "gossip", "gossip:period=3,peers=ring", "gossip:form=pull,peers=exponential", "gossip:form=weighted",
        "gossip:form=weighted,peers=exponential,period=2", "gossip:scope=tensor,period=3",
        "gossip:scope=tensor,period=3,share_power=2",
    ],
    "adaptive_gossip": [
        f"adaptive_gossip:{TRIGGER}", f"adaptive_gossip:{TRIGGER},scope=model,form=pull",
        f"adaptive_gossip:{TRIGGER},scope=model,form=weighted,peers=ring", f"adaptive_gossip:{TRIGGER},budget=0.3",
        f"adaptive_gossip:{TRIGGER},mixed=exchanged,peers=exponential",
        f"adaptive_gossip:{TRIGGER},share_power=1,steps_power=1",
    ],
    "elastic": ["elastic:period=2", "elastic:period=1,alpha=0.3", "elastic:alpha=0", "elastic:scope=tensor,period=2"],
    "adaptive_elastic": [f"adaptive_elastic:{TRIGGER}", f"adaptive_elastic:{TRIGGER},scope=model,budget=0.4"],
    "local_sgd": ["local_sgd:period=2"],
}  # fmt: skip
SPECS = [spec for name in strategies.peer_names() for spec in VARIATIONS[name]]
WHAT = ["step"] * 8 + ["deliver"] * 4 + ["tell"] * 6 + ["join"] * 2 + ["leave", "crash"]
HAPPENINGS = st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 1000)), min_size=20, max_size=90)
MOST = 5  # nodes


def play(
    make: Callable[[int], Peer], happenings: list[tuple[str, int]], after: Callable[[Network], None] = lambda _: None
) -> Network:
    """Three nodes start together; then happens what is listed, as far as it can; then everything arrives."""
    network = Network(make)
    for number in range(3):
        network.join(number)
    for what, choice in happenings:
        _happen(network, what, choice)
        after(network)
    network.settle()
    after(network)
    return network


def _happen(network: Network, what: str, choice: int) -> None:
    present = network.present
    if what == "step":
        able = [node for node in present if node.waits_for is None]
        if able:
            network.step(able[choice % len(able)], size=0.02 * (1 + choice % 7))
    elif what == "deliver" and network.flying:
        network.deliver(choice % len(network.flying))
    elif what == "tell":
        curious = [node for node in network.listening if node.news]
        if curious:
            network.tell(curious[choice % len(curious)])
    elif what == "join":
        absent = [number for number in range(MOST) if number not in [node.number for node in present]]
        if absent:
            network.join(absent[choice % len(absent)])
    elif what in ("leave", "crash") and present:
        network.leave(present[choice % len(present)], what)


def broken(spec: str, lines: list[Line]) -> list[str]:
    """The laws that some node's machine broke."""
    checkers: dict[tuple[int, int], Checker] = {}
    for line in lines:
        key = (line.node, line.life)
        if key not in checkers:
            checkers[key] = Checker(spec)
        checkers[key].write(line.event, line.actions)
    return [violation for checker in checkers.values() for violation in checker.violations]


def first_difference(spec: str, lines: list[Line], every: int) -> Line | None:
    """Feed every node's events to fresh machines, replaced by restored ones every so many decisions."""
    machines: dict[tuple[int, int], Peer] = {}
    for count, line in enumerate(lines):
        key = (line.node, line.life)
        if key not in machines:
            machines[key] = strategies.build_peer(spec, 0, line.node)
        machine = machines[key]
        if count % every == every - 1:
            written = msgspec.json.encode(spelled_out(machine.snapshot()))
            machines[key] = machine = strategies.build_peer(spec, 1, line.node).restore(msgspec.json.decode(written))
        if machine.handle(line.event) != line.actions:
            return line
    return None


def builder(spec: str) -> Callable[[int], Peer]:
    return lambda node: strategies.build_peer(spec, 0, node)


def for_all(test: Callable[..., None], examples: int = EXAMPLES) -> None:
    settings(max_examples=examples, suppress_health_check=list(HealthCheck))(test)()


@pytest.mark.parametrize("spec", SPECS)
def test_laws(spec: str) -> None:
    @given(happenings=HAPPENINGS, every=st.integers(1, 30))
    def holds(happenings: list[tuple[str, int]], every: int) -> None:
        network = play(builder(spec), happenings)
        assert broken(spec, network.lines) == []
        assert first_difference(spec, network.lines, 10**9) is None
        assert first_difference(spec, network.lines, every) is None

    for_all(holds)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "weighted" in spec or "elastic" in spec])
def test_what_exchanges_must_not_change_stays(spec: str) -> None:
    """The weighted sum of all models: with weights for gossip, together with the centre for elastic averaging."""

    @given(happenings=HAPPENINGS)
    def holds(happenings: list[tuple[str, int]]) -> None:
        network = play(builder(spec), happenings, lambda network: _require_sum(network))
        here = {node.number for node in network.present}
        for node in network.listening:
            if "weighted" in spec and not node.present and here - {node.number}:
                assert node.weight == 0

    for_all(holds)


def _require_sum(network: Network) -> None:
    assert network.error() < 1e-9


def test_weights_add_up_to_the_nodes_that_brought_them() -> None:
    @given(happenings=HAPPENINGS)
    def holds(happenings: list[tuple[str, int]]) -> None:
        calm = [(what, choice) for what, choice in happenings if what != "crash"]
        network = play(builder("gossip:form=weighted"), calm)
        nodes = len(network.former) + len(network.nodes)
        assert sum(node.weight for node in network.listening) == pytest.approx(nodes, abs=1e-12)

    for_all(holds)


def test_local_sgd_averages() -> None:
    @given(happenings=HAPPENINGS)
    def holds(happenings: list[tuple[str, int]]) -> None:
        network = play(builder("local_sgd:period=2"), [each for each in happenings if each[0] in ("step", "tell")])
        rounds = {node.passed for node in network.present}
        assert max(rounds) - min(rounds) == 0
        before = max(rounds) * 2
        if all(node.steps == before for node in network.present):
            first, *others = network.present
            for other in others:
                for one, another in zip(first.model, other.model, strict=True):
                    assert (one == another).all()
        assert network.error() < 1e-9

    for_all(holds)


def test_the_order_in_which_peers_came_decides_nothing() -> None:
    orders = [[1, 2, 3, 4], [4, 2, 1, 3]]
    choices = []
    for order in orders:
        network = Network(builder("gossip"))
        for number in [0, *order]:
            network.join(number)
        node = network.nodes[0]
        while node.news:
            network.tell(node)
        for _ in range(20):
            network.step(node)
        choices.append([message.receiver for message in network.flying])
    assert choices[0] == choices[1]
    assert set(choices[0]) == {1, 2, 3, 4}
