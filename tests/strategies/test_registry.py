"""Names, the written form of options, and the errors that lead back to it."""

import math
import random
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta
from random_histories import SPECS

from paceline import strategies
from paceline.core import values as option_values
from paceline.core.errors import OptionError
from paceline.strategies import registry
from paceline.strategies.base import DEFAULTS

MINE = ["bsp", "asp", "ssp", "dssp", "fastest_k", "k_async", "adaptive_k", "adaptive_k_load"]
REQUIRED = {"fastest_k": ":k=2", "k_async": ":k=2"}


def test_names_are_those_of_the_product():
    assert set(strategies.names()) == {*MINE, "adaptive_sync", "dasp", "balanced"}
    for name in MINE:
        assert strategies.strategy_class(name).name == name


PEERS = ["gossip", "elastic", "local_sgd", "adaptive_gossip", "adaptive_elastic"]


def test_there_are_two_kinds():
    assert strategies.peer_names() == PEERS
    assert not set(PEERS) & set(strategies.names())
    assert {strategies.machine_class(name).kind for name in strategies.names()} == {"central"}
    assert {strategies.machine_class(name).kind for name in PEERS} == {"peer"}


@pytest.mark.parametrize("name", PEERS)
def test_a_machine_of_a_node_is_built_and_described_like_the_others(name):
    cls = strategies.peer_class(name)
    described = strategies.describe(cls)
    assert (described.name, cls.name) == (name, name)
    assert described.rule.endswith(".")
    assert described.citation
    for option in described.options:
        assert option.description, option
        assert strategies.parse(f"{name}:{option.name}={option.default}")
    machine = strategies.build_peer(name, 5, 2)
    assert strategies.canonical(machine) == name
    assert machine.rng.random() == random.Random("5:peer:2").random()


@pytest.mark.parametrize("name", [*MINE, "adaptive_sync", "dasp", "balanced", *PEERS])
def test_a_class_takes_its_options_by_name(name):
    given = {"k": 2} if name in REQUIRED else {}
    made = strategies.machine_class(name)(**given)
    spec = name + REQUIRED.get(name, "")
    built = strategies.build(spec, 0) if made.kind == "central" else strategies.build_peer(spec, 0, 0)
    assert made.options == built.options
    assert vars(made).keys() == vars(built).keys()


def test_what_options_say_is_derived_from_them_however_they_are_given():
    assert strategies.strategy_class("ssp")(staleness=7).max_lead == 7


def test_the_canonical_form_of_a_machine_builds_an_equal_one():
    spec = "adaptive_gossip:scope=model,budget=0.08,form=weighted,peers=ring"
    machine = strategies.build_peer(spec, 0, 0)
    again = strategies.build_peer(strategies.canonical(machine), 0, 0)
    assert again.options == machine.options
    assert strategies.canonical(machine) == "adaptive_gossip:scope=model,budget=0.08,form=weighted,peers=ring"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gosip", ["unknown strategy 'gosip'", "'gossip'"]),
        ("adaptive_gossip:treshold=1", ["no option 'treshold'", "'threshold'"]),
        ("adaptive_gossip:period=2", ["adaptive_gossip has no option 'period'"]),
        ("gossip:period=0", ["gossip: period must be a whole number >= 1, not '0'"]),
        ("gossip:form=pul", ["one of pull, push, weighted", "'pul'"]),
        ("elastic:alpha=1", ["elastic: alpha must be a number >= 0, < 1, not '1'"]),
        ("gossip:scope=tensor,form=weighted", ["form=weighted has one weight per model", "add scope=model"]),
        ("gossip:scope=tensor,form=pull", ["form=pull asks for whole models", "add scope=model"]),
        ("adaptive_gossip:form=weighted", ["form=weighted has one weight per model", "add scope=model"]),
        ("adaptive_gossip:form=pull", ["form=pull asks for whole models", "add scope=model"]),
        ("adaptive_gossip:budget=0.001", ["budget must be >= 1 / max_interval (0.01), not 0.001"]),
        ("adaptive_elastic:budget=0.1,threshold=0", ["threshold must be > 0 and finite", "not 0"]),
        ("bsp", ["bsp trains with a server", "choose from gossip"]),
    ],
)
def test_errors_of_machines_name_the_value_the_bound_and_the_fix(spec, words):
    with pytest.raises(OptionError) as caught:
        strategies.build_peer(spec, 0, 0)
    for word in words:
        assert word in str(caught.value)


