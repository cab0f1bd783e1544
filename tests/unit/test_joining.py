"""Machines that join: addresses, tokens, what is compared, and the listener, without a worker."""

import contextlib
import io
import os
import select
import socket
import stat
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from hosts import free_ports

from paceline.cli import main
from paceline.cli.app import run_app
from paceline.cli.join_command import from_environment, rank_of
from paceline.core.errors import OptionError, PeerError
from paceline.core.settings import RunConfig, host_and_port, require_possible
from paceline.engines import capabilities
from paceline.engines.hosts import agent, join_listener, tokens
from paceline.engines.hosts import messages as m
from paceline.engines.hosts.join_listener import UNREAD_BYTES, JoinListener, Requirements
from paceline.engines.hosts.serving import MOST_SPARE, HostLauncher, command_to_join
from paceline.engines.hosts.strategy_source import StrategySource, digest_of_file, file_here, strategy_source
from paceline.engines.local import control
from paceline.engines.local.children import ProcessPlace
from paceline.engines.local.output import MOST_WARNINGS, WARNING_LETTERS, Console
from paceline.engines.local.server_links import Member, ServerLinks
from paceline.engines.local.workload import Workload
from paceline.shards.messages import BETWEEN
from paceline.transport import zeromq
from paceline.transport.gatekeeper import LOOK_S
from paceline.transport.join_token import new_token, read_token
from paceline.transport.messages import More
from paceline.transport.refusals import LOG_BURST, RefusalLog
from paceline.transport.security import Security
from paceline.transport.shm import Channel

ASKED = m.JoinAsked(
    format=m.FORMAT, wire=2, workload="train.py (12)", host="lab1", kernel="", versions={"torch": "2.13.0"}
)
REQUIRED = Requirements(2, "train.py (12)", {"torch": "2.13.0"})


def test_a_shard_needs_no_script_and_a_run_that_has_shards_elsewhere():
    shard = msgspec.structs.replace(ASKED, workload="", shard=True)
    assert "see --remote-shards" in REQUIRED.refusal(shard)
    wanted = msgspec.structs.replace(REQUIRED, shards=True)
    assert wanted.refusal(shard) is None
    assert "same version of paceline" in wanted.refusal(msgspec.structs.replace(shard, wire=1))
    assert "it would run" in wanted.refusal(msgspec.structs.replace(shard, shard=False))


def test_a_machine_knows_the_server_by_another_address_and_shards_elsewhere_by_their_own():
    with contextlib.closing(joining_machine(address="lab0:7000")) as machine:
        given = ["tcp://0.0.0.0:7001", "tcp://0.0.0.0:7002", "tcp://10.0.0.5:40123"]
        expected = ["tcp://lab0:7001", "tcp://lab0:7002", "tcp://10.0.0.5:40123"]
        assert machine._as_seen_here(BETWEEN.join(given)) == BETWEEN.join(expected)


def test_a_shard_gets_what_is_its_machines_there():
    role = control.ShardRole(1, 2, 1, "/theirs", listens=True, server="tcp://0.0.0.0:7003", token="t")
    with contextlib.closing(joining_machine(address="127.0.0.1:7000", threads=3, shard=True)) as machine:
        found = control.for_child(machine._made_local(control.encode(role)))
    assert (found.server, found.token, found.threads) == ("tcp://127.0.0.1:7003", "t", 3)
    assert found.listen == "tcp://127.0.0.1:*"  # the interface towards the server
    assert found.folder == ""
    assert found.secret.value
    with contextlib.closing(joining_machine(address="127.0.0.1:7000", listen="10.0.0.5:7", shard=True)) as machine:
        assert control.for_child(machine._made_local(control.encode(role))).listen == "tcp://10.0.0.5:7"


