"""Workers that join a run from outside, by real commands on this host: near ones share memory, far ones use TCP."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from hosts import Site, processes_of, wait_until
from safetensors.torch import load_file

from paceline.core.actions import Apply
from paceline.core.events import Pushed
from paceline.engines.local.launcher import RESTARTS
from paceline.records import journal

pytestmark = pytest.mark.slow


@pytest.fixture
def site(folder, warm, nothing_left):
    with Site(folder, epochs=2, pause=0.0) as made:
        yield made


@pytest.fixture
def long_site(folder, warm, nothing_left):
    """Runs that last until something happens to them."""
    with Site(folder, epochs=60, pause=0.05) as made:
        yield made


def model_of(folder, what="model"):
    (path,) = folder.glob(f"runs/*/{what}.safetensors")
    return load_file(path)


def test_near_and_far_workers_train_to_the_bits_of_processes_of_one_machine(site, folder):
    serve = site.serve("--workers", "2")
    joined = [site.join(far=True), site.join()]
    assert [serve.end(), *(each.end() for each in joined)] == [0, 0, 0], serve.said
    assert "over the network" in serve.said
    assert "shares memory with the server" in serve.said
    theirs = site.model
    assert site.report["engine"] == "hosts"
    here = folder / "local"
    command = site.run_here("--workers", "2", "--runs-dir", here / "runs")
    assert command.end() == 0, command.said
    ours = model_of(here)
    assert all(theirs[name].equal(ours[name]) for name in ours)


def test_workers_come_leave_and_die_while_the_others_go_on(long_site):
    serve = long_site.serve("--workers", "1..", "--strategy", "asp", "--max-versions", "600")
    first = long_site.join(far=True)
    serve.wait_for("runs worker 0")
    leaver, victim = long_site.join(far=True), long_site.join()
    serve.wait_for("runs worker", 3)
    for each in (leaver, victim):
        each.wait_for("running worker")
    leaver.signal(signal.SIGINT)
    assert leaver.end() == 130
    serve.wait_for("leaves, as the user of its machine asks")
    victim.signal(signal.SIGKILL)
    serve.wait_for("has closed its connection")
    long_site.hurry()
    assert serve.end() == 0, serve.said
    assert first.end() == 0, first.said
    assert long_site.report["versions"] == 600


COUNT = """    optimizer.step()
    with open(f"steps{session.worker}", "ab") as steps:
        steps.write(b".")
"""


def test_a_killed_server_is_found_again_by_workers_that_joined(long_site):
    script = long_site.folder / "train.py"
    script.write_text(script.read_text().replace("    optimizer.step()\n", COUNT))
    serve = long_site.serve("--workers", "2", "--checkpoint-every", "5v", "--max-versions", "100")
    joined = [long_site.join(far=True), long_site.join()]
    wait_until(lambda: len(list(long_site.folder.glob("runs/*/checkpoints/v*"))) > 1)
    for pid in processes_of(serve, "server"):
        os.kill(pid, signal.SIGKILL)
    serve.wait_for("going on from")
    long_site.hurry()
    assert [serve.end(), *(each.end() for each in joined)] == [0, 0, 0], serve.said
    assert "the others go on" not in serve.said  # no worker was lost
    lines = list(journal.read(long_site.run / "journal.jsonl"))
    (restart,) = [place for place, line in enumerate(lines) if isinstance(line, journal.Header)][1:]
    # What workers know to be answered is in the journal, of the last moment before the kill, too, and told.
    steps = sum(path.stat().st_size for path in long_site.folder.glob("steps?"))
    pushed = [line for line in lines if isinstance(line, journal.Decision) and isinstance(line.event, Pushed)]
    assert steps - 2 <= len(pushed)  # each worker's push at the time of the kill was lost
    applied = [line for line in lines[:restart] if any(isinstance(a, Apply) for a in getattr(line, "actions", ()))]
    told = [line.data for line in lines if isinstance(line, journal.Observation) and line.what == "rolled_back"]
    assert sum(each["versions"] for each in told) == len(applied) - lines[restart].restored.version


LOADS = """import os, time
while os.path.exists("alone") and not os.path.exists("hurry"):
    time.sleep(0.02)
