"""The Ray engine without Ray: settings, refusals, where files are found, and who is asked for when an actor ends."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hosts import free_ports

from paceline.cli import main
from paceline.core.errors import OptionError
from paceline.core.quantities import resource_amounts, resources_written
from paceline.core.settings import RunConfig, is_elastic, require_possible
from paceline.core.worker_count import cores, usual_cpus, usual_threads
from paceline.engines import capabilities
from paceline.engines.hosts import messages as m
from paceline.engines.hosts.agent import Agent, JoinSettings
from paceline.engines.hosts.cluster_launcher import VAIN, ClusterLauncher
from paceline.engines.hosts.strategy_source import StrategySource, digest_of_file
from paceline.engines.local.children import ProcessPlace
from paceline.engines.local.workload import Workload
from paceline.engines.ray import actors, placement
from paceline.engines.ray.actors import RunJob
from paceline.session import _device_for
from paceline.transport.join_token import new_token

RAY = capabilities("ray")


# -- what users give ---------------------------------------------------------------------------------------------------


def test_resources():
    assert resource_amounts("cpu=2, gpu=0.5,memory=2e9,tpu-v4=1") == {"CPU": 2, "GPU": 0.5, "memory": 2e9, "tpu-v4": 1}
    assert resources_written("cpu=2, memory=2e9") == "CPU=2,memory=2000000000"
    assert resource_amounts("") == resource_amounts("CPU=0") == {}
    for bad in ("CPU", "CPU=-1", "CPU=two", "=1", "CPU=1,cpu=2", "CPU=1e999"):
        with pytest.raises(OptionError, match=r"names and amounts >= 0, such as CPU=2,GPU=0.5,memory=2e9; "):
            resource_amounts(bad)
    assert placement.actor_options("GPU=1,memory=5,mine=2") == {
        "num_cpus": 0, "num_gpus": 1, "memory": 5, "resources": {"mine": 2}, "max_restarts": 0
    }  # fmt: skip


def test_settings_of_clusters_are_refused_elsewhere_and_those_of_serve_here():
    with pytest.raises(OptionError, match=r"--address is not supported by the local engine: it is for --engine ray"):
        require_possible(RunConfig(address="auto"), capabilities("local"))
    with pytest.raises(
        OptionError, match=r"--most-workers .* local engine: it is for `paceline serve` and --engine ray"
    ):
        require_possible(RunConfig(workers=2, most_workers=3), capabilities("local"))
    with pytest.raises(OptionError, match=r"--spread is not supported by the hosts engine"):
        require_possible(RunConfig(engine="hosts", listen="lab1:7000", spread=True), capabilities("hosts"))
    with pytest.raises(OptionError, match=r"--listen is not supported by the ray engine: it is for `paceline serve`"):
        require_possible(RunConfig(engine="ray", listen="lab1:7000"), RAY)
    fine = RunConfig(
        engine="ray", workers=2, most_workers=3, trusted_network=True, spread=True, worker_resources="CPU=4"
    )
    require_possible(fine, RAY)
    assert is_elastic(fine)
    assert not is_elastic(RunConfig(workers=2, most_workers=2))
    assert usual_threads(fine, 2, RAY) == 4
    assert usual_threads(RunConfig(worker_resources="CPU=0.5"), 2, RAY) == 1
    assert usual_cpus(fine, 2) == max(cores(), 1 + 3 * 4)
    with_shards = RunConfig(engine="ray", workers=2, servers=64, remote_shards=64, shard_resources="CPU=3")
    require_possible(with_shards, RAY)
    assert usual_cpus(with_shards, 2) == max(cores(), 1 + 64 * 3 + 2)
    with pytest.raises(OptionError, match=r"--remote-shards 3 is more than the shards of --servers 2, which has 2"):
        require_possible(RunConfig(engine="ray", servers=2, remote_shards=3), RAY)
    with pytest.raises(OptionError, match=r"--shard-resources is not supported by the hosts engine"):
        require_possible(RunConfig(engine="hosts", listen="lab1:7000", shard_resources="CPU=2"), capabilities("hosts"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workers", "4.."), "--workers: '4..' has no end; say how many at most, such as 4..16"),
        (("--workers", "4..2"), "--most-workers 2 is less than the 4 that the run begins with"),
        (("--engine", "local", "--workers", "1..2"), "--most-workers is not supported by the local engine"),
        (
            ("--address", "ray://lab1:10001"),
            "--address: Ray's client is not supported ('ray://lab1:10001'); run the command",
        ),
        (("--address", "lab1"), "--address: must be HOST:PORT"),
        (("--worker-resources", "CPU"), "--worker-resources: must be names and amounts"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, said, folder, capsys):
    assert main(["run", "--engine", "ray", "--quiet", *options]) == 2
    assert said in capsys.readouterr().err


def test_nobody_at_an_address_is_named_with_the_fix(folder, capsys):
    address = f"127.0.0.1:{free_ports()}"
    assert main(["run", "--engine", "ray", "--quiet", "--workers", "1", "--address", address]) == 2
    assert f"no Ray answers at {address} (Connection refused): start one with `ray start" in capsys.readouterr().err


def test_no_ray_to_be_found_is_named_with_the_fix(monkeypatch):
    ray = placement.load()

    def finds_none(**_):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", finds_none)
    said = r"no Ray at auto: Could not find any .*; start one with `ray start --head`, or leave --address out"
    with pytest.raises(OptionError, match=said), placement.connected(RunConfig(engine="ray", address="auto"), 1):
        pass


def test_a_ray_of_our_own_has_its_folder_inside_one_that_nobody_else_may_enter():
    with placement._own(RunConfig(engine="ray"), 1) as options:
        given = Path(options["_temp_dir"])
        assert given.parent.stat().st_mode & 0o777 == 0o700
        assert not given.exists()  # Ray makes it, and lets everybody write to it
    assert not given.parent.exists()


def test_without_ray_the_fix_is_named(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"needs Ray .*: pip install 'paceline\[ray\]'"):
        placement.load()


def test_nothing_of_paceline_imports_ray_by_itself():
    code = "import sys, paceline, paceline.engines.ray.driver; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_worker_whose_actor_has_one_device_trains_on_that_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of those that CUDA_VISIBLE_DEVICES names
    assert _device_for(SimpleNamespace(device=None, worker=5)) == torch.device("cuda", 0)


# -- files on other machines -------------------------------------------------------------------------------------------


def job_in(folder, root):
    return RunJob(
        plan=None, workload=Workload(), folder=folder, root=root, import_path=[], log_level=30, name="", group=None,
        wants_lines=False, wants_progress=False,
    )  # fmt: skip


def test_files_are_found_below_the_folder_that_travels_or_at_the_same_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = job_in(Path("/home/me/project/sub"), Path("/home/me/project"))
    assert job.here("train.py") == tmp_path / "sub" / "train.py"
    assert job.here(".") == tmp_path / "sub"
    assert job.here("/home/me/project/mine.py") == tmp_path / "mine.py"
    assert job.here("/data/mnist") == Path("/data/mnist")
    assert job.here(None) is None


@pytest.mark.parametrize("where", ["project/mine.py", "home/mine.py", "home/sub/mine.py", None])
def test_an_own_strategy_is_found_where_it_has_travelled_at_the_same_path_or_beside_the_script(
    where, tmp_path, monkeypatch
):
    project, home = tmp_path / "project", tmp_path / "home"
    for folder in (project, home / "sub"):
        folder.mkdir(parents=True)
    if where is not None:
        (tmp_path / where).write_text("class Mine: pass\n")
    monkeypatch.chdir(project)
    job = job_in(home / "sub", home)  # as on a machine to which Ray has brought the folder `home` as `project`
    settings = JoinSettings(address="127.0.0.1:1", strategy=job.here(home / "mine.py"))
    said = []
    with contextlib.closing(Agent(Workload(script=str(home / "sub" / "train.py")), "", new_token(), settings)) as agent:
        monkeypatch.setattr(agent, "_send", said.append)
        agent._handle(m.StrategyAsked(str(home / "mine.py")), [])
    assert [asked.strategy for asked in said] == [digest_of_file(tmp_path / where) if where else ""]
    refusal = StrategySource(str(home / "mine.py"), "mine.py (ab)", nodes_run_it=True).refusal("")
    assert refusal.endswith("copy it there or beside the script; on Ray, --working-dir FOLDER sends it")


def test_an_actor_that_asks_for_no_gpu_sees_none(monkeypatch):
    job = job_in(Path("/"), None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(actors.logger, "level", 30)
    job.settle("CPU=1,GPU=0.5")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    job.settle("CPU=1,GPU=0")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


# -- who is asked for --------------------------------------------------------------------------------------------------


class Asked:
    """Stands in for actors: what has ended, and how many there are."""

    def __init__(self):
        self.count = 0
        self.over = []

    def __len__(self):
        return self.count

    def ask(self):
        self.count += 1

    def ended(self):
        over, self.over = self.over, []
        self.count -= len(over)
        return over


class Started:
    """Stands in for a process on a machine that has joined."""

    shares_memory, pid = False, 0


class Deciding(ClusterLauncher):
    """A launcher that has no processes: only whom it asks for."""

    def __init__(self, *, workers=2, most=None, respawn=False, began=1.0, shards=0):
        config = SimpleNamespace(most_workers=most, workers=workers, respawn=respawn)
        self._plan = SimpleNamespace(workers=workers, config=config, remote_shards=shards)
        self._workers, self._holders, self._wanted, self._look_at = Asked(), Asked(), most or workers, 0.0
        self._joined, self._vain = set(), {"worker": 0, "shard": 0}
        self._began, self._finished, self._failure, self._script_failure = began, None, None, None
        self._missed, self._coming, self._most = set(), 0, most or workers
        alive = {}
        self._vacant, self._announced, self._places, self._kill_at = [], [], {}, {}
        self._children = SimpleNamespace(alive=alive, occupy=alive.__setitem__)
        self._listener = SimpleNamespace(idle=lambda _: None, hosts={}, start=lambda host, worker: Started())
        self._joins = SimpleNamespace(warn=lambda text: None)
        self.look()
        self._joined.update((False, number) for number in range(workers))
        self._joined.update((True, number) for number in range(shards))

    def _send_to_server(self, message, descriptors=()):
        pass

    def _fail(self, failure):
        self._failure = failure

    def look(self, *ended, shards=()):
        self._workers.over, self._holders.over = list(ended), list(shards)
        self._look_at = 0.0
        self._look()
        return len(self._workers)


GONE, DISMISSED, REFUSED = "the node died", (1, ""), (2, "lab3 has no train.py")


def test_what_has_ended_by_itself_is_not_asked_for_again():
    assert Deciding().look((0, DISMISSED)) == 1
    assert Deciding().look((0, GONE)) == 1
    assert Deciding(most=4).look((0, DISMISSED)) == 3


def test_what_vanishes_from_a_range_is_asked_for_again():
    launcher = Deciding(most=4)
    assert launcher.look((0, GONE)) == 4
    assert launcher.look((1, GONE)) == 4


def test_who_comes_before_the_server_has_noticed_a_loss_is_asked_for_again():
    launcher = Deciding(most=4)
    host = SimpleNamespace(process=None, identity=b"0")
    launcher._announced.append(host)
    launcher._listener.hosts = {b"0": host}
    launcher._listener.dismiss = lambda host, reason, failed: None
    launcher._on_no_place("the run has 4 workers, and --most-workers is 4")
    assert launcher.look((0, DISMISSED)) == 4


@pytest.mark.parametrize("how", [GONE, DISMISSED])
@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("first", ["the server", "the actor"])
def test_with_respawn_the_server_decides(how, most, first):
    launcher = Deciding(most=most, respawn=True)
    before = len(launcher._workers)
    if first == "the actor":
        assert launcher.look((0, how)) == before - 1
    launcher._start(ProcessPlace(0, 1))
    assert launcher.look(*([(0, how)] if first == "the server" else [])) == before


def test_no_actor_is_asked_for_before_the_one_has_ended_whose_room_it_needs():
    launcher = Deciding(respawn=True)
    launcher._start(ProcessPlace(0, 1))
    assert launcher.look() == 2  # a third would wait for room outside of the placement group, for ever
    assert launcher.look((0, DISMISSED)) == 2


def joined(launcher, number):
    """A machine that has joined and waits for a worker's number."""
    host = SimpleNamespace(
        process=None, identity=number, rank=number, shard=False, hostname="lab1", channel=None, pid=0
    )  # fmt: skip
    launcher._listener.hosts[number] = host
    launcher.on_host(host)


