"""Scenario files: what they mean, and what is said about a wrong one."""

import json
import tomllib
from pathlib import Path

import pytest

from paceline import scenario as scenarios
from paceline.cli.inspect_commands import scenario as show
from paceline.core.errors import ScenarioError
from paceline.core.scenario.faults import KINDS
from paceline.scenario import Scenario, as_data, describe, from_data, load, parse

COST = "[compute]\nseconds_per_sample = 0.01\n"
FOUR = COST + "[[workers]]\ncount = 4\n"


def read(text: str, folder: Path = Path()) -> Scenario:
    return parse(text, "mine.toml", folder)


def event(**keys: object) -> str:
    return FOUR + "[[events]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


def test_design_example_means_what_it_says() -> None:
    made = read("""
        seed = 7
        [compute]
        seconds_per_sample = 0.002
        jitter = "lognormal:0.1"
        [network]
        latency_ms = 0.5
        bandwidth_mbps = 1000
        jitter = "none"
        [[workers]]
        count = 4
        speed = 1.0
        [[workers]]
        count = 2
        speed = 0.25
        latency_ms = 30
        bandwidth_mbps = 100
        jitter = "exponential"
        [[events]]
        kind = "slow"
        worker = 3
        at = 10.0
        for = 20.0
        factor = 4.0
        [run]
        strategy = "dasp"
    """)
    assert (made.seed, made.count, made.name) == (7, 6, "mine.toml")
    assert (made.compute.seconds_per_sample, made.compute.jitter.sigma) == (0.002, 0.1)
    assert (made.network.latency_ms, made.network.bandwidth_mbps, made.network.jitter.kind) == (0.5, 1000, "none")
    assert [worker.speed for worker in made.workers] == [1, 1, 1, 1, 0.25, 0.25]
    assert [worker.jitter.kind for worker in made.workers] == ["lognormal"] * 4 + ["exponential"] * 2
    assert (made.workers[0].latency_ms, made.workers[5].latency_ms, made.workers[5].bandwidth_mbps) == (None, 30, 100)
    (slow,) = made.events
    assert (slow.kind, slow.worker, slow.workers, slow.at, slow.for_s, slow.factor) == ("slow", 3, (3,), 10, 20, 4)
    assert slow.until == 30
    assert made.run == {"strategy": "dasp"}


def test_workers_of_an_entry_share_one_spec() -> None:
    workers = read(COST + "[[workers]]\ncount = 1000\n").workers
    assert len({id(worker) for worker in workers}) == 1


def test_events_are_sorted_and_newcomers_get_the_next_ids() -> None:
    made = read(
        FOUR
        + """
        [[events]]
        kind = "crash"
        worker = 6
        at = 9
        [[events]]
        kind = "join"
        at = 5
        [[events]]
        kind = "join"
        at = 2
        count = 2
        speed = 0.5
        """
    )
    assert [(e.kind, e.workers) for e in made.events] == [("join", (4, 5)), ("join", (6,)), ("crash", (6,))]
    assert made.events[0].speed == 0.5