def test_a_central_engine_refuses_a_machine_of_a_node():
    for refuse in (strategies.strategy_class, lambda name: strategies.build(name, 0)):
        with pytest.raises(OptionError, match="gossip trains without a server, which this engine cannot do; choose"):
            refuse("gossip")


@pytest.mark.parametrize("spec", SPECS)
def test_the_canonical_form_builds_an_equal_strategy(spec):
    strategy = strategies.build(spec, 5)
    again = strategies.build(strategies.canonical(strategy), 5)
    assert type(again) is type(strategy)
    assert again.options == strategy.options
    assert again.rng.getstate() == strategy.rng.getstate()


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("ssp", "ssp"),
        ("ssp:staleness=3", "ssp"),
        (" ssp : staleness = inf , whole_steps=TRUE ", "ssp:staleness=inf,whole_steps=true"),
        ("fastest_k:k=4", "fastest_k:k=4"),
        ("adaptive_k:stop=none", "adaptive_k"),
        ("adaptive_k_load:loads=5/10/20", "adaptive_k_load:loads=5/10/20"),
        ("adaptive_k:test=bound,eta=1e-3,L=2,c=1,sigma2=10,s=10,error=100",) * 2,
    ],
)
def test_canonical_form(spec, canonical):
    expected = canonical.replace("1e-3", "0.001")
    assert strategies.canonical(strategies.build(spec, 0)) == expected


def test_chance_comes_from_the_seed():
    assert strategies.build("bsp", 7).rng.random() == random.Random("7:strategy").random()
    assert strategies.build("bsp", 7).rng.random() != strategies.build("bsp", 8).rng.random()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sspp", ["'sspp'", "'ssp'"]),
        ("fastestk", ["'fastestk'", "'fastest_k'"]),
        ("", ["''", "choose from", "bsp"]),
        ("ssp:stalenes=3", ["'stalenes'", "'staleness'"]),
        ("bsp:k=3", ["'k'", "no options"]),
        ("ssp:staleness=-1", ["ssp: staleness must be a number >= 0, not '-1'"]),
        ("ssp:staleness=2.5", ["whole number of clocks or inf", "2.5"]),
        ("ssp:staleness=nan", ["number", "'nan'"]),
        ("ssp:staleness=three", ["number", "'three'", ">= 0"]),
        ("ssp:staleness=none", ["number", "'none'"]),
        ("ssp:staleness", ["no value", "ssp:staleness=value"]),
        ("ssp:staleness=", ["number", "''"]),
        ("ssp:", ["nothing follows the colon"]),
        ("ssp:staleness=1,staleness=2", ["staleness is given twice"]),
        ("asp:whole_steps=2", ["true or false", "'2'"]),
        ("dssp:lower=5,upper=2", ["dssp: upper must be >= lower (5), not 2"]),
        ("dssp:upper=inf", ["whole number", "'inf'"]),
        ("fastest_k", ["fastest_k needs k, for example fastest_k:k=4"]),
        ("k_async", ["k_async needs k, for example k_async:k=4"]),
        ("fastest_k:k=0", ["fastest_k: k must be a whole number >= 1, not '0'"]),
        ("fastest_k:k=1.5", ["whole number", "'1.5'"]),
        ("adaptive_k:test=pfug", ["one of bound, pflug, trend", "'pfug'"]),
        ("adaptive_k:start=4,stop=2", ["adaptive_k: stop must be >= start (4), not 2"]),
        ("adaptive_k:test=bound,eta=0.1", ["needs L, c, sigma2, s, error"]),
        ("adaptive_k:eta=0.1", ["eta is for test=bound, not pflug"]),
        ("adaptive_k:test=bound,eta=2,L=2,c=1,sigma2=1,s=1,error=1", ["eta * c must be < 1, not 2"]),
        ("adaptive_k_load:loads=5/x", ["loads must be a whole number >= 1, not 'x'"]),
        ("adaptive_k_load:loads=10/5", ["loads must rise", "10/5"]),
        ("adaptive_k_load:loads=0/5", ["loads must be a whole number >= 1, not '0'"]),
    ],
)
def test_errors_name_the_value_the_bound_and_the_fix(spec, words):
    with pytest.raises(OptionError) as caught:
        strategies.build(spec, 0)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["fastest_k:k=5", "k_async:k=5", "adaptive_k:start=5", "adaptive_k:stop=5", "adaptive_k_load:stop=5"]
)
def test_more_workers_than_there_are_cannot_be_waited_for(spec):
    strategy = strategies.build(spec, 0)
    strategy.check(5)
    with pytest.raises(OptionError, match=r"<= the number of workers \(4\), not 5"):
        strategy.check(4)


