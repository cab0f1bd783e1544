"""Settings: how each is written, which source wins, and what is said about a value that cannot be used."""

import functools
import inspect
import math
import operator
import re
import runpy
import subprocess
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, get_args, get_origin

import msgspec
import pytest

import paceline
from paceline.core import values
from paceline.core.errors import OptionError, UserError
from paceline.core.settings import (
    SETTINGS,
    Every,
    LogTool,
    Patience,
    RunConfig,
    Target,
    Unset,
    chosen_log_level,
    chosen_scenario,
    require_possible,
    resolve,
)
from paceline.core.worker_count import agreed_workers, cores, require_asked_for, usual_threads, usual_workers
from paceline.engines import capabilities
from paceline.scenario import Scenario, parse
from paceline.strategies import Machine

SOURCE = Path(__file__).parents[2] / "src" / "paceline"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accuracy=0.93", Target("accuracy", 0.93, True)),
        ("accuracy>=0.9", Target("accuracy", 0.9, True)),
        ("loss=0.5", Target("loss", 0.5, False)),
        ("val_loss = 1e-3", Target("val_loss", 0.001, False)),
        ("test.Error=4", Target("test.Error", 4.0, False)),
        ("perplexity=12", Target("perplexity", 12.0, False)),
        ("loss>=2", Target("loss", 2.0, True)),
        ("accuracy<=0.1", Target("accuracy", 0.1, False)),
        ("score=-3", Target("score", -3.0, True)),
    ],
)
def test_a_target_says_which_way_is_better(text: str, expected: Target) -> None:
    assert Target.parse(text) == expected


@pytest.mark.parametrize("text", ["", "accuracy", "accuracy=", "=0.9", "accuracy=high", "loss=nan", "loss<=inf", "a<1"])
def test_a_malformed_target_is_refused_with_its_text_and_an_example(text: str) -> None:
    with pytest.raises(OptionError, match=r"accuracy=0\.93") as caught:
        Target.parse(text)
    assert repr(text) in str(caught.value)


def test_a_target_is_met_on_its_bound_and_never_by_nan() -> None:
    up, down = Target.parse("accuracy=0.9"), Target.parse("loss=0.5")
    assert [up.met(0.89), up.met(0.9), up.met(0.91)] == [False, True, True]
    assert [down.met(0.51), down.met(0.5), down.met(0.49)] == [False, True, True]
    assert not up.met(math.nan)
    assert not down.met(math.nan)


def test_a_written_target_reads_back_as_itself() -> None:
    for text in ("accuracy=0.93", "loss=0.25", "loss>=2"):
        assert Target.parse(str(Target.parse(text))) == Target.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50v", Every(50, "v")),
        ("10s", Every(10, "s")),
        ("0.1e", Every(0.1, "e")),
        (".5s", Every(0.5, "s")),
        ("1e", Every(1, "e")),
    ],
)
def test_an_interval_is_a_number_and_a_unit(text: str, expected: Every) -> None:
    assert Every.parse(text) == expected
    assert Every.parse(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "50", "v", "0v", "0.0e", "-1s", "10m", "1e3s", "infs", "10 s"])
def test_a_malformed_interval_is_refused_with_its_text_and_the_units(text: str) -> None:
    with pytest.raises(OptionError, match=r"50v \(versions\), 10s \(seconds\) or 0\.1e \(epochs\)") as caught:
        Every.parse(text)
    assert repr(text) in str(caught.value)


def test_versions_come_whole() -> None:
    with pytest.raises(OptionError, match=r"write 2v instead of '1\.5v'"):
        Every.parse("1.5v")


def test_nothing_given_means_the_defaults() -> None:
    assert resolve({}, {}, {}) == RunConfig()
    assert resolve({"workers": None, "set": None}, {"PACELINE_SEED": ""}, {}) == RunConfig()


def test_the_command_line_wins_over_variables_and_these_over_the_scenario() -> None:
    command_line = {"seed": "1"}
    environment = {"PACELINE_SEED": "2", "PACELINE_STRATEGY": "asp", "HOME": "/root"}
    scenario_run = {"seed": 3, "strategy": "ssp", "max_seconds": 30}
    config = resolve(command_line, environment, scenario_run)
    assert (config.seed, config.strategy, config.max_seconds) == (1, "asp", 30.0)


def test_options_are_merged_name_by_name() -> None:
    earlier = {"set": {"lr": 0.1, "hidden": 8, "bias": True}}
    config = resolve({"set": ["lr=0.3"]}, {"PACELINE_SET": "lr=0.2,hidden=64"}, earlier, repeats=True)
    assert config.options == {"lr": "0.3", "hidden": "64", "bias": "true"}