def test_events_of_one_second_keep_the_order_of_the_file() -> None:
    text = "".join(f'[[events]]\nkind = "{kind}"\nworker = 1\nat = 3\n' for kind in ("leave", "rejoin", "crash"))
    assert [e.kind for e in read(FOUR + text).events] == ["leave", "rejoin", "crash"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed = 1\n[[workers]]\ncount = 2\n", ["no [compute] table", "cost model", "seconds_per_sample = 0.002"]),
        ("[compute]\n[[workers]]\ncount = 2\n", ["[compute] needs seconds_per_sample"]),
        ("compute = 3\n", ["[compute]", "table", "3"]),
        ("[compute]\nseconds_per_sample = 0\n", ["seconds_per_sample must be > 0, not 0"]),
        ("[compute]\nseconds_per_sample = nan\n", ["finite number, not nan"]),
        ("[compute]\nseconds_per_sample = true\n", ["finite number, not True"]),
        ("[compute]\nseconds_per_sampel = 1\n", ["no key 'seconds_per_sampel'", "did you mean 'seconds_per_sample'?"]),
        (COST, ["has no workers", "[[workers]]"]),
        (COST + "workers = 3\n", ["[compute] has no key 'workers'"]),
        ("workers = 3\n" + COST, ["workers must be a list of tables, not 3"]),
        (COST + "[[workers]]\ncount = 0\n", ["[[workers]] 1 count must be from 1", "not 0"]),
        (COST + "[[workers]]\ncount = 1.5\n", ["count must be a whole number, not 1.5"]),
        (COST + "[[workers]]\ncount = 99000000\n", ["count must be from 1 to 10000000, not 99000000"]),
        (COST + "[[workers]]\n[[workers]]\nspeed = -1\n", ["[[workers]] 2 speed must be > 0, not -1"]),
        (COST + '[[workers]]\nspeed = "fast"\n', ["[[workers]] 1", "not 'fast'", "trace:FILE:ROW:COLUMN"]),
        (COST + '[[workers]]\nspeed = "trace:x.csv"\n', ["trace:FILE:ROW:COLUMN"]),
        (COST + "[[workers]]\nspede = 1\n", ["'spede'", "did you mean 'speed'?"]),
        (COST + "[[workers]]\nlatency_ms = -1\n", ["latency_ms must be >= 0, not -1", "milliseconds"]),
        (COST + "[[workers]]\nbandwidth_mbps = 0\n", ["bandwidth_mbps must be > 0, not 0"]),
        ("[network]\nlatency_ms = -0.5\n" + FOUR, ["[network] latency_ms must be >= 0, not -0.5"]),
        ("[network]\nlatency = 1\n" + FOUR, ["[network]", "did you mean 'latency_ms'?"]),
        ("sede = 1\n" + FOUR, ["has no key 'sede'", "did you mean 'seed'?"]),
        ("seed = -1\n" + FOUR, ["seed must be from 0", "not -1"]),
        ("seed = 1\nseed = 2\n", ["not valid TOML", "line 2"]),
        ("[compute\n", ["not valid TOML", "line 1"]),
        ("events = [1]\n" + FOUR, ["[[events]] 1", "not 1"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_fix(text: str, parts: list[str]) -> None:
    with pytest.raises(ScenarioError) as refused:
        read(text)
    for part in ["mine.toml", *parts]:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("jitter", "parts"),
    [
        ("lognormal", ["needs 1 number after the colon", "lognormal:SIGMA"]),
        ("lognormal:x", ["needs 1 number"]),
        ("lognormal:-0.1", ["sigma must be >= 0", "not -0.1"]),
        ("lognormal:11", ["<= 10, not 11"]),
        ("lognormal:inf", ["needs 1 number"]),
        ("shifted_exponential:1", ["needs 2 numbers"]),
        ("shifted_exponential:2,1", ["MIN must be >= 0 and < MEAN, not 2 and 1"]),
        ("exponential:3", ["'exponential:3' is not a jitter", "write exponential"]),
        ("trace:", ["write trace:FILE"]),
        ("log_normal:0.1", ["did you mean 'lognormal'?"]),
        (3, ["jitter must be a string, not 3", "shifted_exponential:MIN,MEAN"]),
    ],
)
def test_a_wrong_jitter_is_refused_with_its_fix(jitter: object, parts: list[str]) -> None:
    with pytest.raises(ScenarioError) as refused:
        read(f"[compute]\nseconds_per_sample = 1\njitter = {json.dumps(jitter)}\n[[workers]]\n")
    for part in ["[compute]", *parts]:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (event(at=1), ["[[events]] 1 needs kind", "slow, slow_link, pause"]),
        (event(kind="slo", at=1), ["not 'slo'", "did you mean 'slow'?"]),
        (event(kind="slow", worker=1, at=1, factor=2), ["(slow) needs for", "seconds it lasts"]),
        (event(kind="slow", worker=1, at=1, **{"for": 3}), ["needs factor"]),
        (event(kind="slow", worker=1, at=1, factor=0, **{"for": 3}), ["factor must be > 0, not 0"]),
        (event(kind="slow", worker=1, at=1, factor=2, **{"for": 0}), ["for must be > 0, not 0"]),
        (event(kind="slow", at=1, factor=2, **{"for": 3}), ["(slow) needs worker"]),
        (event(kind="pause", worker=1, at=1, factor=2, **{"for": 3}), ["(pause) has no key 'factor'"]),
        (event(kind="slow_link", worker=1, at=1, **{"for": 3}), ["(slow_link) needs factor", "a message take 4 times"]),
        (event(kind="slow_link", worker=1, at=1, factor=2), ["(slow_link) needs for"]),
        (event(kind="slow_link", worker=1, at=1, factor=-4, **{"for": 3}), ["factor must be > 0, not -4"]),
        (event(kind="slow_link", worker=9, at=1, factor=4, **{"for": 3}), ["names worker 9"]),
        (event(kind="crash", worker=1), ["(crash) needs at"]),
        (event(kind="crash", worker=1, at=-2), ["at must be >= 0, not -2"]),
        (event(kind="crash", worker=4, at=1), ["names worker 4", "ids end at 3", "ids start at 0"]),
        (event(kind="crash", worker=-1, at=1), ["worker must be from 0", "not -1"]),
        (event(kind="crash", worker=1, workers=[2], at=1), ["both worker and workers"]),
        (
            event(kind="crash", workers=2, at=1),
            ["(crash) workers must be a list of ids, not 2; list ids of workers, such as workers = [0, 1]"],
        ),
        (event(kind="partition", workers=[], at=1, **{"for": 3}), ["at least one, not []"]),
        (event(kind="partition", workers=[1, 1], at=1, **{"for": 3}), ["distinct", "[1, 1]"]),
        (event(kind="partition", workers=[1.5], at=1, **{"for": 3}), ["whole number, not 1.5"]),
        (event(kind="partition", workers=[9], at=1, **{"for": 3}), ["names worker 9"]),
        (event(kind="rejoin", worker=1, at=1), ["worker 1 has not gone by 1 s"]),
        (event(kind="join", at=1, count=0), ["count must be from 1", "not 0"]),
        (event(kind="join", at=1, speed=-1), ["speed must be > 0, not -1"]),
        (event(kind="join", at=1, worker=2), ["(join) has no key 'worker'"]),
        (event(kind="duplicate", at=1, share=1.5), ["share must be >= 0 and <= 1, not 1.5"]),
        (event(kind="reorder", at=1), ["(reorder) needs share"]),
        (event(kind="server_crash", at=1, share=0.5), ["(server_crash) has no key 'share'"]),
        (
            event(kind="leave", worker=1, at=1) + '[[events]]\nkind = "crash"\nworker = 1\nat = 2\n',
            ["[[events]] 2 (crash) worker 1 is gone at 2 s (leave at 1 s)", "rejoin before"],
        ),
        (
            event(kind="slow", worker=4, at=1, factor=2, **{"for": 1}) + '[[events]]\nkind = "join"\nat = 2\n',
            ["[[events]] 1 (slow) names worker 4, but at 1 s ids end at 3"],
        ),
    ],
)
def test_an_impossible_event_is_refused_with_its_fix(text: str, parts: list[str]) -> None:
    with pytest.raises(ScenarioError) as refused:
        read(text)
    for part in ["mine.toml: [[events]]", *parts]:
        assert part in str(refused.value)