def joining_machine(**settings):
    return agent.Agent(Workload(), "", new_token(), agent.JoinSettings(**settings))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--shard", "lab1:7000", "train.py"], "leave out SCRIPT"),
        (["--shard", "--task", "digits", "lab1:7000"], "leave out --task"),
        (["--shard-at", "lab2:7", "lab1:7000", "train.py"], "or give --shard"),
        (["--shard", "--shard-at", "lab2", "lab1:7000"], "--shard-at: must be HOST:PORT"),
        (["--shard", "--shard-at", "0.0.0.0:7", "lab1:7000"], "give this machine's address, as in lab5:7"),
        (["--shard", "--shard-at", "[::]:7", "lab1:7000"], "workers cannot connect to [::]"),
    ],
)
def test_what_a_shard_and_a_worker_are_not_given(given, said, monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_TOKEN", new_token().reveal())
    assert main(["join", *given]) == 2
    assert said in capsys.readouterr().err


def test_shards_on_other_machines_are_at_most_all(monkeypatch):
    listening = {"engine": "hosts", "listen": "lab1:7000"}
    require_possible(RunConfig(**listening, servers=2, remote_shards=2), capabilities("hosts"))
    for servers, fix in ((1, "--servers 3 or more"), (2, "which has 2; lower it, or give --servers 3")):
        with pytest.raises(OptionError, match=fix):
            require_possible(RunConfig(**listening, servers=servers, remote_shards=3), capabilities("hosts"))


# -- what users give ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("good", ["10.0.0.1:7000", "lab3:1", "[fe80::1]:7000", "0.0.0.0:65534", " host:07000 "])
def test_addresses(good):
    assert host_and_port(good).rpartition(":")[2] == str(int(good.strip().rpartition(":")[2]))


@pytest.mark.parametrize(
    "bad", ["", "host", ":7000", "host:", "host:x", "host:0", "host:65535", "fe80::1:7000", "a b:1"]
)
def test_bad_addresses_are_refused_with_the_form(bad):
    with pytest.raises(OptionError, match=r"HOST:PORT|port must be between"):
        host_and_port(bad)


def test_variables_of_launchers():
    master = {"MASTER_ADDR": "lab1", "MASTER_PORT": "7000"}
    assert from_environment("env", master) == "lab1:7000"
    assert from_environment("env:7100", master) == "lab1:7100"
    assert from_environment("env:7100", {**master, "TORCHELASTIC_RUN_ID": "none"}) == "lab1:7100"
    assert from_environment("lab2:7", master) == "lab2:7"
    with pytest.raises(OptionError, match=r"MASTER_PORT \(7000\) is torchrun's own: give env:PORT"):
        from_environment("env", {**master, "TORCHELASTIC_RUN_ID": "none"})
    with pytest.raises(OptionError, match="MASTER_PORT"):
        from_environment("env", {"MASTER_ADDR": "lab1"})
    assert rank_of({"SLURM_PROCID": "3"}) == 3
    assert rank_of({"RANK": "1", "SLURM_PROCID": "3"}) == 1
    assert rank_of({"JOB_COMPLETION_INDEX": "0"}) == 0
    assert rank_of({}) is None
    with pytest.raises(OptionError, match="SLURM_PROCID must be a number"):
        rank_of({"SLURM_PROCID": "-1"})


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("name", ["train.py (12ab)", "the task digits"])
def test_the_command_that_serve_shows_is_one_that_join_takes(folder, monkeypatch, name, trusted):
    (folder / "train.py").touch()
    taken = []
    monkeypatch.setattr(agent, "join", lambda _train, task, _token, settings: taken.append((task, settings)) or 0)
    monkeypatch.setenv("PACELINE_TOKEN", new_token().reveal())
    assert run_app(command_to_join("lab1:7000", name, trusted=trusted).split()[1:]) == 0
    ((task, settings),) = taken
    assert task == ("digits" if name.startswith("the task") else None)
    assert (settings.address, settings.trusted_network) == ("lab1:7000", trusted)


def test_settings_of_hosts_are_refused_elsewhere_and_needed_there():
    with pytest.raises(OptionError, match="--listen is not supported by the local engine"):
        require_possible(RunConfig(listen="lab1:7000"), capabilities("local"))
    with pytest.raises(OptionError, match="--listen HOST:PORT"):
        require_possible(RunConfig(engine="hosts"), capabilities("hosts"))
    require_possible(RunConfig(engine="hosts", listen="lab1:7000", workers=2, most_workers=2), capabilities("hosts"))
    with pytest.raises(OptionError, match="--most-workers 1 is less than the 2"):
        require_possible(
            RunConfig(engine="hosts", listen="lab1:7000", workers=2, most_workers=1), capabilities("hosts")
        )


# -- the token ---------------------------------------------------------------------------------------------------------


def test_a_token_leaves_the_environment(monkeypatch):
    text = new_token().reveal()
    environment = {"PACELINE_TOKEN": text, "OTHER": "1"}
    assert tokens.for_joining(None, environment) == read_token(text)
    assert environment == {"OTHER": "1"}


def test_without_a_terminal_a_token_goes_to_a_private_file_that_the_run_removes(tmp_path):
    with tokens.of_a_run(None, tmp_path) as token:
        (file,) = tmp_path.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert tokens.for_joining(file, {}) == token
    assert not file.exists()


def test_a_token_file_of_ones_own_is_kept_and_used_again(tmp_path):
    file = tmp_path / "token"
    with tokens.of_a_run(file, None) as first:
        pass
    with tokens.of_a_run(file, None) as again:
        assert again == first
    with pytest.raises(OptionError, match="never overwritten"):
        tokens.write_new(file)


def test_a_token_that_others_may_read_is_refused(tmp_path):
    file = tmp_path / "token"
    tokens.write_new(file)
    file.chmod(0o644)
    with pytest.raises(OptionError, match="mode 644.*chmod 600"):
        tokens.for_joining(file, {})


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "other"])
def test_files_that_hold_no_token_are_refused_without_showing_them(tmp_path, kind):
    file = tmp_path / "secret-words"
    if kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file, 0o600)
    elif kind == "other":
        file.write_text("my password")
        file.chmod(0o600)
    with pytest.raises(OptionError) as caught:
        tokens.for_joining(file, {})
    assert "my password" not in str(caught.value)