def test_every_setting_can_be_given_as_text() -> None:
    given = {
        "engine": "sim", "strategy": "ssp:staleness=2", "scenario": "even4", "workers": "4", "seed": "7",
        "batch_size": "16", "epochs": "0.5", "max_versions": "10", "max_seconds": "2.5", "target": "loss<=0.5",
        "evaluate_every": "5v", "on_divergence": "stop", "set": ["a=b=c"], "data_dir": "data", "journal": "j.jsonl.gz",
        "runs_dir": "out", "threads": "2", "transport": "zeromq", "respawn": "true", "checkpoint_every": "60s",
        "checkpoint_keep": "2", "resume": "old", "on_nonfinite": "stop", "start": "fresh", "worker_timeout": "5..60",
    }  # fmt: skip
    expected = RunConfig(
        engine="sim", strategy="ssp:staleness=2", scenario="even4", workers=4, seed=7, batch_size=16, epochs=0.5,
        max_versions=10, max_seconds=2.5, target=Target("loss", 0.5, False), evaluate_every=Every(5, "v"),
        on_divergence="stop", on_nonfinite="stop", options={"a": "b=c"}, data_dir=Path("data"),
        journal=Path("j.jsonl.gz"), runs_dir=Path("out"), threads=2, transport="zeromq", respawn=True,
        checkpoint_every=Every(60, "s"), checkpoint_keep=2, resume=Path("old"), start="fresh",
        worker_timeout=Patience(5, 60),
    )  # fmt: skip
    settled = resolve(given, {}, {})
    assert settled.given == tuple(sorted({"options" if name == "set" else name for name in given}))
    assert msgspec.structs.replace(settled, given=()) == expected
    variables = {"PACELINE_" + name.upper(): value for name, value in given.items() if isinstance(value, str)}
    assert msgspec.structs.replace(resolve({"set": ["a=b=c"]}, variables, {}), given=()) == expected


def test_values_of_their_own_type_are_taken_as_they_are() -> None:
    target, every = Target("accuracy", 0.9, True), Every(3, "s")
    config = resolve(
        {"target": target, "evaluate_every": every, "data_dir": Path("d"), "epochs": 2, "options": {"lr": 0.1}}, {}, {}
    )
    assert (config.target, config.evaluate_every, config.data_dir) == (target, every, Path("d"))
    assert config.options == {"lr": "0.1"}
    assert config.epochs == 2
    assert isinstance(config.epochs, int)


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("workers", "0", "a whole number >= 1"),
        ("workers", "many", "a whole number >= 1"),
        ("workers", "2.5", "a whole number >= 1"),
        ("workers", True, "a whole number >= 1"),
        ("seed", "-1", "a whole number >= 0"),
        ("batch_size", "0", "a whole number >= 1"),
        ("epochs", "0", "a finite number > 0"),
        ("epochs", "inf", "a finite number > 0"),
        ("max_versions", "-5", "a whole number >= 1"),
        ("max_seconds", "nan", "a finite number > 0"),
        ("max_seconds", "soon", "a finite number > 0"),
        ("on_divergence", "panic", "one of bsp, stop, warn"),
        ("engine", "slurm", "one of hosts, local, ray, sim"),
        ("threads", "0", "a whole number >= 1"),
        ("transport", "pigeon", "one of shm, zeromq"),
        ("respawn", "often", "true or false"),
        ("checkpoint_every", "0.5e", "in versions or seconds"),
        ("checkpoint_keep", "0", "a whole number >= 1"),
        ("on_nonfinite", "cry", "one of skip, stop"),
        ("strategy", " ", "a name"),
        ("set", ["lr"], "name=value"),
        ("set", ["=1"], "name=value"),
    ],
)
def test_a_bad_value_names_its_source_the_value_and_the_bound(name: str, value: object, bound: str) -> None:
    text = value[0] if isinstance(value, list) else value
    flag = "--" + name.replace("_", "-")
    with pytest.raises(OptionError) as caught:
        resolve({name: value}, {}, {})
    assert str(caught.value).startswith(f"{flag}: must be {bound}")
    assert repr(text) in str(caught.value)
    with pytest.raises(OptionError, match=rf"^\[run\] {name}: must be"):
        resolve({}, {}, {name: value}, repeats=True)
    if isinstance(text, str):
        with pytest.raises(OptionError, match=f"^PACELINE_{name.upper()}: must be"):
            resolve({}, {"PACELINE_" + name.upper(): text}, {})