"""


def test_a_server_that_dies_again_and_again_while_no_worker_is_there_or_all_load_is_found_by_the_next(long_site):
    """Nobody could come further from the checkpoint, so no restart from it was in vain."""
    script = long_site.folder / "train.py"
    script.write_text(LOADS + script.read_text())
    serve = long_site.serve("--workers", "1", "--checkpoint-every", "5v", "--max-versions", "40")
    lost = long_site.join()
    wait_until(lambda: len(list(long_site.folder.glob("runs/*/checkpoints/v*"))) > 1)
    lost.signal(signal.SIGKILL)
    serve.wait_for("no worker is left")
    (long_site.folder / "alone").touch()
    joined = None
    for count in range(1, RESTARTS + 5):
        if count == 3:
            joined = long_site.join()
            joined.wait_for("running worker")
        wait_until(lambda: processes_of(serve, "server"))
        (pid,) = processes_of(serve, "server")
        wait_until(lambda pid=pid: serves(pid))
        os.kill(pid, signal.SIGKILL)
        serve.wait_for("going on from", count)
    long_site.hurry()
    assert [serve.end(), joined.end()] == [0, 0], serve.said
    assert long_site.report["versions"] == 40


def serves(pid):
    """Whether a process listens for workers, which a server does last before it serves."""
    listening = {line.split()[9] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines() if " 0A " in line}
    opened = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            opened.add(str(link.readlink()))
    return any(f"socket:[{inode}]" in opened for inode in listening)


def test_shards_serve_near_and_far_workers_and_go_back_together(site, folder):
    """To the bits of one server that nothing happens to."""
    serve = site.serve("--workers", "2", "--servers", "2", "--checkpoint-every", "5v")
    joined = [site.join(far=True), site.join()]
    wait_until(lambda: len(list(folder.glob("runs/*/checkpoints/v*"))) > 1)
    for pid in processes_of(serve, "shard 1"):
        os.kill(pid, signal.SIGKILL)
    serve.wait_for("shard 1 of the server was killed by SIGKILL: going on from")
    assert [serve.end(), *(each.end() for each in joined)] == [0, 0, 0], serve.said
    here = folder / "local"
    command = site.run_here("--workers", "2", "--runs-dir", here / "runs")
    assert command.end() == 0, command.said
    ours, theirs = model_of(here), site.model
    assert all(theirs[name].equal(ours[name]) for name in ours)


def test_shards_of_other_machines_go_back_together_whichever_dies(site, folder):
    """To the bits of one server that nothing happens to; an evaluator, near and far workers, one shard here."""
    serve = site.serve(
        "--workers", "2", "--servers", "3", "--remote-shards", "2", "--checkpoint-every", "5v", "--evaluate-every", "9v"
    )
    joined = [site.join(far=True), site.join()]
    serve.wait_for("waiting for 2 more shards to join")
    shards = [site.hold(far=True), site.hold()]
    wait_until(lambda: len(list(folder.glob("runs/*/checkpoints/v*"))) > 1)
    for pid in processes_of(shards[0], "shard"):
        os.kill(pid, signal.SIGKILL)
    serve.wait_for("of the server was killed by SIGKILL: going on from")
    assert [serve.end(), *(each.end() for each in [*joined, *shards])] == [0] * 5, serve.said
    assert "shares memory with the server" not in serve.said
    here = folder / "local"
    command = site.run_here("--workers", "2", "--runs-dir", here / "runs")
    assert command.end() == 0, command.said
    ours, theirs = model_of(here), site.model
    assert all(theirs[name].equal(ours[name]) for name in ours)


def test_a_lost_machine_of_a_shard_is_waited_for_and_workers_keep_their_processes(long_site, folder):
    serve = long_site.serve(
        "--workers", "1", "--servers", "2", "--remote-shards", "1", "--checkpoint-every", "5v", "--max-versions", "60"
    )
    lost, worker = long_site.hold(far=True), long_site.join(far=True)
    wait_until(lambda: len(list(folder.glob("runs/*/checkpoints/v*"))) > 1)
    lost.signal(signal.SIGKILL)
    serve.wait_for("waiting for 1 more shard to join", 2)
    leaver, spare = long_site.hold(far=True), long_site.hold(far=True)
    serve.wait_for("stands by")
    serve.wait_for("phase 0", 2)
    leaver.signal(signal.SIGINT)
    spare.signal(signal.SIGINT)  # of these two one holds the shard
    serve.wait_for("leaves with shard 1, as its user asks")
    assert [leaver.end(), spare.end()] == [130, 130]
    serve.wait_for("waiting for 1 more shard to join", 3)
    last = long_site.hold(far=True)
    long_site.hurry()
    assert [serve.end(), worker.end(), last.end()] == [0, 0, 0], serve.said
    assert worker.said.count("running worker") == 1
    assert long_site.report["versions"] == 60


def test_a_run_that_waits_for_a_shard_can_be_interrupted(site):
    serve = site.serve("--workers", "1", "--servers", "2", "--remote-shards", "2")
    serve.wait_for("waiting for 2 more shards to join")
    shard, worker = site.hold(far=True), site.join(far=True)
    serve.wait_for("waiting for 1 more shard to join")
    worker.wait_for("joined")
    serve.signal(signal.SIGINT)
    assert serve.end() == 130, serve.said
    assert shard.end() == 0
    assert "1 shard was missing while the run was being interrupted" in json.dumps(site.report)
    assert worker.end() == 0, worker.said


def test_a_stopped_shard_of_another_machine_does_not_hold_up_an_interrupt(long_site, folder):
    """It goes on and ends with the run, which takes its last checkpoint; nobody has to give it up first."""
    serve = long_site.serve("--workers", "1", "--servers", "2", "--remote-shards", "1", "--checkpoint-every", "5v")
    shard, worker = long_site.hold(far=True), long_site.join(far=True)
    wait_until(lambda: len(list(folder.glob("runs/*/checkpoints/v*"))) > 1)
    (pid,) = processes_of(shard, "shard")
    os.kill(pid, signal.SIGSTOP)
    serve.signal(signal.SIGINT)
    assert serve.end() == 130, serve.said
    assert [shard.end(), worker.end()] == [0, 0]
    assert "interrupted: ending the run" in serve.said
    assert "while the run was being interrupted" not in serve.said


def test_a_shard_of_a_run_that_has_them_all_is_refused(site):
    serve = site.serve("--workers", "1", "--servers", "2")
    refused = site.hold(far=True)
    assert refused.end() == 2
    assert "all shards of this run are on its own machine: see --remote-shards" in refused.said
    serve.signal(signal.SIGINT)
    assert serve.end() == 130


@pytest.mark.parametrize("remote", [0, 1])
def test_tables_in_shards_have_the_bits_of_one_server_near_and_far(site, folder, remote):
    task = ("--task", "lasso")
    given = ("--workers", "2", "--servers", "2", "--remote-shards", remote, *task, "--epochs", "1")
    serve = site.serve(*given, what=())
    joined = [site.join(*task, far=far, what=()) for far in (True, False)]
    joined += [site.hold(far=True) for _ in range(remote)]
    assert [serve.end(), *(each.end() for each in joined)] == [0] * (3 + remote), serve.said
    assert serve.said.count("shares memory with the server") == (0 if remote else 1)
    here = folder / "local"
    given = ("--threads", "1", "--evaluate-every", "off", "--workers", "2", "--runs-dir", here / "runs")
    command = site.command("local", "run", *given, *task, "--epochs", "1")
    assert command.end() == 0, command.said
    ours, theirs = model_of(here, "tables"), model_of(folder, "tables")
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].equal(ours[name]) and ours[name].any() for name in ours)


def test_a_worker_that_dies_comes_back_on_its_machine(long_site):
    serve = long_site.serve("--workers", "2", "--respawn", "--max-versions", "120")
    joined = [long_site.join(far=True), long_site.join()]
    serve.wait_for("phase 0")
    (pid,) = processes_of(joined[0], "worker")
    os.kill(pid, signal.SIGKILL)
    joined[0].wait_for("running worker", 2)
    long_site.hurry()
    assert [serve.end(), *(each.end() for each in joined)] == [0, 0, 0], serve.said


def test_another_script_is_refused_with_both_digests(site, folder):
    serve = site.serve("--workers", "1")
    (folder / "other.py").write_text("print('another')")
    refused = site.join(what=("other.py",))
    assert refused.end() == 2
    assert "it would run other.py (" in refused.said
    assert "this run train.py (" in refused.said
    serve.signal(signal.SIGINT)
    assert serve.end() == 130


@pytest.mark.parametrize("what", [("--strategy", "adaptive_gossip"), ("--task", "lasso")])
def test_nodes_and_tables_go_over_the_network(site, what):
    if Path("/proc/net/if_inet6").exists():  # a machine may have no IPv6
        site.address = site.address.replace("127.0.0.1", "[::1]")
    task = what if what[0] == "--task" else ()
    serve = site.serve(
        "--workers", "2", *what, *(("--epochs", "1") if task else ()), what=() if task else ("train.py",)
    )
    joined = [site.join(*task, far=True, what=() if task else ("train.py",)) for _ in range(2)]
    assert [serve.end(), *(each.end() for each in joined)] == [0, 0, 0], serve.said