def test_without_any_token_the_places_for_it_are_named(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(OptionError, match="PACELINE_TOKEN.*--token-file"):
        tokens.for_joining(None, {})


def test_a_secret_is_not_shown():
    secret = control.Secret(new_token().reveal())
    assert secret.value not in repr(control.Setup.__struct_fields__) + repr(secret)
    assert "paceline1-" not in repr(secret)


# -- what is compared --------------------------------------------------------------------------------------------------


def test_the_same_workload_may_join():
    assert REQUIRED.refusal(ASKED) is None
    assert REQUIRED.remarks(ASKED) == []


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"format": 9}, ("9.2", f"{m.FORMAT}.2")),
        ({"wire": 7}, (f"{m.FORMAT}.7", f"{m.FORMAT}.2")),
        ({"workload": "other.py (34)"}, ("other.py (34)", "train.py (12)")),
    ],
)
def test_what_differs_is_refused_with_both_values(change, both):
    refusal = REQUIRED.refusal(msgspec.structs.replace(ASKED, **change))
    assert all(value in refusal for value in both)


def test_other_versions_are_said():
    (remark,) = REQUIRED.remarks(msgspec.structs.replace(ASKED, versions={"torch": "2.12.0"}))
    assert "2.12.0" in remark
    assert "2.13.0" in remark


# -- the listener ------------------------------------------------------------------------------------------------------


class Notes:
    """What a launcher does when the listener tells it something: note it."""

    def __init__(self):
        self.hosts, self.words, self.ends, self.gone, self.machines = [], [], [], [], []

    def on_host(self, host):
        self.hosts.append(host)

    def on_word(self, process, data):
        self.words.append((process, data))

    def on_end(self, process):
        self.ends.append(process)

    def on_idle_gone(self, host):
        self.gone.append(host)

    def on_leaving(self, process):
        self.ends.append(process)


class Joining:
    """A machine that joins."""

    def __init__(self, noted, security):
        self.socket = noted.context.socket(zmq.DEALER)
        noted.machines.append(self)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        security.connect_as(self.socket, "worker", to="server")
        self.socket.connect(f"tcp://{noted.address}")

    def say(self, message):
        self.socket.send(m.encode(message))

    def heard(self):
        """Return all that has come."""
        found = []
        while self.socket.poll(0):
            found.append(m.for_agent(self.socket.recv()))
        return found

    def hear(self, kind):
        while True:
            found = m.for_agent(self.socket.recv())
            if isinstance(found, kind):
                return found


def test_options_after_the_address_are_not_taken_for_the_script(capsys):
    assert main(["join", "env", "--token-file", "token", "train.py"]) == 2
    assert "--token-file stands after env: options come before it" in capsys.readouterr().err


@pytest.fixture
def security():
    return Security(new_token())


@pytest.fixture
def noted(security):
    made = Notes()
    made.address = f"127.0.0.1:{free_ports()}"
    made.listener = JoinListener(made.address, security, REQUIRED, made)
    made.context = zmq.Context()
    yield made
    for machine in made.machines:
        machine.socket.close(linger=0)
    made.context.term()
    made.listener.close("the test is over", failed=False)