def test_a_bad_value_is_reported_even_where_a_better_source_wins() -> None:
    with pytest.raises(OptionError, match=r"^PACELINE_WORKERS"):
        resolve({"workers": "4"}, {"PACELINE_WORKERS": "none"}, {})


def test_unknown_names_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"unknown setting 'stratgy'; did you mean 'strategy'\?"):
        resolve({"stratgy": "bsp"}, {}, {})
    with pytest.raises(OptionError, match=r"\[run\] table 'max_second'; did you mean 'max_seconds'\?"):
        resolve({}, {}, {"max_second": 3})
    with pytest.raises(OptionError, match=r"PACELINE_STRATGY; did you mean PACELINE_STRATEGY\?"):
        resolve({}, {"PACELINE_STRATGY": "bsp"}, {})
    with pytest.raises(OptionError, match=r"choose from .*on_divergence"):
        resolve({"xyzzy": "bsp"}, {}, {})


@pytest.mark.parametrize("name", ["scenario", "journal", "runs_dir", "resume", "data_dir", "set", "threads"])
def test_a_scenario_names_no_place_and_nothing_of_the_machine(name: str) -> None:
    with pytest.raises(
        OptionError, match=rf"^\[run\] {name}: .*; give --{name.replace('_', '-')}, PACELINE_{name.upper()} or"
    ):
        resolve({}, {}, {name: "4"})
    assert resolve({}, {}, {name: "a=4" if name == "set" else "4"}, repeats=True).given, "an earlier run's may"


@pytest.mark.parametrize(
    "strategy",
    [
        "mine.py:Mine",
        "mine:Mine",
        "os:path",
        " a.b : C ",
        "mine:Mine:k=3",
        "mine.py",
        "./mine.py:Mine:k=3",
        "a.b",
        "m:M:",
    ],
)
def test_a_scenario_names_no_code(strategy: str) -> None:
    with pytest.raises(OptionError, match=r"^\[run\] strategy: a scenario file names no code, and .* give --strategy"):
        resolve({}, {}, {"strategy": strategy})
    assert resolve({"strategy": strategy}, {}, {}).strategy == strategy


@pytest.mark.parametrize(
    "strategy", ["bsp", "ssp:staleness=3", " ssp : staleness = 3, ", "adaptive_k_load:loads=1/2/4", "bsp:"]
)
def test_a_scenario_names_a_registered_strategy(strategy: str) -> None:
    assert resolve({}, {}, {"strategy": strategy}).strategy == strategy


def crowd(count: int, joining: int = 0) -> Scenario:
    text = f"[compute]\nseconds_per_sample = 1\n[[workers]]\ncount = {count}\n"
    return parse(text + (f"[[events]]\nkind = 'join'\nat = 1\ncount = {joining}\n" if joining else ""), "big", Path())


def test_a_large_scenario_is_run_only_if_its_number_is_given() -> None:
    require_asked_for(crowd(100), None)
    require_asked_for(crowd(60, 40), None)
    require_asked_for(crowd(5000), 5000)
    require_asked_for(crowd(5000, 5000), 5000)
    with pytest.raises(OptionError, match="'big' has 101 workers, and .* at most 100 .* give --workers 101"):
        require_asked_for(crowd(101), None)
    with pytest.raises(OptionError, match="has 1 workers and 100 that join, .*; let fewer join"):
        require_asked_for(crowd(1, 100), 1)


def test_variables_of_other_programs_are_left_alone() -> None:
    assert resolve({}, {"PACELINE_SOAK": "1", "PACELINE_CI_NO_SKIPS": "1", "PACELINER": "x"}, {}) == RunConfig()


def test_the_caller_says_how_its_settings_are_spelled() -> None:
    with pytest.raises(OptionError, match=r"^batch_size: must be"):
        resolve({"batch_size": 0}, {}, {}, spell=lambda setting: setting.name)


def test_the_scenario_is_known_before_its_own_settings() -> None:
    assert chosen_scenario({}, {}) is None
    assert chosen_scenario({"scenario": None}, {"PACELINE_SCENARIO": "even4"}) == "even4"
    assert chosen_scenario({"scenario": "wan6"}, {"PACELINE_SCENARIO": "even4"}) == "wan6"


def test_log_levels() -> None:
    assert chosen_log_level(None, {}) == "warning"
    assert chosen_log_level("INFO", {"PACELINE_LOG_LEVEL": "debug"}) == "info"
    assert chosen_log_level(None, {"PACELINE_LOG_LEVEL": "debug"}) == "debug"
    with pytest.raises(OptionError, match=r"^PACELINE_LOG_LEVEL: must be one of debug, error, info, warning"):
        chosen_log_level(None, {"PACELINE_LOG_LEVEL": "loud"})