def test_a_restarted_server_that_asks_again_gets_no_more_actors():
    launcher = Deciding(workers=4, respawn=True)
    for worker in (0, 1):
        launcher._start(ProcessPlace(worker, 1))
    assert launcher.look((0, GONE), (1, GONE)) == 4
    launcher._on_relinked()
    for worker in (0, 1, 2):  # of the death of 2 only the restarted one has learned
        launcher._start(ProcessPlace(worker, 1))
    assert launcher.look((2, GONE)) == 4
    launcher._start(ProcessPlace(3, 1))
    assert launcher.look((3, GONE)) == 4


def test_a_restarted_server_gives_a_waiting_machine_to_one_worker_and_no_actor_is_asked_for_the_other():
    launcher = Deciding(workers=2, respawn=True)
    launcher._start(ProcessPlace(0, 1))
    assert launcher.look((0, GONE)) == 2
    joined(launcher, 2)  # while there is no server
    launcher._on_relinked()
    launcher._start(ProcessPlace(0, 1))  # because its process is gone
    launcher._start(ProcessPlace(2, 0))  # because a machine waits
    assert [place.worker for place in launcher._children.alive] == [0]
    assert launcher.look() == 2
    launcher._start(ProcessPlace(1, 1))
    assert launcher.look((1, GONE)) == 2


