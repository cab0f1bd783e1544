"""`paceline doctor`: every check finds what is planted for it, and a sound machine has nothing to fix."""

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import engines
from paceline.cli import doctor_command, findings, machine_checks, main, package_checks
from paceline.core import worker_count
from paceline.core.errors import OptionError
from paceline.engines.local import fitness, nursery, scratch
from paceline.launching import launch

GIB = 1 << 30
SOUND = {
    "torch": {"built": None, "devices": [], "failed": None, "said": []},
    "zmq": {"curve": True, "version": "4.3.5"},
}


def refusing(number=1, text="planted"):
    def refuse(*_, **__):
        raise OSError(number, text)

    return refuse


@pytest.fixture
def sound(monkeypatch):
    """Packages that can be imported, without importing them."""
    said = {name: {} for name in package_checks.COMPILED} | SOUND
    monkeypatch.setattr(package_checks, "imports", lambda: dict(said))
    monkeypatch.setattr(fitness, "quick_start", lambda: None)
    return said


def checks():
    return {each.name: each for each in doctor_command.findings()}


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_sound_machine_has_nothing_to_fix(sound, capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert "\nnothing stops a run" in out
    assert err == ""
    assert all(line.split()[0] in ("ok", "warning") for line in out.splitlines()[:-2])


def test_json_is_one_object_with_every_check(sound, capsys):
    sound["torch"] = "ImportError: planted"
    assert main(["doctor", "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["fit"], err) == (False, "")
    by_name = {each["name"]: each for each in told["checks"]}
    assert by_name["torch"]["level"] == "problem"
    assert set(by_name) >= {"python", "cores", "memory", "descriptors", "shared memory", "loopback", "ray", "report"}


def test_a_problem_is_told_with_value_bound_and_fix(sound, capsys, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20_000))
    assert main(["doctor"]) == 2
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "descriptors" in each)
    need = fitness.descriptors(worker_count.usual_workers(0))
    assert line.startswith("problem  descriptors    20 (hard limit 20000) (>= ")
    assert f"(>= {need} for" in line
    assert line.endswith(": ulimit -n 4096")


@pytest.mark.fresh
@pytest.mark.slow
def test_a_broken_torch_is_one_line_and_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')\n")
    command = f"ulimit -S -n 24; exec {sys.executable} -m paceline doctor"
    done = subprocess.run(
        ["sh", "-c", command], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "")
    (line,) = (each for each in done.stdout.splitlines() if each.split()[1:2] == ["torch"])
    assert "cannot be imported: OSError: libtorch_cpu.so: cannot open" in line
    assert "pip install --force-reinstall 'torch>=" in line
    assert any(each.startswith("problem  descriptors    24 ") for each in done.stdout.splitlines())
    assert any(each.startswith("warning  devices        unknown") for each in done.stdout.splitlines())


def test_a_check_that_the_system_refuses_is_a_finding():
    found = findings.tried("cores", refusing(24, "Too many open files"))
    assert found == findings.Finding("cores", "problem", "cannot be checked: Too many open files")


def test_a_missing_package_of_the_command_line_itself_is_one_line(tmp_path):
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\", name='msgspec')\n")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "doctor"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: cannot start without msgspec: No module named 'msgspec'; pip install")
    assert done.stderr.count("\n") == 1


def test_colours_are_for_terminals():
    found = findings.Finding("cores", "warning", "1 of 1", ">= 2", "more")
    assert doctor_command.line(found) == "warning  cores          1 of 1 (>= 2): more"
    assert doctor_command.line(found, coloured=True).startswith("\x1b[33mwarning ")


# --- packages ---------------------------------------------------------------------------------------------------------


def test_what_is_declared_is_read_from_the_package():
    found = package_checks.declared()
    assert {each.name for each in found if each.extra is None} >= {"torch", "numpy", "pyzmq", "msgspec", "rich"}
    assert {each.extra for each in found} == {None, "tasks", "ray", "report", "export"}
    assert next(each.bounds for each in found if each.name == "torch").startswith(">=2")


def test_pythons_bound_is_the_packages():
    assert metadata.metadata("paceline")["Requires-Python"] == f">={package_checks.PYTHON}"