ALL_KINDS = (
    FOUR
    + """
    [network]
    latency_ms = 5
    [[events]]
    kind = "slow"
    workers = [0, 2]
    at = 0
    for = 1
    factor = 2
    [[events]]
    kind = "slow_link"
    workers = [1, 3]
    at = 1
    for = 2
    factor = 4
    [[events]]
    kind = "slow_link"
    at = 1
    for = 2
    factor = 8
    [[events]]
    kind = "pause"
    worker = 0
    at = 1.5
    for = 1
    [[events]]
    kind = "crash"
    worker = 1
    at = 2
    [[events]]
    kind = "rejoin"
    worker = 1
    at = 3
    [[events]]
    kind = "leave"
    worker = 1
    at = 4
    [[events]]
    kind = "join"
    at = 5
    count = 2
    speed = 0.5
    [[events]]
    kind = "partition"
    workers = [2, 3]
    at = 6
    for = 2
    [[events]]
    kind = "server_crash"
    at = 7
    [[events]]
    kind = "duplicate"
    at = 8
    share = 0.25
    [[events]]
    kind = "reorder"
    at = 9
    for = 1
    share = 0.1
    workers = [0, 1]
    """
)


@pytest.mark.parametrize(
    ("network", "workers", "struck", "fine"),
    [
        ("", "count = 2", "worker = 0\n", False),
        ("", "count = 2", "", False),
        ("latency_ms = 1", "count = 2", "worker = 0\n", True),
        ("latency_ms = 1", "count = 2", "", True),
        ("latency_ms = 1", "count = 2\nlatency_ms = 0", "worker = 0\n", False),
        ("bandwidth_mbps = 1", "count = 2", "worker = 1\n", True),
        ("bandwidth_mbps = 1", "count = 2", "", True),
        ("", "count = 2\nbandwidth_mbps = 5", "worker = 1\n", True),
        ("", "count = 2\nbandwidth_mbps = 5", "", False),
        ("", "count = 2\nlatency_ms = 5", "workers = [0, 1]\n", True),
    ],
)
def test_a_link_that_takes_no_time_cannot_be_slow(network: str, workers: str, struck: str, fine: bool) -> None:
    text = f"""
[compute]
seconds_per_sample = 1
[network]
{network}
[[workers]]
{workers}
[[events]]
kind = "slow_link"
at = 2
for = 3
factor = 4
{struck}"""
    if fine:
        assert read(text).events[0].factor == 4
        return
    with pytest.raises(
        ScenarioError, match=r"slow_link\) at 2 s slows nothing down: .* no time; give latency_ms or band"
    ):
        read(text)