def test_machines_that_wait_for_a_restarted_server_may_run_others_than_those_they_were_asked_for():
    """And what it answers to their announcements, with numbers that no worker had, asks for nobody."""
    launcher = Deciding(workers=6, respawn=True)
    for worker in (0, 1, 2, 4, 5):
        launcher._start(ProcessPlace(worker, 1))
    assert launcher.look(*((worker, GONE) for worker in (0, 1, 2, 4, 5))) == 6
    assert launcher.look((3, GONE)) == 5  # while there is no server
    for number in range(6, 11):
        joined(launcher, number)
    launcher._on_relinked()
    for worker in range(6):
        launcher._start(ProcessPlace(worker, 2))
    for worker in range(6, 11):
        launcher._start(ProcessPlace(worker, 0))
    assert sorted(place.worker for place in launcher._children.alive) == [0, 1, 2, 3, 4]
    assert launcher.look() == 6
    joined(launcher, 11)
    launcher._start(ProcessPlace(5, 3))
    assert launcher.look() == 6
    for dead in range(6, 12):  # each in the absence of a further server
        assert launcher.look((dead, DISMISSED)) == 5
        launcher._on_relinked()
        launcher._start(ProcessPlace(dead - 6, 4))
        assert launcher.look() == 6
        joined(launcher, dead + 6)
        launcher._start(ProcessPlace(dead - 6, 5))


