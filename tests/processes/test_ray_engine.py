"""The Ray engine on a real cluster of this host: bits, devices, secrets, machines that come and go, Ctrl-C."""

import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import hosts
import pytest
import ray_clusters
import warm_python
from hosts import Site, wait_until
from ray_clusters import RayCluster

from attacks import foreign_checker
from paceline.transport.join_token import PREFIX

pytestmark = pytest.mark.slow

SCRIPT = hosts.SCRIPT.replace('"done"', '"in", os.getcwd(), "sees", dict(os.environ).get("CUDA_VISIBLE_DEVICES")')
JOB = """
import ray, torch, paceline
from torch.utils.data import TensorDataset

ray.init(logging_level="warning")

def counts():
    session = paceline.init()
    table = session.table("counts", rows=4, width=2)
    for _ in range(3):
        table.inc([session.worker], [[1.0, 1.0]])
        session.clock()

def nodes():
    session = paceline.init()
    torch.manual_seed(1)
    x = torch.randn(40, 6)
    data = TensorDataset(x, x @ torch.randn(6, 1))
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session.prepare(model, optimizer)
    for x, y in session.batches(data, batch_size=5, epochs=2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

how = dict(engine="ray", evaluate_every=None, runs_dir="runs", threads=1)
first = paceline.launch(counts, workers=1, servers=2, strategy="ssp:staleness=1", **how)
second = paceline.launch(nodes, workers=2, strategy="mine.py:Mine", **how)
print(first.summary.engine, second.summary.engine, second.summary.workers, "sum:", first.tables["counts"].sum(),
      "nodes:", len(second.nodes), "connected:", ray.is_initialized())
"""


def own(place):
    """The file of a strategy of one's own that is one of the package."""
    module, _, name = place.partition(":")
    return f"from {module} import {name}\n\n\nclass Mine({name}):\n    pass\n"


@pytest.fixture(scope="module")
def cluster(warm):
    """One head for all tests of this file, with room for a server and two workers."""
    ray_clusters.require()
    with RayCluster(cpus=3, gpus=2) as made:
        yield made


def run_on(cluster, site, *options, what=("train.py",), **environment):
    given = (*cluster.options, "--evaluate-every", "off")
    return site.command("run", "run", *given, *options, *what, environment={**cluster.environment, **environment})


def require_hidden(cluster, ran, secret, shards=2):
    """Neither command lines nor environments of a run's processes, all of which are there, show the secret."""
    expected = ("worker 0", "worker 1", "server", *(f"shard {shard}" for shard in range(shards)))

    def all_there():
        assert ran.poll() is None, ran.said
        titles = " ".join(cluster.head.processes().values())
        return all(f"paceline: {name}" in titles for name in expected)

    wait_until(all_there)
    processes = {*cluster.head.processes(), ran.pid}
    assert not showing(secret, processes)
    assert showing(cluster.head.tag, processes)  # which is in their environments