@pytest.mark.parametrize(
    ("version", "bounds", "good"),
    [
        ("2.13.0+cpu", ">=2.6,<3", True),
        ("2.5.1", ">=2.6,<3", False),
        ("3.0", ">=2.6,<3", False),
        ("3.0.0rc1", ">=2.6,<3", False),
        ("0.60", ">=0.60,<1", True),
        ("0.6", ">=0.60,<1", False),
        ("26", ">=26.0.0", True),
        ("1.2", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version, bounds, good):
    assert package_checks.fits(version, bounds) is good


def test_an_old_python_is_told(monkeypatch):
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.4")
    found = package_checks.python()
    assert (found.level, found.found, found.bound) == ("problem", "3.10.4", ">=3.11")


@pytest.mark.parametrize(
    ("version", "said", "level", "told", "fix"),
    [
        (None, "ModuleNotFoundError: x", "problem", "not installed", "pip install 'torch>=2.6,<3'"),
        ("2.5.1", {}, "warning", "2.5.1", "pip install 'torch>=2.6,<3'"),
        ("2.7", "ImportError: x", "problem", "2.7, cannot be imported: ImportError: x", "--force-reinstall"),
        ("2.7", {}, "ok", "2.7", ""),
    ],
)
def test_needed_packages(monkeypatch, version, said, level, told, fix):
    monkeypatch.setattr(package_checks, "installed", lambda _: version)
    (found,) = package_checks.needed([package_checks.Requirement("torch", ">=2.6,<3")], {"torch": said})
    assert (found.level, found.found) == (level, told)
    assert fix in found.fix


def test_a_paceline_that_pip_does_not_know_or_knows_otherwise(sound, monkeypatch):
    monkeypatch.setattr(package_checks, "installed", lambda _: "0.0.1")
    assert package_checks.own_version().level == "warning"
    monkeypatch.setattr(package_checks, "installed", lambda _: None)
    assert "not installed" in package_checks.own_version().found
    assert checks()["paceline"].level == "warning"


@pytest.mark.parametrize(
    ("versions", "level", "told"),
    [
        ({}, "ok", "not installed; only TensorBoard's and Parquet's formats need it"),
        ({"tensorboard": "2.20"}, "warning", "tensorboard 2.20, pyarrow not installed"),
        ({"tensorboard": "2.20", "pyarrow": "9.0"}, "warning", "tensorboard 2.20, pyarrow 9.0"),
        ({"tensorboard": "2.20", "pyarrow": "20.0"}, "ok", "tensorboard 2.20, pyarrow 20.0"),
    ],
)
def test_optional_groups(monkeypatch, versions, level, told):
    monkeypatch.setattr(package_checks, "installed", versions.get)
    group = [package_checks.Requirement(name, bounds, "export") for name, bounds in
             (("tensorboard", ">=2.17,<3"), ("pyarrow", ">=17"))]  # fmt: skip
    (found,) = package_checks.extras(group, ["ray"])
    assert (found.level, found.found) == (level, told)
    assert ("pip install 'paceline[export]'" in found.fix) is (level == "warning" or not versions)


def test_an_engine_that_is_not_installed_is_not_missed(monkeypatch):
    monkeypatch.setattr(package_checks, "installed", lambda _: None)
    (found,) = package_checks.extras([package_checks.Requirement("ray", ">=2", "ray")], ["sim", "ray"])
    assert (found.level, found.found) == ("ok", "not installed; only `--engine ray` needs it")


def test_half_a_package_is_not_there(monkeypatch):
    monkeypatch.setattr(package_checks, "installed", lambda _: "6.0")
    monkeypatch.setattr(package_checks, "_is_there", lambda _: False)
    (found,) = package_checks.extras([package_checks.Requirement("plotly", ">=6,<7", "report")], [])
    assert found.found.startswith("not installed; only `paceline report`")


def test_a_module_that_raises_or_kills_is_named_and_the_others_are_imported(tmp_path, monkeypatch):
    (tmp_path / "raises.py").write_text("print('noise'); raise RuntimeError('first\\nsecond')")
    (tmp_path / "kills.py").write_text("import os; os.abort()")
    (tmp_path / "leaves.py").write_text("import os; os._exit(0)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = package_checks.imports(["raises", "kills", "leaves", "json"])
    assert found["raises"] == "RuntimeError: first second"
    assert found["kills"].startswith("importing it kills the process")
    assert found["leaves"].startswith("importing it kills the process")
    assert found["json"] == {}


def test_a_module_that_hangs_is_named(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(package_checks, "LONGEST_IMPORT_S", 2.0)
    assert "takes too long" in package_checks.imports(["hangs"])["hangs"]


def test_facts_come_with_the_import():
    assert package_checks.imports(["zmq"])["zmq"]["curve"] is True


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "words"), [("darwin", "untested"), ("win32", "only --engine sim"), ("sunos", "sim")])
def test_other_systems_are_told(monkeypatch, name, words):
    monkeypatch.setattr(sys, "platform", name)
    found = machine_checks.system()
    assert found.level == "warning"
    assert words in found.fix


@pytest.mark.parametrize(
    ("may", "granted", "level", "fix"),
    [(4, None, "ok", ""), (1, None, "warning", "taskset"), (4, 1.5, "warning", "--cpus"), (4, 8.0, "ok", "")],
)
def test_cores(monkeypatch, may, granted, level, fix):
    monkeypatch.setattr(worker_count, "cores", lambda: may)
    monkeypatch.setattr(machine_checks, "granted_cores", lambda: granted)
    found = machine_checks.cores()
    assert found.level == level
    assert fix in found.fix


@pytest.mark.parametrize(
    ("left", "level"), [(16 * GIB, "ok"), (GIB, "warning"), (GIB // 4, "problem"), (None, "warning")]
)
def test_memory(monkeypatch, left, level):
    monkeypatch.setattr(machine_checks, "available_bytes", lambda: left)
    assert machine_checks.memory(4).level == level


@pytest.mark.parametrize(
    ("soft", "hard", "level", "fix"),
    [
        (20_000, 20_000, "ok", ""),
        (-1, -1, "ok", ""),
        (256, 1 << 20, "warning", "ulimit -n 4096"),
        (256, 512, "warning", "ulimit -n 512"),
        (20, -1, "problem", "ulimit -n 4096"),
        (20, 20, "problem", "raise the hard limit"),
    ],
)
def test_descriptors(monkeypatch, soft, hard, level, fix):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    found = machine_checks.descriptors(4)
    assert found.level == level
    assert fix in found.fix


@pytest.mark.parametrize(
    ("engine", "limits", "fix"),
    [
        ("local", (24, 1024), "ulimit -n 1024"),
        ("local", (24, 24), "raise the hard limit (docker run --ulimit nofile=4096)"),
        ("hosts", (24, 24), "raise the hard limit (docker run --ulimit nofile=4096)"),
    ],
)
def test_a_run_is_refused_that_may_not_open_its_files(monkeypatch, tmp_path, engine, limits, fix):
    """Before it starts anything; engine hosts raises its limit to the hard one by itself."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    listen = {"listen": "127.0.0.1:5555"} if engine == "hosts" else {}
    with pytest.raises(OptionError) as refused:
        launch(lambda: None, engine=engine, workers=2, runs_dir=tmp_path, **listen)
    assert str(refused.value) == (
        f"this process may have 24 files open (hard limit {limits[1]}), and a run of 2 workers needs "
        f">= {fitness.descriptors(2)}: {fix}"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name"), [(os, "memfd_create"), (os, "posix_fallocate"), (fitness.mmap, "mmap")]
)  # fmt: skip
def test_memory_that_cannot_be_shared(monkeypatch, module, name):
    monkeypatch.setattr(module, name, refusing(38, "Function not implemented"))
    found = machine_checks.shared_memory()
    assert found.level == "problem"
    assert "Function not implemented" in found.found
    assert "--transport zeromq" in found.fix


def test_memory_that_is_not_the_same_for_both(monkeypatch):
    monkeypatch.setattr(fitness.mmap, "mmap", lambda _, size: memoryview(bytearray(size)))
    assert machine_checks.shared_memory().found == "what one process writes another does not see"


def test_memory_without_names_is_not_asked_for_elsewhere(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert machine_checks.shared_memory().found == "files of the temporary folder"


def test_little_memory_for_the_processes_of_a_loader(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    found = machine_checks.loader_memory()
    assert found.level == "warning"
    assert "--shm-size" in found.fix
    monkeypatch.setattr(machine_checks, "NAMED_MEMORY", tmp_path / "none")
    assert machine_checks.loader_memory() is None


def test_no_place_for_sockets(monkeypatch):
    before = set(Path(scratch.SHORT).iterdir())
    assert machine_checks.private_sockets().level == "ok"
    assert not [each for each in set(Path(scratch.SHORT).iterdir()) - before if (each / "s").exists()]
    monkeypatch.setattr(scratch, "_unfit", lambda *_: "is full")
    found = machine_checks.private_sockets()
    assert found.level == "problem"
    assert "is full" in found.found


def test_sockets_that_nobody_may_make(monkeypatch):
    monkeypatch.setattr(fitness.socket, "socket", refusing(97, "Address family not supported"))
    found = machine_checks.private_sockets()
    assert found.level == "problem"
    assert "Address family not supported" in found.found


def test_ports_that_cannot_be_listened_at(monkeypatch):
    monkeypatch.setattr(socket, "create_server", refusing(99, "Cannot assign requested address"))
    assert machine_checks.loopback().level == "warning"
    assert "Cannot assign requested address" in machine_checks.loopback().found


def test_an_address_that_nobody_answers_at(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", refusing(110, "Connection timed out"))
    assert "Connection timed out" in machine_checks.loopback().found


def test_a_machine_without_an_address(monkeypatch):
    monkeypatch.setattr(machine_checks, "ELSEWHERE", "255.255.255.255")  # may not be connected to
    found = machine_checks.own_address()
    assert found.level == "warning"
    assert found.found.startswith("none but the loopback's")


@pytest.mark.parametrize(
    ("zmq", "told"), [({"curve": False, "version": "4.3"}, "without CURVE"), ("gone", "no ZeroMQ")]
)
def test_a_zeromq_that_cannot_encrypt(zmq, told):
    found = machine_checks.encryption(zmq)
    assert found.level == "warning"
    assert told in found.found


def test_devices(monkeypatch, tmp_path):
    torch = SOUND["torch"]
    monkeypatch.setattr(machine_checks, "NVIDIA", tmp_path)  # is there
    assert machine_checks.devices("broken").level == "warning"
    found = machine_checks.devices({**torch, "said": ["the driver is\n too old"]})
    assert found.level == "warning"
    assert found.found.endswith(": torch is built without CUDA; the driver is too old")
    found = machine_checks.devices({**torch, "devices": ["H200", "A10"]})
    assert (found.level, found.found) == ("ok", "cuda:0 H200, cuda:1 A10")
    found = machine_checks.devices({**torch, "devices": ["H200"], "failed": "RuntimeError: x"})
    assert (found.level, found.found) == ("problem", "cuda:0 H200, which fails: RuntimeError: x")
    monkeypatch.setattr(machine_checks, "NVIDIA", tmp_path / "none")
    assert machine_checks.devices(torch).found == "no CUDA: processors"


def test_a_system_without_a_nursery(monkeypatch):
    monkeypatch.setattr(nursery, "possible", lambda: False)
    found = machine_checks.quick_start()
    assert found.level == "warning"
    assert "adopt orphans" in found.found


@pytest.mark.slow
def test_a_nursery_that_starts_and_one_that_does_not(monkeypatch, nothing_left):
    assert machine_checks.quick_start().level == "ok"
    monkeypatch.setattr(nursery, "_BEGIN", "import os; os.write({home}, b'torch starts threads') # {path} {launcher}")
    assert machine_checks.quick_start().found == "torch starts threads"


def test_engines_are_asked_without_loading_torch():
    code = (
        "import sys; from paceline import engines; f = engines.fitness(); assert f.shared_memory() is None; "
        "from paceline.cli import machine_checks; machine_checks.loopback(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert engines.fitness() is fitness