def pumped(noted, happened):
    """Let the listener work until something has happened."""
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        noted.listener.pump()
        noted.listener.tick()
        time.sleep(0.005)


def test_a_machine_is_admitted_runs_a_process_and_reports_its_end(noted, security):
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)
    assert machine.hear(m.Admitted).attach == ""
    process = noted.listener.start(noted.hosts[0], 3)
    process.send(b"role")
    assert machine.hear(m.StartChild) == m.StartChild(1, 3)
    assert machine.hear(m.ToChild) == m.ToChild(1, b"role")
    machine.say(m.FromChild(1, b"word"))
    machine.say(m.ChildExited(1, -9))
    pumped(noted, lambda: noted.ends)
    assert noted.words == [(process, b"word")]
    assert noted.ends == [process]
    assert process.code == -9
    assert noted.listener.idle() is noted.hosts[0]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_machine_that_ran_nothing_is_told_of_when_it_goes(noted, security, leaves):
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)
    if leaves:
        machine.say(m.LeaveAsked())
    else:
        machine.socket.close(linger=0)
    pumped(noted, lambda: noted.gone)
    assert noted.gone == noted.hosts
    assert not noted.ends
    assert noted.listener.idle() is None


@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("theirs", ["own.py (ab)", "own.py (cd)", ""])
def test_a_machine_is_asked_for_the_file_of_the_strategy_and_refused_with_both_values(noted, security, theirs, nodes):
    noted.listener._required = msgspec.structs.replace(
        REQUIRED, strategy=StrategySource("lab/own.py", "own.py (ab)", nodes)
    )
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: machine.socket.poll(0))
    assert machine.hear(m.StrategyAsked) == m.StrategyAsked("lab/own.py")
    assert not noted.hosts
    machine.say(msgspec.structs.replace(ASKED, strategy=theirs))
    pumped(noted, lambda: noted.hosts or machine.socket.poll(0))
    if theirs == "own.py (ab)" or not (theirs or nodes):
        assert machine.hear(m.Admitted)
        return
    reason = machine.hear(m.Refused).reason
    assert not noted.hosts
    assert "lab/own.py" in reason
    assert theirs in reason
    assert "own.py (ab)" in reason