def test_the_scenario_decides_how_many_workers_there_are() -> None:
    assert agreed_workers(None, 8, "uneven8") == 8
    assert agreed_workers(8, 8, "uneven8") == 8
    with pytest.raises(UserError, match=r"scenario uneven8 has 8 workers, not 3; leave --workers out, or give"):
        agreed_workers(3, 8, "uneven8")
    with pytest.raises(UserError, match=r"uneven8, taken because none was given, has 8 workers, not 3"):
        agreed_workers(3, 8, "uneven8", by_default=True)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("5..60", Patience(5, 60)), ("5", Patience(5, 600)), (5, Patience(5, 600)), (2.5, Patience(2.5, 600)),
        ("900", Patience(900, 900)), ("off", None), ("0", None), (0, None), ("7..7", Patience(7, 7)),
    ],
)  # fmt: skip
def test_how_long_a_worker_may_be_silent(given: object, found: Patience | None) -> None:
    assert resolve({"worker_timeout": given}, {}, {}).worker_timeout == found


@pytest.mark.parametrize("given", ["soon", "-1", "60..5", "5..", "5..1e999", "nan", True])
def test_a_silence_that_cannot_be_is_refused(given: object) -> None:
    with pytest.raises(OptionError, match="^--worker-timeout: must be"):
        resolve({"worker_timeout": given}, {}, {})


def test_evaluation_can_be_off_but_not_where_a_target_needs_it() -> None:
    assert resolve({"evaluate_every": "off"}, {}, {}).evaluate_every is None
    contradiction = resolve({"evaluate_every": "off", "target": "loss=1"}, {}, {})
    with pytest.raises(OptionError, match=r"loss<=1 is never reached with --evaluate-every off"):
        require_possible(contradiction, capabilities(contradiction.engine))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("resume", "runs/old"),
        ("respawn", True),
        ("start", "fresh"),
        ("transport", "zeromq"),
    ],
)
def test_what_only_real_processes_have_is_refused_by_the_simulator(name: str, value: object) -> None:
    require_possible(resolve({name: value}, {}, {}), capabilities("local"))
    flag = "--" + name.replace("_", "-")
    with pytest.raises(OptionError, match=rf"^{flag} is not supported by the sim engine; .*--engine local"):
        require_possible(resolve({name: value, "engine": "sim"}, {}, {}), capabilities("sim"))


def test_the_machine_says_how_many_workers_and_threads_are_usual() -> None:
    assert usual_workers(devices=3) == 3
    assert 2 <= usual_workers(devices=0) <= 4
    assert usual_threads(RunConfig(), 10_000, capabilities("local")) == 1
    assert usual_threads(RunConfig(), 1, capabilities("local")) == cores()
    assert usual_threads(RunConfig(engine="sim"), 1, capabilities("sim")) == 1
    assert usual_threads(RunConfig(engine="sim", threads=3), 1, capabilities("sim")) == 3


# --- one declaration, many faces ----------------------------------------------------------------------------------

WIDER = {  # what `launch` takes beside the declared type
    "scenario": Scenario | Path,
    "strategy": Machine | type[Machine],
    "target": str,
    "evaluate_every": str,
    "checkpoint_every": str,
    "worker_timeout": str | float,
    "data_dir": str,
    "token_file": str,
    "working_dir": str,
    "resume": str,
    "journal": str,
    "runs_dir": str,
}


def plain(declared: object) -> object:
    """The type without bounds and words."""
    parts = get_args(declared)
    if get_origin(declared) is Annotated:
        return plain(parts[0])
    if isinstance(declared, types.UnionType) or get_origin(declared) is typing.Union:
        return functools.reduce(operator.or_, map(plain, parts))  # type: ignore[arg-type]
    return declared


def test_launch_has_every_setting_with_its_type_and_its_default() -> None:
    hints = typing.get_type_hints(paceline.launch)
    parameters = inspect.signature(paceline.launch).parameters
    beside = {"train", "config", "progress", "sink", "optimizers"}
    assert set(parameters) == beside | set(SETTINGS)
    for name, setting in SETTINGS.items():
        parameter = parameters[name]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert isinstance(parameter.default, Unset)
        assert parameter.default.default == setting.default, name
        if name == "options":
            assert hints[name] == Mapping[str, str | float]
        elif name == "log":
            assert hints[name] == Sequence[LogTool]
        else:
            declared = plain(setting.declared)
            assert hints[name] == (declared | WIDER[name] if name in WIDER else declared), name  # type: ignore[operator]