def test_before_training_every_place_is_filled_again_until_that_is_in_vain():
    launcher = Deciding(began=None)
    assert launcher.look((0, DISMISSED)) == 2
    for number in (2, 3):
        assert launcher.look((number, GONE)) == 2
        assert launcher._failure is None
    launcher.look((4, GONE))
    assert launcher._failure.blame == "peer"
    assert "no worker gets as far as to train: the node died" in launcher._failure.text


def test_an_actor_that_may_not_join_ends_a_run_that_has_not_begun_and_no_other():
    launcher = Deciding(began=None)
    launcher.look((7, REFUSED))
    assert (launcher._failure.blame, launcher._failure.text) == ("user", "lab3 has no train.py")
    launcher = Deciding(most=4)
    assert launcher.look((7, REFUSED)) == 3
    assert launcher._failure is None


def test_after_some_actors_in_vain_no_more_are_asked_for():
    launcher = Deciding(most=5)
    for number in (7, 8):
        assert launcher.look((number, GONE)) == 5
    assert launcher.look((9, GONE)) == 4


def test_the_actor_of_a_shard_is_asked_for_again_however_it_ended():
    launcher = Deciding(shards=2)
    for how in (GONE, DISMISSED, REFUSED):
        launcher._joined.add((True, 0))
        launcher.look(shards=[(0, how)])
        assert (len(launcher._holders), len(launcher._workers), launcher._failure) == (2, 2, None)


def test_the_actor_of_a_shard_that_has_lost_its_server_is_not_told_that_the_run_is_over():
    launcher = Deciding(shards=1)
    process = SimpleNamespace(code=0, host=SimpleNamespace(shard=True))
    assert launcher._why_dismissed(process) == ("its shard has lost the server", False)


@pytest.mark.parametrize("began", [None, 1.0])
def test_a_run_whose_shards_never_join_ends(began):
    launcher = Deciding(shards=2, began=began)
    for number in (7, 8):
        launcher.look(shards=[(number, GONE)])
        assert (len(launcher._holders), launcher._failure) == (2, None)
    launcher.look((0, DISMISSED), shards=[(9, GONE)])
    assert launcher._failure.blame == "peer"
    assert "no shard gets as far as to hold its part: the node died" in launcher._failure.text


def test_a_shard_that_may_not_join_ends_a_run_that_has_not_begun():
    launcher = Deciding(shards=1, began=None)
    launcher.look(shards=[(7, (2, "it speaks format 2.5, this run 3.5"))])
    assert (launcher._failure.blame, launcher._failure.text) == ("user", "it speaks format 2.5, this run 3.5")


def test_what_ray_says_is_one_line():
    error = RuntimeError("The actor died.\n\tclass_name: PacelineAgent\n\tactor_id: 01\n\tpid: 7\nIts node was lost.\n")
    assert placement.reason_of(error) == "The actor died. Its node was lost."
    assert placement.reason_of(ValueError()) == "ValueError"
    assert VAIN > 1