def test_where_a_machine_has_the_strategy_of_a_run(folder, monkeypatch):
    text = "from paceline.strategies.bsp import Bsp\n\nclass Own(Bsp):\n    pass\n"
    lab = folder / "lab"
    (lab / "pack").mkdir(parents=True)
    for path in (lab / "own.py", lab / "pack" / "inner.py"):
        path.write_text(text)
    (lab / "pack" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    known = strategy_source(f"{lab}/own.py:Own")
    assert known == StrategySource(f"{lab}/own.py", digest_of_file(lab / "own.py"), nodes_run_it=False)
    assert strategy_source("ssp:staleness=2") is None
    beside = folder / "elsewhere" / "train.py"
    beside.parent.mkdir()
    assert file_here("/nowhere/own.py", beside) is None
    (beside.parent / "own.py").write_text("# another\n")
    assert file_here("/nowhere/own.py", beside) == beside.parent / "own.py"
    assert file_here(f"{lab}/own.py", beside) == lab / "own.py"
    assert file_here("pack.inner", lab / "train.py") == lab / "pack" / "inner.py"  # nothing of it is run
    assert file_here("pack.inner", None) is None
    assert file_here("sys", None) is None
    assert file_here("pack.inner.deeper", lab / "train.py") is None
    monkeypatch.syspath_prepend(str(lab))
    assert strategy_source("own:Own").place == "own"


def test_a_dismissal_that_an_answer_to_a_beat_has_overtaken_counts():
    ours, theirs = map(Channel, socket.socketpair())
    settings = agent.JoinSettings(address="127.0.0.1:1")
    with contextlib.closing(agent.Agent(agent.Workload(), "", new_token(), settings)) as machine:
        machine._admitted, machine._local = True, ours
        machine._loop.watch_descriptor(ours.fileno(), machine._pump_local)
        theirs.send(m.encode(m.Dismissed("its process was killed", failed=True)))
        theirs.close()
        machine._handle(m.Unknown(), [])
        assert (machine._code, machine._link) == (1, None)


@contextlib.contextmanager
def knocking(address, **settings):
    """A machine that asks to join, without a process; to be turned by hand."""
    joining = agent.JoinSettings(address=address, **settings)
    with contextlib.closing(agent.Agent(agent.Workload(), "", new_token(), joining)) as machine:
        machine._connect()
        yield machine


def turned(machine, *, to_its_end=False):
    """Let a machine look for what is due until it says something, or ends."""
    until = time.monotonic() + 20
    while to_its_end or not machine._told:
        assert time.monotonic() < until
        machine._loop.turn(0.01)
        machine._look(time.monotonic())


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_machine_that_encrypts_otherwise_is_told_so(encrypted):
    listener = JoinListener(f"127.0.0.1:{free_ports()}", Security(new_token(), encrypted=not encrypted), REQUIRED, None)
    told = pytest.raises(OptionError, match=f"{listener.address} does not let this machine in: the join token is")
    with knocking(listener.address, trusted_network=not encrypted) as machine, told:
        turned(machine, to_its_end=True)
    listener.close("the test is over", failed=False)


def test_a_password_of_another_run_is_told():
    listener = JoinListener(f"127.0.0.1:{free_ports()}", Security(new_token(), encrypted=False), REQUIRED, None)
    told = pytest.raises(OptionError, match="the join token is another run's, or only one side was started with")
    with knocking(listener.address, trusted_network=True) as machine, told:
        turned(machine, to_its_end=True)
    listener.close("the test is over", failed=False)


def test_a_token_of_another_run_is_told_soon_while_the_machine_goes_on(noted, caplog):
    """A server that cannot read what a member sends closes its connection, and so does one under a flood."""
    with knocking(noted.address) as machine:
        turned(machine)
        assert f"{noted.address} closes each connection during the handshake: the join token is another" in caplog.text
        assert "trying until 60 s have passed (--wait)" in caplog.text
        with pytest.raises(OptionError, match=r"within 60 s: \d+ connections were closed during the handshake; the"):
            machine._look(time.monotonic() + 61)
        machine._was_in = True
        with pytest.raises(PeerError, match="within 60 s"):
            machine._look(time.monotonic() + 61)


def test_a_server_that_does_not_answer_is_not_said_to_have_other_keys():
    with knocking(f"127.0.0.1:{free_ports()}") as machine:
        machine._loop.turn(0.5)
        with pytest.raises(OptionError, match="see that `paceline serve` runs there"):
            machine._look(time.monotonic() + 61)


def test_a_worker_tries_to_get_in_for_as_long_as_its_machine_does():
    role = control.Role(
        worker=0, incarnation=0, workers=1, evaluator=False, seed=0, options={}, batch_size=None, epochs=None,
        data_dir=None, threads=1, script=None, arguments=[], function=None, sys_path=[], transport="zeromq",
        address="tcp://0.0.0.0:7001", token="w",
    )  # fmt: skip
    with knocking("127.0.0.1:7000", wait_s=600.0) as machine:
        started = control.for_child(machine._made_local(control.encode(role)))
    assert (started.address, started.knocking_s) == ("tcp://127.0.0.1:7001", 600.0)


def test_words_about_an_earlier_process_are_dropped(noted, security):
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)
    first = noted.listener.start(noted.hosts[0], 0)
    first.reap()
    second = noted.listener.start(noted.hosts[0], 0)
    machine.say(m.FromChild(first.child, b"late"))
    machine.say(m.ChildExited(first.child, 0))
    machine.say(m.ChildExited(second.child, 0))
    pumped(noted, lambda: noted.ends)
    assert noted.ends == [second]
    assert noted.words == []


def test_a_machine_that_closes_its_connection_is_lost_and_so_is_its_process(noted, security):
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)
    process = noted.listener.start(noted.hosts[0], 0)
    machine.socket.close(linger=0)
    pumped(noted, lambda: noted.ends)
    assert process.code == -9
    assert noted.listener.hosts == {}


def test_a_silent_machine_is_lost_and_told_so_when_it_speaks_again(noted, security, monkeypatch):
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)
    process = noted.listener.start(noted.hosts[0], 0)
    monkeypatch.setattr(m, "LOST_S", -1.0)
    pumped(noted, lambda: noted.ends)
    assert noted.ends == [process]
    machine.say(m.Beat())
    pumped(noted, lambda: machine.socket.poll(0))
    assert machine.hear(m.Unknown) == m.Unknown()


