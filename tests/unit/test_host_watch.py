"""What a worker sees of its host: load, stolen time and throttling, from the files of both kinds of control groups."""

import msgspec
import pytest

from paceline.core.events import HostLoad, Pushed
from paceline.strategies.interference import LEVEL_PUSHES, LOADED_PUSHES, Interference
from paceline.worker import host_watch
from paceline.worker.host_watch import EVERY_S, HostWatch


class Host:
    """Files of a host, and a clock."""

    def __init__(self, folder, group="0::/job", place="job", stat="nr_throttled 0\nthrottled_usec 0\n"):
        self.now, self.load, self.looks = 100.0, 0.0, 0
        self.proc, self.cgroups = folder / "proc", folder / "cgroups"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text(f"3:memory:/job\n{group}\n")
        self.limits = self.cgroups / place / "cpu.stat"
        self.limits.parent.mkdir(parents=True)
        self.limits.write_text(stat)
        self.cpu(0, 0)
        self.watch = HostWatch(self.proc, self.cgroups, lambda: self.now, self.averages)
        self.watch._cores = 4

    def averages(self):
        self.looks += 1
        return self.load, 0.0, 0.0

    def cpu(self, busy, stolen):
        """So many ticks since the start, of which guests' time is counted twice by the system."""
        (self.proc / "stat").write_text(f"cpu  {busy} 0 0 0 0 0 0 {stolen} {busy // 2} 0\ncpu0 1 2 3\nintr 5\n")


def test_load_is_per_core_and_shares_are_of_the_time_between_two_looks(tmp_path):
    host = Host(tmp_path)
    host.load = 6.0
    assert host.watch.sample() == HostLoad(1.5, 0.0, 0.0), "nothing to compare with yet"
    host.now += 2.0
    host.cpu(750, 250)
    host.limits.write_text("usage_usec 99\nnr_periods 9\nnr_throttled 4\nthrottled_usec 500000\n")
    assert host.watch.sample() == HostLoad(1.5, 0.25, 0.25)
    host.now += 2.0
    assert host.watch.sample() == HostLoad(1.5, 0.0, 0.0)


def test_many_pushes_cost_one_look(tmp_path):
    host = Host(tmp_path)
    for _ in range(100):
        host.watch.sample()
        host.now += EVERY_S / 50
    assert host.looks == 2


@pytest.mark.parametrize(
    ("group", "place"),
    [
        ("0::/job", "job"), ("0::/a/b", ""), ("1:cpu,cpuacct:/job", "cpu,cpuacct/job"), ("1:cpu:/", "cpu"),
        ("1:cpuacct,cpu:/of/a/container", "cpu"),
    ],
)  # fmt: skip
def test_the_groups_limit_is_found_in_either_version(tmp_path, group, place):
    first = "throttled_time 5000000000\n" if "cpu" in group else "throttled_usec 5000000\n"
    host = Host(tmp_path, group, place, first)
    host.watch.sample()
    host.now += 1.0
    host.limits.write_text(first.replace("5", "6"))
    assert host.watch.sample().throttled == 1.0
    host.limits.unlink()
    host.now += 1.0
    assert host.watch.sample().throttled == 0.0, "a group that is gone limits nothing"


def test_what_a_system_does_not_tell_is_zero_or_no_sample(tmp_path):
    nothing = HostWatch(tmp_path, tmp_path, lambda: 0.0, lambda: (0.5, 0.0, 0.0))
    assert nothing.sample().steal == 0.0
    assert HostWatch(tmp_path, tmp_path, lambda: 0.0, None).sample() is None

    def refused():
        raise OSError("no load average")

    assert HostWatch(tmp_path, tmp_path, lambda: 0.0, refused).sample() is None


def test_this_machine_is_seen():
    mine = host_watch.host_watch()
    assert mine is host_watch.host_watch(), "one for the process"
    seen = mine.sample()
    assert seen.load >= 0.0
    assert 0.0 <= seen.steal <= 1.0
    assert 0.0 <= seen.throttled <= 1.0


def push(compute_s, host=None):
    pushed = Pushed(0.0, 0, 1, 1, 0, 8, compute_s, 0.0, 0.0, 0, 0)
    return pushed if host is None else msgspec.structs.replace(pushed, host=host)


