"""`paceline serve` and `paceline join` on hosts of a lab: bytes on cables, cuts, kills, and a host without power."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leaks
import pytest
import warm_python
from hosts import Site, processes_of, wait_until

import netlab
from attacks import foreign_checker
from bench_lab_chaos import living
from netlab import Lab

pytestmark = pytest.mark.slow

SAMPLES, BATCH = 400, 5
SCRIPT = """
import os, time
import torch
import paceline
from torch.utils.data import TensorDataset

session = paceline.init()
torch.manual_seed(1)
x = torch.randn(400, 6)
data = TensorDataset(x, x @ torch.randn(6, 1))
model = torch.nn.Sequential(torch.nn.Linear(6, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
session.prepare(model, optimizer)
for x, y in session.batches(data, batch_size=5, epochs={epochs}):
    time.sleep(0.0 if os.path.exists("hurry") else {pause})
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    session.report(loss=loss)
    optimizer.step()
"""
GRADIENT_BYTES = 4 * (6 * 1000 + 1000 + 1000 + 1)


@pytest.fixture
def lab(warm: type[warm_python.Popen], nothing_left: leaks.Watch) -> Iterator[Lab]:
    netlab.require()
    with Lab(hosts=3, rate="100mbit") as made:
        yield made


def loopback_bytes(host: netlab.Host) -> int:
    """Bytes that a host has sent to itself over TCP or otherwise."""
    lines = host.run(["cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout.splitlines()
    (counted,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:"))
    return int(counted[8])


def versions(site: Site) -> int:
    """Versions that the run's journal has so far."""
    journal = site.run / "journal.jsonl"
    return journal.read_text().count('"kind":"apply"') if journal.exists() else 0


def end_of(site: Site) -> dict[str, Any]:
    """The last line of the journal."""
    *_, last = (site.run / "journal.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(last)["data"]
    return found


def test_three_hosts_train_to_the_bits_of_one_and_every_gradient_crosses_a_cable(lab: Lab, folder: Path) -> None:
    with Site(folder, SCRIPT, epochs=2, pause=0, lab=lab) as site:
        serve = site.serve("--workers", "3")
        joined = [site.join(host=host) for host in lab.hosts]
        assert [serve.end(), *(each.end() for each in joined)] == [0, 0, 0, 0], serve.said
        assert serve.said.count("over the network") == 2
        assert serve.said.count("host0 runs worker") == serve.said.count("shares memory with the server") == 1
        pushes = {entry["worker"]: entry["clock"] for entry in site.report["per_worker"]}
        assert min(pushes.values()) > 0.9 * 2 * SAMPLES / BATCH / 3
        bytes_of_one = GRADIENT_BYTES * min(pushes.values())
        for host in lab.hosts[1:]:
            assert bytes_of_one < host.bytes_sent() < 2 * bytes_of_one
            assert bytes_of_one < host.bytes_received() < 2 * bytes_of_one
        assert loopback_bytes(lab.hosts[0]) < bytes_of_one / 4
        here = folder / "local"
        here.mkdir()
    with Site(here, SCRIPT, epochs=2, pause=0) as one:
        command = one.run_here("--workers", "3")
        assert command.end() == 0, command.said
        ours, theirs = one.model, site.model
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].equal(ours[name]) for name in ours)


def test_tensors_go_between_the_hosts_of_workers_and_shards_and_a_killed_shard_is_back(lab: Lab, folder: Path) -> None:
    """The serving host sees commands, and the model when it begins, at a checkpoint and at the end."""
    with Site(folder, SCRIPT, epochs=2, pause=0, lab=lab) as site:
        serve = site.serve("--workers", "1", "--servers", "2", "--remote-shards", "2", "--checkpoint-every", "60v")
        shards = [site.hold(host=lab.hosts[2]) for _ in range(2)]
        worker = site.join(host=lab.hosts[1])
        wait_until(lambda: len(list(folder.glob("runs/*/checkpoints/v*"))) > 0)
        for pid in processes_of(shards[1], "shard"):
            os.kill(pid, signal.SIGKILL)
        assert [serve.end(), worker.end(), *(each.end() for each in shards)] == [0, 0, 0, 0], serve.said
        assert "of the server was killed by SIGKILL: going on from" in serve.said
        sent = GRADIENT_BYTES * 2 * SAMPLES / BATCH
        for host in lab.hosts[1:]:
            assert min(host.bytes_sent(), host.bytes_received()) > sent
        assert max(lab.hosts[0].bytes_sent(), lab.hosts[0].bytes_received()) < sent / 2
        here = folder / "local"
        here.mkdir()
    with Site(here, SCRIPT, epochs=2, pause=0) as one:
        command = one.run_here("--workers", "1")
        assert command.end() == 0, command.said
        ours, theirs = one.model, site.model
    assert all(theirs[name].equal(ours[name]) for name in ours)


def test_a_host_that_is_cut_off_for_a_while_comes_back_and_every_sample_is_settled(lab: Lab, folder: Path) -> None:
    with Site(folder, SCRIPT, epochs=20, pause=0.05, lab=lab) as site:
        serve = site.serve("--workers", "3", "--strategy", "asp", "--worker-timeout", "3")
        joined = [site.join(host=host) for host in lab.hosts]
        wait_until(lambda: serve.said.count("runs worker") == 3 and versions(site) > 30)
        lab.hosts[2].cut()
        serve.wait_for("the others go on")
        seen = versions(site)
        wait_until(lambda: versions(site) > seen + 20)
        lab.hosts[2].heal()
        serve.wait_for("is back after")
        (folder / "hurry").touch()
        assert [serve.end(), *(each.end() for each in joined)] == [0, 0, 0, 0], serve.said
        assert foreign_checker.faults(foreign_checker.read(site.run / "journal.jsonl")) == []
        end = end_of(site)
        assert end["samples_used"] + end["samples_lost"] == 20 * SAMPLES
        assert end["samples_lost"] == 0
        assert site.report["faults"]["timeouts"]


def test_the_others_go_on_without_a_host_that_loses_power(lab: Lab, folder: Path, nothing_left: leaks.Watch) -> None:
    with Site(folder, SCRIPT, epochs=8, pause=0.05, lab=lab) as site:
        serve = site.serve("--workers", "3", "--worker-timeout", "3")
        joined = [site.join(host=host) for host in lab.hosts]
        wait_until(lambda: serve.said.count("runs worker") == 3 and versions(site) > 10)
        lab.hosts[1].cut()  # so that nothing of its end reaches the others
        lab.hosts[1].kill()
        serve.wait_for("the others go on")
        (folder / "hurry").touch()
        assert [serve.end(), joined[0].end(), joined[2].end()] == [0, 0, 0], serve.said
        assert foreign_checker.faults(foreign_checker.read(site.run / "journal.jsonl")) == []
        assert end_of(site)["samples_used"] == 8 * SAMPLES
    for left in nothing_left.temporary.glob("paceline-*"):  # of the host without power: nobody was left to remove it
        shutil.rmtree(left)


def test_a_worker_and_the_server_are_killed_and_a_cable_is_cut(lab: Lab, folder: Path) -> None:
    """A minute's share of benchmarks/bench_lab_chaos.py; the server dies while a host is cut off."""
    with Site(folder, SCRIPT, epochs=12, pause=0.05, lab=lab) as site:
        serve = site.serve("--workers", "2", "--respawn", "--checkpoint-every", "5v")
        joined = [site.join(host=host) for host in lab.hosts[1:]]
        wait_until(lambda: len(list(folder.glob("runs/*/checkpoints/v*"))) > 1)
        by_name = {name: pid for pid, name in living(lab).items()}
        os.kill(by_name["worker 1"], signal.SIGKILL)
        wait_until(lambda: sum(each.said.count("running worker") for each in joined) == 3)
        seen = versions(site)
        wait_until(lambda: versions(site) > seen + 10)
        lab.hosts[1].cut()
        os.kill(by_name["server"], signal.SIGKILL)
        serve.wait_for("going on from")
        time.sleep(0.5)  # so that something is sent into the cut
        lab.hosts[1].heal()
        seen = versions(site)
        wait_until(lambda: versions(site) > seen + 10)
        assert by_name["worker 0"] in living(lab)
        (folder / "hurry").touch()
        assert [serve.end(), *(each.end() for each in joined)] == [0, 0, 0], serve.said
        assert sum(each.said.count("running worker") for each in joined) == 3
        journal = foreign_checker.read(site.run / "journal.jsonl")
        assert foreign_checker.faults(journal, whole=True) == []
        first, restart = (place for place, line in enumerate(journal) if line["type"] == "header")
        restored = journal[restart]["restored"]
        assert journal[first]["restored"] is None
        assert restored is not None
        applied = sum(action["kind"] == "apply" for line in journal[:restart] for action in line.get("actions", ()))
        told = [line["data"]["versions"] for line in journal if line.get("what") == "rolled_back"]
        assert sum(told) == applied - restored["version"]
        assert end_of(site)["samples_used"] == 12 * SAMPLES