NOT_TEXT = m.encode(msgspec.structs.replace(ASKED, host="lab1")).replace(b"lab1", b"\xff\xfe\xc4\x80")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa4Beet", b"x" * 4000, NOT_TEXT, b"\x91" * 100_000])
def test_nonsense_is_refused_and_harms_nobody(noted, security, data):
    machine = Joining(noted, security)
    machine.socket.send(data)
    pumped(noted, lambda: machine.socket.poll(0))
    assert "cannot be read" in machine.hear(m.Refused).reason
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)


def test_strangers_are_not_heard(noted):
    stranger = Joining(noted, Security(new_token()))
    stranger.say(ASKED)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        noted.listener.pump()
        time.sleep(0.01)
    assert noted.hosts == []
    assert noted.listener.hosts == {}


def test_a_machine_that_is_not_read_from_is_held_up_and_stays(noted, security):
    """A launcher that is busy for a while holds a bounded number of its messages, and reads all of them later."""
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)
    (backlog,) = noted.listener._gatekeeper._backlogs.values()
    for _ in range(2 * m.UNREAD):
        machine.socket.send(bytes(m.LONGEST - 100))
    until = time.monotonic() + 20
    while backlog.unread() < (m.UNREAD - 2) * m.LONGEST:
        assert time.monotonic() < until
        time.sleep(0.005)
    time.sleep(4 * LOOK_S)
    assert (m.UNREAD - 2) * m.LONGEST < backlog.unread() < UNREAD_BYTES
    assert backlog.is_open
    heard = []
    pumped(noted, lambda: heard.extend(machine.heard()) or sum(isinstance(e, m.Refused) for e in heard) == 2 * m.UNREAD)


def test_one_pump_handles_a_share_of_what_has_come(noted, security, monkeypatch):
    monkeypatch.setattr(join_listener, "TURN", 3)
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)
    for _ in range(10):
        machine.say(m.LeaveAsked())
    assert noted.listener._socket.poll(10_000)
    noted.listener.pump()
    assert select.select([noted.listener.fileno()], [], [], 20)[0]
    pumped(noted, lambda: not noted.listener._socket.poll(20))


def test_warnings_of_a_joined_process_are_counted_as_refusals_are(noted, security, caplog):
    machine = Joining(noted, security)
    machine.say(ASKED)
    pumped(noted, lambda: noted.hosts)
    process = noted.listener.start(noted.hosts[0], 3)
    for number in range(LOG_BURST + 50):
        process.warn(f"odd {number}", show=True)
    assert sum("odd" in record.message for record in caplog.records) <= LOG_BURST


@pytest.mark.parametrize(
    "change",
    [{"host": "x" * 401}, {"workload": "x" * 401}, {"kernel": "x" * 401}, {"versions": {"torch": "x" * 401}},
     {"versions": {str(number): "1" for number in range(17)}}],
)  # fmt: skip
def test_names_of_a_machine_are_bounded(change):
    with pytest.raises(PeerError, match="length <= "):
        m.for_launcher(m.encode(msgspec.structs.replace(ASKED, **change)))


def test_a_message_that_is_too_long_is_not_decoded():
    with pytest.raises(PeerError, match="at most"):
        m.for_launcher(b"\x00" * (m.LONGEST + 1))


def test_an_address_in_use_is_a_clear_error(noted, security):
    with pytest.raises(OptionError, match="--listen: cannot listen at 127.0.0.1"):
        JoinListener(noted.address, security, REQUIRED, Notes())


def test_a_proof_that_is_no_ascii_text_proves_nothing(noted, security, monkeypatch, tmp_path):
    monkeypatch.setattr("paceline.engines.hosts.join_listener.kernel_and_namespace", lambda: "here")
    os.close(os.dup(noted.listener.open_locally(tmp_path)))
    machine = Joining(noted, security)
    machine.say(msgspec.structs.replace(ASKED, kernel="here"))
    machine.say(m.Attached("\u00e9\u20ac"))
    pumped(noted, lambda: noted.hosts)
    assert noted.hosts[0].channel is None


class Running:
    """The process of a worker on a machine that shares no memory."""

    shares_memory = False

    def __init__(self, number):
        self.number = number


class Held:
    """The process of a shard on such a machine."""

    pid = 0