def test_help_of_launch_shows_the_defaults() -> None:
    shown = str(inspect.signature(paceline.launch))
    assert "workers: int | None = None" in shown
    assert "checkpoint_keep: int = 3" in shown


def test_every_setting_says_what_it_is() -> None:
    for setting in SETTINGS.values():
        assert setting.about.text.endswith("."), setting.name
        assert setting.about.metavar or setting.default is False, setting.name
        assert len(setting.about.text) <= 100, setting.name


def test_the_reference_page_is_what_the_declaration_says() -> None:
    script = Path(__file__).parents[2] / "docs" / "reference" / "write_settings.py"
    written = runpy.run_path(str(script))
    assert written["PAGE"].read_text(encoding="utf-8") == written["page"](), f"run python {script.name}"


def test_every_variable_and_every_key_of_run_reaches_its_setting() -> None:
    examples = {
        "engine": "sim", "target": "loss=1", "evaluate_every": "7v", "checkpoint_every": "7v", "options": "a=b",
        "on_divergence": "stop", "on_nonfinite": "stop", "transport": "zeromq", "start": "fresh", "respawn": "yes",
        "scale_lr": "sqrt", "strategy": "asp", "listen": "lab1:7000", "trusted_network": "yes", "spread": "yes",
        "worker_resources": "CPU=2", "server_resources": "GPU=1", "shard_resources": "CPU=3", "address": "auto",
        "log": "csv/wandb",
    }  # fmt: skip
    for setting in SETTINGS.values():
        value = examples.get(setting.name, "7")
        assert setting.name in resolve({}, {setting.variable: value}, {}).given
        if not setting.about.not_in_scenario:
            assert setting.name in resolve({}, {}, {setting.written: value}).given


# --- values and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("dsap", "dasp"),  # two letters swapped
        ("stratgey", "strategy"),
        ("bps", "bsp"),
        ("dsp", "dssp"),  # one that begins alike before one that does not
        ("SSP", "ssp"),
        ("max_second", "max_seconds"),
        ("xyzzy", None),
        ("", None),
        ("s" * 100_000, None),
    ],
)
def test_the_nearest_name_is_found_by_the_slips_of_a_pen(written: str, meant: str | None) -> None:
    assert values.closest(written, ["bsp", "asp", "ssp", "dssp", "dasp", "strategy", "max_seconds"]) == meant


def test_a_suggestion_lists_the_names_where_none_is_near() -> None:
    assert values.nearest("xyzzy", ["bsp", "asp"]) == "choose from bsp, asp"
    assert values.nearest("xyzzy", []) == "there are none"
    assert values.nearest("xyzzy", [f"name{n}" for n in range(50)]).endswith("name39 and 10 more")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("9" * 5000, "must be a whole number >= 0, not '999"),
        (16**5000, "not a int too large to print"),
        (10**400, "of at most 64 bits"),
        (2**63, "of at most 64 bits"),
        ([[]], "must be a whole number >= 0, not"),
    ],
    ids=["digits", "not even printed", "beyond a float", "65 bits", "a list"],
)
def test_numbers_that_no_computer_holds_are_refused_in_a_short_line(value: object, says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)) as caught:
        resolve({"seed": value}, {}, {})
    assert len(str(caught.value)) < 300
    assert resolve({"seed": 2**63 - 1}, {}, {}).seed == 2**63 - 1


@pytest.mark.parametrize("value", ["a\0b", "\udcff", "~no_such_user_anywhere/x"])
def test_a_path_that_cannot_be_is_refused(value: str) -> None:
    with pytest.raises(OptionError, match="^--journal: must be a path"):
        resolve({"journal": value}, {}, {})


def test_no_other_module_reads_the_variables() -> None:
    readers = [path for path in SOURCE.rglob("*.py") if "PACELINE_" in path.read_text() and path.name != "settings.py"]
    assert readers == []


def test_settings_need_no_torch() -> None:
    code = "import sys, paceline.core.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_silence_of_a_huge_number_is_refused() -> None:
    with pytest.raises(OptionError, match="^--worker-timeout: must be seconds"):
        resolve({"worker_timeout": 10**5000}, {}, {})


def test_every_server_needs_a_port_after_the_address() -> None:
    hosts = capabilities("hosts")
    require_possible(RunConfig(engine="hosts", listen="lab1:65532", servers=2), hosts)
    require_possible(RunConfig(engine="hosts", listen="lab1:65534"), hosts)
    with pytest.raises(OptionError, match=r"--listen lab1:65533: with --servers 2 the 3 ports .* one below 65533"):
        require_possible(RunConfig(engine="hosts", listen="lab1:65533", servers=2), hosts)