def test_a_push_without_a_sample_has_none_in_the_journal_and_old_journals_are_read():
    bare = msgspec.json.encode(push(1.0))
    assert b"host" not in bare
    assert not msgspec.json.decode(bare, type=Pushed).host
    sampled = push(1.0, HostLoad(0.5, 0.25, 0.0))
    assert msgspec.json.encode(sampled).endswith(b',"host":[0.5,0.25,0.0]}')
    assert msgspec.json.decode(msgspec.json.encode(sampled), type=Pushed) == sampled


LOADS = [HostLoad(1.1), HostLoad(0.1, steal=0.2), HostLoad(0.1, throttled=0.4)]


@pytest.mark.parametrize("loaded", LOADS)
def test_overdue_pushes_of_a_loaded_host_are_no_level_before_there_are_many(loaded):
    calm, judged = HostLoad(0.1), Interference()
    judged.judge(push(1.0, calm), 8, 8, 4.0, 3)
    for times in (4.0, 3.0):
        verdicts = [judged.judge(push(times, loaded), 8, 8, 4.0, 3) for _ in range(LOADED_PUSHES - 1)]
        assert set(verdicts) == {"overdue"}
        assert judged.monitor.time(0) == pytest.approx(1.0), "a short interference leaves no trace"
        assert judged.judge(push(1.0, calm), 8, 8, 4.0, 3) == "in time"
    verdicts = [judged.judge(push(3.0, loaded), 8, 8, 4.0, 3) for _ in range(LOADED_PUSHES)]
    assert verdicts == ["overdue"] * (LOADED_PUSHES - 1) + ["level"]
    assert judged.monitor.time(0) == pytest.approx(3.0)
    assert judged.judge(push(3.0, loaded), 8, 8, 4.0, 3) == "in time"


def test_pushes_without_load_are_a_level_among_those_with_it():
    calm, judged = HostLoad(0.1), Interference()
    judged.judge(push(1.0, calm), 8, 8, 4.0, 3)
    for _ in range(LEVEL_PUSHES - 1):
        assert judged.judge(push(4.0, calm), 8, 8, 4.0, 3) == "overdue"
    assert {judged.judge(push(8.0, LOADS[0]), 8, 8, 4.0, 3) for _ in range(3)} == {"overdue"}
    assert judged.judge(push(4.0, calm), 8, 8, 4.0, 3) == "level", "nobody else is there: the node is slower"
    assert judged.monitor.time(0) == pytest.approx(4.0), "of the pushes without load alone"


def test_hosts_are_not_asked_while_most_nodes_are_slow():
    calm, judged = HostLoad(0.1), Interference()
    rounds = [[1.0, calm], *[[4.0, LOADS[0]]] * (LEVEL_PUSHES + 1)]
    for seconds, host in rounds:
        for worker in range(5):
            judged.judge(msgspec.structs.replace(push(seconds, host), worker=worker), 8, 8, 4.0, 8)
    assert [judged.monitor.time(worker) for worker in range(5)] == pytest.approx([4.0] * 5)
    assert (judged.disturbed, judged.slower) == ({}, {})


def test_a_node_that_waited_for_data_goes_on_with_its_count():
    judged = Interference()
    judged.judge(push(1.0), 8, 8, 4.0, 3)
    for _ in range(LEVEL_PUSHES - 1):
        assert judged.judge(push(4.0), 8, 8, 4.0, 3) == "overdue"
        judged.pause(0)
        assert judged.disturbed == {}
    assert judged.judge(push(4.0), 8, 8, 4.0, 3) == "level"


def test_the_runs_own_load_is_the_usual_one():
    judged = Interference()
    for load in (0.0, 0.6, 1.2, 1.8, *[2.0] * 20):  # four workers on two cores, as the average of a minute rises
        judged.judge(push(1.0, HostLoad(load)), 8, 8, 4.0, 3)
    assert judged.usual_load[0] == pytest.approx(2.0, abs=0.05)
    verdicts = [judged.judge(push(4.0, HostLoad(2.1)), 8, 8, 4.0, 3) for _ in range(LEVEL_PUSHES)]
    assert verdicts[-1] == "level"
    judged.forget(0)
    assert judged.usual_load == {}