class Recorder(HostLauncher):
    """A launcher without processes: only whom it gives which place."""

    def __init__(self, hosts):
        self._vacant, self._announced, self._places, self.sent = [], [], {}, []
        self._began = self._finished = None
        self._joins = RefusalLog()
        self._pending, self._plan = (
            None,
            SimpleNamespace(workers=2, remote_shards=0, config=SimpleNamespace(evaluate_every=None)),
        )
        self._children = SimpleNamespace(
            occupy=lambda place, process: None, alive={}, is_latest=lambda _, links: links == 2
        )  # fmt: skip
        self._listener = SimpleNamespace(hosts=hosts, start=self.take, idle=lambda worker: self.free())

    def take(self, host, worker):
        host.process = Running(worker)
        return host.process

    def free(self):
        return next((host for host in self._listener.hosts.values() if host.process is None), None)

    def _send_to_server(self, message, descriptors=()):
        self.sent.append(message)


def machines(count):
    return {
        str(n): SimpleNamespace(identity=str(n), hostname="x", rank=None, channel=None, process=None, shard=False)
        for n in range(count)
    }


def test_notices_of_machines_that_join_are_few_however_many_do():
    """A member may join and leave in a loop."""
    launcher, shown = Recorder(machines(200)), []
    launcher._joins = RefusalLog("notices of machines that join", shown.append)
    for place in range(200):
        launcher._vacant = [ProcessPlace(place, 0), ProcessPlace(place, 1)]
        launcher.on_host(launcher.free())
    assert len(shown) == LOG_BURST
    assert shown[:2] == ["x runs worker 0 (over the network)", "waiting for 1 more worker to join"]
    launcher._joins.close()
    assert "notices of machines that join, the last: waiting for 1 more worker to join" in shown[-1]


def test_machines_that_stand_by_for_shards_are_bounded():
    """A member may join as a shard as often as it likes."""
    hosts, sent_away = machines(70), []
    launcher = Recorder(hosts)
    launcher._shards = [Held()]
    launcher._plan.remote_shards = 2
    launcher._begin_if_possible = lambda: None
    free = []
    launcher._listener.free = lambda shard: free
    launcher._listener.dismiss = lambda host, reason, failed: sent_away.append((free.pop(), reason, failed))
    for host in hosts.values():
        host.shard = True
        free.append(host)
        launcher.on_host(host)
    assert len(free) == 1 + MOST_SPARE  # one of two shards has its machine
    assert {each[1:] for each in sent_away} == {("64 machines stand by for shards already", True)}


def test_a_run_that_starts_over_waits_for_each_place_once():
    launcher = Recorder({})
    launcher._start_children()
    launcher._start_children()
    assert [place.worker for place in launcher._vacant] == [0, 1]


def test_machines_that_wait_for_a_number_are_announced_to_a_restarted_server():
    hosts = machines(3)
    launcher = Recorder(hosts)
    launcher._start_children()
    assert [host.process.number for host in hosts.values() if host.process] == [0, 1]
    launcher.on_host(hosts["2"])
    launcher._on_relinked()
    assert launcher.sent == [control.Newcomer(), control.Newcomer()]


def test_a_machine_that_asks_twice_gets_one_place():
    """It has an announcement of each question, and the server may give a number for both."""
    (before,) = machines(1).values()
    (again,) = machines(1).values()
    launcher = Recorder({before.identity: before})
    launcher._began = 0.0
    launcher.on_host(before)
    launcher._listener.hosts[again.identity] = again  # as the listener does when it asks again
    launcher.on_host(again)
    launcher._start(ProcessPlace(2, 0))
    launcher._start(ProcessPlace(3, 0))
    assert before.process is None
    assert again.process.number == 2
    assert launcher.sent == [control.Newcomer(), control.Newcomer(), control.NeverStarted(3, 0)]


def test_warnings_that_a_launcher_remembers_are_bounded_in_number_and_length():
    launcher, place, shown = Recorder({}), ProcessPlace(0, 0), []
    launcher._stage = Console()
    launcher._children.alive = {place: SimpleNamespace(warn=lambda text, show: shown.append(show))}
    for number in range(MOST_WARNINGS + 10):
        launcher._on_child_word(place, control.encode(control.Warned(f"{number}" + "x" * 2 * WARNING_LETTERS)))
    assert sum(shown) == len(launcher._stage.warnings) == MOST_WARNINGS
    assert max(map(len, launcher._stage.warnings)) == WARNING_LETTERS