def showing(text, processes):
    """The processes whose command line or environment has this text."""
    found = set()
    for pid in processes:
        for name in ("cmdline", "environ"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                if text.encode() in Path(f"/proc/{pid}/{name}").read_bytes():
                    found.add(pid)
    return found


@pytest.mark.usefixtures("nothing_left")
def test_a_cluster_trains_to_the_bits_of_one_machine_and_nothing_shows_the_token(cluster, folder):
    script = SCRIPT.replace('"hurry"', repr(str(folder / "hurry")))  # workers are in a copy of the folder
    (folder / "mine.py").write_text(own("paceline.strategies.bsp:Bsp"))
    with Site(folder, script, epochs=2, pause=0.1) as site:
        ran = run_on(
            cluster, site, "--workers", "2", "--servers", "2", "--strategy", "mine.py:Mine", "--working-dir", ".",
            "--worker-resources", "CPU=1,GPU=1", "--spread",
        )  # fmt: skip
        require_hidden(cluster, ran, PREFIX)
        site.hurry()
        assert ran.end() == 0, ran.said
        theirs, report = site.model, site.report
        assert report["engine"] == "ray"
        assert "it travels with" in ran.said
        assert ran.said.count("shares memory with the server") == 2
        found = re.findall(r"\[worker (\d)\] worker \1 in (\S+) sees (\d)", "\n".join(cluster.logs.values()))
        assert {worker: device for worker, _, device in found}.keys() == {"0", "1"}
        assert {device for _, _, device in found} == {"0", "1"}  # each has the one that Ray gave it
        assert all("working_dir_files" in where for _, where, _ in found)
        journal = site.run / "journal.jsonl"
        assert str(journal.resolve()) in "\n".join(cluster.logs.values())
        replayed = site.command("replay", "replay", journal)
        assert replayed.end() == 0, replayed.said
        kept = [*cluster.logs.values(), journal.read_text(), ran.said, (site.run / "report.json").read_text()]
        assert not [text for text in kept if PREFIX in text]
        here = folder / "local"
        here.mkdir()
    with Site(here, SCRIPT, epochs=2, pause=0) as one:
        command = one.run_here("--workers", "2", "--servers", "2")
        assert command.end() == 0, command.said
        assert all(theirs[name].equal(ours) for name, ours in one.model.items())


def wait_for(ran, site, what, count):
    """Wait until the journal of a run that goes on has so many events or actions of a kind."""
    journal = site.folder / "journal.jsonl"

    def happened():
        assert ran.poll() is None, ran.said
        return journal.exists() and journal.read_text().count(f'"kind":"{what}"') >= count

    wait_until(happened)


def goes_on(ran, site):
    """Wait until the run has made some versions more."""
    journal = site.folder / "journal.jsonl"
    wait_for(ran, site, "apply", 20 + (journal.read_text().count('"kind":"apply"') if journal.exists() else 0))


def require_sound(site):
    """The journal keeps every law."""
    assert foreign_checker.faults(foreign_checker.read(site.folder / "journal.jsonl")) == []


ELASTIC = ("--strategy", "asp", "--journal", "journal.jsonl")


def test_workers_join_when_machines_appear_leave_when_they_vanish_and_ctrl_c_ends_all(cluster, folder, nothing_left):
    with Site(folder, SCRIPT, epochs=400, pause=0.01) as site:
        ran = run_on(cluster, site, "--workers", "2..3", *ELASTIC)
        wait_for(ran, site, "joined", 2)
        machine = cluster.add(cpus=1).wait()
        wait_for(ran, site, "joined", 3)  # it had been asked for from the beginning, and there was no room
        machine.kill()
        ran.wait_for("another one is asked for")
        wait_for(ran, site, "left", 1)
        goes_on(ran, site)
        machine = cluster.add(cpus=1).wait()
        wait_for(ran, site, "joined", 4)  # the others have not been started again
        ran.signal(signal.SIGINT)
        assert ran.end() == 130, ran.said
        assert not [title for title in cluster.head.processes().values() if "paceline: " in title]
        machine.kill()
        require_sound(site)
    for left in nothing_left.temporary.glob("paceline-*"):  # of the machine without power: nobody was left to remove it
        shutil.rmtree(left)


@pytest.mark.usefixtures("nothing_left")
def test_a_worker_that_dies_comes_back_in_an_actor_of_its_own_and_a_server_from_its_checkpoint(cluster, folder):
    with Site(folder, SCRIPT, epochs=30, pause=0.01) as site:
        ran = run_on(cluster, site, "--workers", "2", *ELASTIC, "--respawn", "--checkpoint-every", "20v")
        goes_on(ran, site)
        by_title = {title: pid for pid, title in cluster.head.processes().items()}
        (worker,) = [pid for title, pid in by_title.items() if "paceline: worker 1" in title]
        (server,) = [pid for title, pid in by_title.items() if "paceline: server" in title]
        os.kill(worker, signal.SIGKILL)
        ran.wait_for("runs worker 1", 2)
        goes_on(ran, site)
        os.kill(server, signal.SIGKILL)
        ran.wait_for("going on from")
        site.hurry()
        assert ran.end() == 0, ran.said
        require_sound(site)
        assert site.report["samples_used"] == 30 * 400
        assert len(set(actors_of(ran, "worker 1"))) == 2


@pytest.mark.usefixtures("nothing_left")
def test_shards_in_actors_of_their_own_go_back_together_to_the_bits_of_one_machine(cluster, folder):
    """Whichever dies, a shard's process or an actor; there is room for the successor where the dead one was, alone."""
    with Site(folder, SCRIPT, epochs=10, pause=0.05) as site:
        ran = run_on(
            cluster, site, "--workers", "2", "--servers", "3", "--remote-shards", "2", "--checkpoint-every", "5v",
            "--worker-resources", "CPU=0.5", "--shard-resources", "CPU=0.5", "--journal", "journal.jsonl",
        )  # fmt: skip
        require_hidden(cluster, ran, PREFIX, shards=3)
        for count, kill in enumerate((kill_shard, kill_actor), start=1):
            begun = {path.name for path in folder.glob("runs/*/checkpoints/v*")}
            wait_until(lambda begun=begun: {path.name for path in folder.glob("runs/*/checkpoints/v*")} - begun)
            kill(cluster, ran)
            ran.wait_for("of the server was killed by SIGKILL: going on from", count)
            goes_on(ran, site)
        site.hurry()
        assert ran.end() == 0, ran.said
        require_sound(site)
        theirs = site.model
        assert "shares memory with the server" not in ran.said
        assert ran.said.count("running worker") == 2
        held = {number: set(actors_of(ran, f"shard {number}")) for number in (1, 2)}
        assert len(held[1] | held[2]) == 4  # two at first, and one for each that was killed
        here = folder / "local"
        here.mkdir()
    with Site(here, SCRIPT, epochs=10, pause=0) as one:
        command = one.run_here("--workers", "2", "--servers", "3")
        assert command.end() == 0, command.said
        assert all(theirs[name].equal(ours) for name, ours in one.model.items())


def kill_shard(cluster, _ran):
    (pid,) = [pid for pid, title in cluster.head.processes().items() if "paceline: shard 1" in title]
    os.kill(pid, signal.SIGKILL)


def kill_actor(_cluster, ran):
    os.kill(int(actors_of(ran, "shard 2")[-1]), signal.SIGKILL)


def actors_of(ran, what):
    """The processes of the actors that have run this worker or shard, the last one last."""
    return re.findall(rf"\(PacelineAgent pid=(\d+)\).*running {what}", ran.said)


@pytest.mark.usefixtures("nothing_left")
def test_a_program_that_is_connected_to_ray_launches_functions_on_tables_and_without_a_server(cluster, folder):
    (folder / "job.py").write_text(JOB)
    (folder / "mine.py").write_text(own("paceline.strategies.peers.gossip:Gossip"))
    environment = {**os.environ, **cluster.environment, "RAY_ADDRESS": cluster.address}
    done = warm_python.run([sys.executable, "job.py"], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ray ray 2 sum: 6.0 nodes: 2 connected: True"


def test_what_never_comes_is_named_with_what_the_cluster_has(cluster, folder):
    with Site(folder, SCRIPT) as site:
        ran = run_on(cluster, site, "--workers", "2", "--worker-resources", "CPU=1,tpu=4", "--resource-timeout", "1")
        assert ran.end() == 2, ran.said
        assert "asked for CPU=1 for the server, on this machine" in ran.said
        # Ray may still count machines that earlier tests have killed.
        has = r"2 times CPU=1,tpu=4 for workers; the cluster has \d machines?, CPU=\d \(\d free\), GPU=2 \(2 free\)"
        assert re.search(has, ran.said), ran.said
        beside = run_on(cluster, site, "--workers", "1", "--working-dir", str(folder / "runs"))
        assert beside.end() == 2, beside.said
        assert "train.py is not in it; give a folder above the script" in beside.said