@pytest.mark.parametrize("name", MINE)
def test_descriptions_are_complete(name):
    described = strategies.describe(strategies.strategy_class(name))
    assert described.name == name
    assert described.rule.endswith(".")
    assert described.citation
    for option in described.options:
        assert option.description, option
        assert option.type
        if option.default is not None:
            given = f"{REQUIRED[name]}," if name in REQUIRED else ":"
            assert strategies.parse(f"{name}{given}{option.name}={option.default}")
    required = [option.name for option in described.options if option.default is None]
    assert required == (["k"] if name in REQUIRED else [])


def test_a_description_has_type_default_and_bounds():
    (staleness, whole_steps, cache, refresh, patience) = strategies.describe(strategies.strategy_class("ssp")).options
    assert (staleness.type, staleness.default, staleness.bounds) == ("number", "3", ">= 0")
    assert (whole_steps.type, whole_steps.default, whole_steps.bounds) == ("true or false", "false", "")
    assert (cache.default, refresh.default, patience.default) == ("false", "inf", "0.5")


class Everything(msgspec.Struct):
    """Each kind of option there is."""

    whole: Annotated[int, Meta(ge=1, le=9)]
    share: Annotated[float, Meta(gt=0, lt=1)]
    perhaps: Annotated[float, Meta(ge=0)] | None
    flag: bool
    choice: Literal["one", "two"]
    many: tuple[float, ...]
    word: str


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("whole", "9", 9),
        ("share", "0.25", 0.25),
        ("share", "1e-3", 0.001),
        ("perhaps", "none", None),
        ("perhaps", "inf", math.inf),
        ("flag", "false", False),
        ("choice", "two", "two"),
        ("many", "1/2.5/10", (1.0, 2.5, 10.0)),
        ("word", "abc", "abc"),
    ],
)
def test_values_and_text_are_each_others_inverse(option, text, value):
    declared = next(f.type for f in msgspec.structs.fields(Everything) if f.name == option)
    assert option_values.read(text, declared, option) == value
    assert option_values.read(option_values.to_text(value), declared, option) == value


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("whole", "10", "whole must be a whole number >= 1, <= 9, not '10'"),
        ("share", "1", "share must be a number > 0, < 1, not '1'"),
        ("perhaps", "-2", "perhaps must be a number >= 0, not '-2'"),
        ("choice", "three", "choice must be one of one, two, not 'three'"),
        ("many", "1//2", "many must be a number, not ''"),
    ],
)
def test_bounds_of_each_kind(option, text, message):
    declared = next(f.type for f in msgspec.structs.fields(Everything) if f.name == option)
    with pytest.raises(OptionError) as caught:
        option_values.read(text, declared, option)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("spec", "then"),
    [
        ("bsp", "bsp"),
        ("adaptive_gossip",
         "adaptive_gossip:share_power=1,steps_power=1,warmup=20,mixed=exchanged,wire=float32"),
        ("adaptive_gossip:warmup=2,budget=0.3",
         "adaptive_gossip:warmup=2,budget=0.3,share_power=1,steps_power=1,mixed=exchanged,wire=float32"),
        ("adaptive_elastic: threshold = 0.5",
         "adaptive_elastic: threshold = 0.5,share_power=1,steps_power=1,warmup=20,wire=float32"),
    ],
)  # fmt: skip
def test_an_old_journals_strategy_has_the_defaults_of_its_time(spec: str, then: str) -> None:
    assert registry.as_then(spec, 1) == then
    assert registry.as_then(spec, DEFAULTS) == spec
    strategies.checked(then, 0, 4)


@pytest.mark.parametrize("name", [*strategies.names(), *strategies.peer_names()])
def test_former_defaults_are_of_options_and_differ_from_those_of_today(name: str) -> None:
    spec = name + REQUIRED.get(name, "")
    cls, now = strategies.parse(spec)
    _, then = strategies.parse(registry.as_then(spec, 1))
    assert all(getattr(then, option) != getattr(now, option) for option in cls.former)