def test_a_lost_link_ends_a_process_of_another_machine_and_not_the_evaluator():
    launcher = Recorder({})
    worker, evaluator = ProcessPlace(0, 0), ProcessPlace(2, 0, evaluator=True)
    launcher._children.alive = {worker: "a worker's process", evaluator: "the evaluator's"}
    launcher._kill_at = ends = {}
    launcher._on_link_lost(evaluator, 2)
    launcher._on_link_lost(worker, 1)  # that to an earlier server
    assert ends == {}
    launcher._on_link_lost(worker, 2)
    assert list(ends) == ["a worker's process"]
    ends.clear()
    launcher._pending = print
    launcher._on_link_lost(worker, 2)  # while there is no server
    assert ends == {}


# -- what members send -------------------------------------------------------------------------------------------------


class Garbled:
    """A link over which comes what is no message."""

    def __init__(self):
        self.closed = False

    def collect(self):
        raise PeerError("a chunk of 3 bytes arrived where 8 were announced")

    def close(self):
        self.closed = True


def linked(tmp_path, pid):
    told = []
    departures = SimpleNamespace(on_nonsense=lambda *what: told.append(what))
    ours, theirs = Channel.pair()
    links = ServerLinks(ours, lambda: 7.0, tmp_path, lambda: None, lambda hello: None, exact=False)
    links.run = SimpleNamespace(departures=departures)
    member = Member(3, 1, pid, Garbled(), evaluator=False)
    with pytest.raises(PeerError) if pid else contextlib.nullcontext():
        links._drain(member)
    links.close()
    for channel in (ours, theirs):
        channel.close()
    return member, told


def test_a_worker_of_another_machine_that_sends_nonsense_is_taken_out_alone(tmp_path):
    member, told = linked(tmp_path, pid=0)
    assert told == [(3, 1, "a chunk of 3 bytes arrived where 8 were announced", 7.0)]
    assert member.hung_up


def test_nonsense_of_a_process_of_this_machine_is_a_fault_of_ours(tmp_path):
    member, told = linked(tmp_path, pid=1)
    assert told == []
    assert not member.hung_up


# -- names of hosts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "known", "family"),
    [
        ("[::1]", None, socket.AF_INET6), ("127.0.0.1", None, socket.AF_INET), ("*", None, socket.AF_INET),
        ("no.such.host.invalid", None, socket.AF_INET),
        ("six", {socket.AF_INET6}, socket.AF_INET6), ("both", {socket.AF_INET, socket.AF_INET6}, socket.AF_INET),
    ],
)  # fmt: skip
def test_ip6_is_spoken_with_hosts_that_have_no_other_address(monkeypatch, host, known, family):
    if known is not None:  # as a name server would answer
        monkeypatch.setattr(zeromq, "getaddrinfo", lambda *_: [(kind, 0, 0, "", ()) for kind in known])
    assert zeromq.family_of(host) == family
    context = zmq.Context()
    with contextlib.closing(context.socket(zmq.DEALER)) as made:
        zeromq.speak_ip6(made, f"tcp://{host}:7000")
        assert bool(made.getsockopt(zmq.IPV6)) == (family == socket.AF_INET6)
    context.term()


def test_a_control_message_with_text_that_is_none_is_a_fault_of_its_sender():
    data = control.encode(control.Warned("text")).replace(b"text", b"\xff\xfe\xc4\x80")
    with pytest.raises(PeerError, match="cannot be read"):
        control.for_launcher(data)


@pytest.mark.parametrize(("pid", "spared"), [(0, True), (0, False), (1, True)])
def test_a_message_that_does_not_fit_costs_the_worker_its_place_where_others_go_on(tmp_path, pid, spared):
    told = []
    departures = SimpleNamespace(on_nonsense=lambda *what: told.append(what), can_spare=lambda worker: spared)

    def on_message(*_):
        raise OptionError("it has weight [3]")

    ours, theirs = Channel.pair()
    links = ServerLinks(ours, lambda: 7.0, tmp_path, lambda: None, lambda hello: None, exact=False)
    links.run = SimpleNamespace(departures=departures, on_message=on_message)
    member = Member(3, 1, pid, Garbled(), evaluator=False)
    goes_on = pid == 0 and spared
    with contextlib.nullcontext() if goes_on else pytest.raises(OptionError):
        links._take(member, More(1))
    assert member.hung_up is goes_on
    assert told == ([(3, 1, "its More does not fit this run: it has weight [3]", 7.0)] if goes_on else [])
    links.close()
    for channel in (ours, theirs):
        channel.close()
