"""What a person sees of a lab: a run by several hosts, a table of rates, and commands with the host's name in front."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import leaks
import pytest
import ray_clusters

import netlab
import netlab_demo

DEMO = [sys.executable, str(Path(netlab_demo.__file__))]


@pytest.fixture(autouse=True)
def possible() -> None:
    netlab.require()


def test_the_table_has_every_pair_and_the_switch_has_seen_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert netlab_demo.main(["--hosts", "2", "--rate", "20mbit", "--rates"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["host0", "host1"], ["host1", "host0"]]
    for row in rows:
        sent, counted = map(float, row[3:])
        assert 0 < sent < counted


@pytest.mark.slow
def test_by_default_one_host_serves_and_the_others_join(capsys: pytest.CaptureFixture[str]) -> None:
    assert netlab_demo.main([]) == 0
    shown = capsys.readouterr().out
    for host in ("host1", "host2"):
        assert f"host0 | paceline: {host} runs worker" in shown
        assert f"{host} | paceline: joined 10.77.0.1:7000" in shown
    assert "host0 | dasp · hosts · 2 workers" in shown
    counted = [line.strip("| ").split(" | ") for line in shown.splitlines() if line.startswith("| host")]
    cables = {row[0]: [float(number.replace(",", "")) for number in row[2:]] for row in counted[1:]}
    assert cables.keys() == {"host0", "host1", "host2"}
    for number in (0, 1):  # what one host sends the others receive
        assert cables["host0"][number] == pytest.approx(
            cables["host1"][1 - number] + cables["host2"][1 - number], rel=0.1
        )


@pytest.mark.slow
@pytest.mark.soak
def test_with_ray_a_cluster_spans_the_hosts(
    capfd: pytest.CaptureFixture[str], folder: Path, nothing_left: leaks.Watch
) -> None:
    ray_clusters.require()
    assert netlab_demo.main(["--ray", "--servers", "2"]) == 0
    shown = capfd.readouterr()
    assert "dasp · ray · 2 workers" in shown.out
    assert "host0 $ paceline run --engine ray --workers 2 --strategy dasp --servers 2" in shown.out
    for host in ("host1", "host2"):
        assert f"{host} runs worker" in shown.err


def test_commands_run_on_their_hosts_and_know_the_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert netlab_demo.main(["--rate", "none", "hostname", "hostname; A=b; echo ${A} {host0}"]) == 0
    assert set(capsys.readouterr().out.splitlines()) == {
        "host0 | host0", "host0 | (ended with code 0)",
        "host1 | host1", "host1 | b 10.77.0.1", "host1 | (ended with code 0)",
    }  # fmt: skip


def test_the_first_failure_ends_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert netlab_demo.main(["exec sleep 3600", "exit 7"]) == 7
    shown = capsys.readouterr().out
    assert "host0 | (ended with code -9)" in shown
    assert "host1 | (ended with code 7)" in shown


def test_an_interrupt_reaches_the_commands_and_they_may_end_by_themselves() -> None:
    patient = "trap 'echo ending; exit 0' INT; echo started; while true; do sleep 0.1; done"
    with subprocess.Popen([*DEMO, patient], stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline() == "host0 | started\n"
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.stdout.read().splitlines() == ["host0 | ending", "host0 | (ended with code 0)"]
    assert demo.returncode == 0


def test_too_many_commands_and_too_few_hosts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        netlab_demo.main(["--hosts", "1", "true", "true"])
    assert "2 commands for 1 hosts; raise --hosts" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        netlab_demo.main(["--hosts", "1"])
    assert "--hosts must be >= 2, not 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="such as 100mbit, not 'fast'"):
        netlab_demo.main(["--rate", "fast"])