def test_every_kind_of_event_is_described_and_survives_the_journal() -> None:
    made = read(ALL_KINDS)
    assert {e.kind for e in made.events} == set(KINDS)
    assert from_data(json.loads(json.dumps(as_data(made))), Path()) == made
    words = describe(made)
    for part in [
        "at 0 s, workers 0, 2: 2 times slower for 1 s",
        "at 1 s, workers 1, 3: link 4 times slower for 2 s",
        "at 1 s, the server's line 8 times slower for 2 s",
        "at 1.5 s, worker 0: paused for 1 s",
        "at 5 s, workers 4-5: joined at speed 0.5",
        "at 6 s, workers 2-3: cut off from the rest for 2 s",
        "at 7 s, the server crashes",
        "at 8 s, 25% of messages arrive twice",
    ]:
        assert part in words


def test_built_ins_are_complete() -> None:
    assert scenarios.builtin_names() == ["even4", "interference8", "mixed_gpus12", "uneven8", "wan6"]
    for name in scenarios.builtin_names():
        made = load(name)
        assert name.endswith(str(made.count))
        assert scenarios.builtin_text(name).startswith("# ")
        assert from_data(json.loads(json.dumps(as_data(made))), Path()) == made
    assert [worker.speed for worker in load("uneven8").workers] == [1.0] * 4 + [0.5] * 2 + [0.25] * 2
    assert any(e.kind == "slow" for e in load("interference8").events)
    assert load("wan6").workers[2].bandwidth_mbps == 172


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("uneven9", ["no scenario 'uneven9'", "neither a file nor built in", "did you mean 'uneven8'?"]),
        (".", ["cannot read scenario", "TOML file"]),
    ],
)
def test_an_unknown_target_is_refused(target: str, parts: list[str]) -> None:
    with pytest.raises(ScenarioError) as refused:
        load(target)
    for part in parts:
        assert part in str(refused.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="not UTF-8 text"):
        load(tmp_path / "x.toml")


def test_describe_says_what_waiting_for_the_slowest_costs() -> None:
    words = describe(load("uneven8"))
    assert "workers 6-7: speed 0.25, 125 samples/s" in words
    assert "at most 2,750 samples/s" in words
    assert "slowest 1,000, 36% of that" in words
    assert "all are equally fast" in describe(load("even4"))


def test_describe_stays_short_for_many_different_workers() -> None:
    many = "".join(f"[[workers]]\nspeed = {1 + i / 100}\n" for i in range(50))
    assert "and 30 more groups of workers" in describe(read(COST + many))


def test_show_prints_a_built_in_that_can_be_saved_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show("interference8")
    printed = capsys.readouterr().out
    assert tomllib.loads(printed) == tomllib.loads(scenarios.builtin_text("interference8"))
    (tmp_path / "mine.toml").write_text(printed)
    show(str(tmp_path / "mine.toml"))
    words = capsys.readouterr().out
    assert words.startswith("mine: 8 workers")
    assert words.removeprefix("mine") in "".join(f"{line.removeprefix('# ')}\n" for line in printed.splitlines())


def test_show_checks_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show("interference8", check=True)
    assert capsys.readouterr().out == "interference8: valid, 8 workers, 6 events\n"
    (tmp_path / "bad.toml").write_text("seed = 1\n")
    with pytest.raises(ScenarioError, match=r"bad\.toml: has no \[compute\] table"):
        show(str(tmp_path / "bad.toml"), check=True)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"a = {DEEP}", "nested too deeply"),
        ("a." * 50_000 + "a = 1\n", "nested too deeply"),
        (f"seed = {'9' * 5000}\n", "not valid TOML"),
        (f"seed = 0x{'f' * 5000}\n{FOUR}", "seed must be from 0 to 9223372036854775807"),
        (f"{FOUR}speed = 0x{'f' * 5000}\n", "speed must be a finite number"),
        (f"{FOUR}[[events]]\nkind = 'join'\nat = 1\ncount = 10000000\n", "10000000 newcomers; at most 100000 may join"),
    ],
    ids=["brackets", "dots", "digits", "hex digits", "no float", "newcomers"],
)
def test_what_no_computer_holds_is_refused_in_a_short_line(text: str, says: str) -> None:
    with pytest.raises(ScenarioError, match=says) as caught:
        read(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b", "x" * 300, "/"])
def test_a_path_that_holds_no_scenario_is_refused(path: str) -> None:
    with pytest.raises(ScenarioError):
        load(path)


def test_the_documented_example_and_error_are_real() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "scenarios.md").read_text(encoding="utf-8")
    example = page.split("```toml\n")[1].split("```")[0]
    made = read(example)
    assert (made.count, made.events[-1].workers, made.run["strategy"]) == (7, (7, 8), "dasp")
    with pytest.raises(ScenarioError) as refused:
        read(event(kind="slow", worker=1, at=1, factor=0, **{"for": 3}))
    assert str(refused.value) in page
    assert all(f"| `{name}` |" in page for name in [*KINDS, *scenarios.builtin_names()])
