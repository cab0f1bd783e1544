"""The project as others meet it: the wheel, the clone, the promises of its files."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline import __version__
from paceline.cli.app import app

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LARGEST = 500_000  # bytes of a committed file


def files_of_the_project() -> list[Path]:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in found if name and (ROOT / name).is_file()]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_data(wheel: Path) -> None:
    assert wheel.name == f"paceline-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "paceline").rglob("*")
        if path.suffix in (".py", ".toml", ".typed", ".json")
    }
    assert {"paceline/py.typed", "paceline/scenarios/uneven8.toml"} <= expected
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def outside(folder: Path, *command: object, **variables: str) -> str:
    """What a command prints that knows nothing of this checkout; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "PYTHON"))}
    environment.update(variables)
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_and_replay(folder: Path, *paceline: object, **variables: str) -> None:
    """The command trains on two processes, and what it wrote can be replayed."""
    options = ("--task", "digits", "--workers", "2", "--epochs", "1", "--quiet", "--json")
    report = json.loads(outside(folder, *paceline, "run", *options, **variables))
    assert report["workers"] == 2
    assert report["accuracy"] > 0.3  # chance is 0.1
    assert outside(folder, *paceline, "replay", folder / report["journal"], **variables).endswith("all identical\n")


@pytest.mark.slow
@pytest.mark.fresh
def test_the_wheel_trains_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """What it needs from elsewhere is found where the tests have it; an empty environment is made in `make soak`."""
    installed = tmp_path / "installed"
    outside(tmp_path, sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", installed, wheel)
    code = "import paceline; print(paceline.__file__)"
    where = outside(tmp_path, sys.executable, "-c", code, PYTHONPATH=str(installed))
    assert where.startswith(str(installed))
    claims = outside(tmp_path, sys.executable, "-m", "paceline", "strategies", "ssp", PYTHONPATH=str(installed))
    assert "Claims of Ho 2013" in claims
    train_and_replay(tmp_path, sys.executable, "-m", "paceline", PYTHONPATH=str(installed))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.fresh
def test_the_wheel_trains_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    outside(tmp_path, sys.executable, "-m", "venv", tmp_path / "empty")
    binaries, constraints = tmp_path / "empty" / "bin", ROOT / "constraints.txt"
    outside(
        tmp_path,
        binaries / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "-c",
        constraints,
        f"{wheel}[tasks]",
    )
    assert outside(tmp_path, binaries / "python", "-c", "import paceline; print(paceline.__file__)").startswith(
        str(tmp_path)
    )
    train_and_replay(tmp_path, binaries / "paceline")


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ["ray", "zmq", "plotly", "starlette", "uvicorn", "torch", "numpy", "sklearn", "typer", "rich"]
    code = f"import sys, paceline; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_no_file_is_too_large_for_the_repository() -> None:
    files = files_of_the_project()
    assert ROOT / "pyproject.toml" in files
    assert [f"{path}: {path.stat().st_size}" for path in files if path.stat().st_size > LARGEST] == []


def test_no_file_names_a_package_index() -> None:
    hosts = re.compile("pypi" + r"\.org|pythonhosted\.org|" + "index" + "-url|download\\." + r"pytorch\.org")
    text = [path for path in files_of_the_project() if path.suffix in (".toml", ".txt", ".md", ".yml", ".cff", "")]
    assert [path for path in text if hosts.search(path.read_text(errors="replace"))] == []


def test_every_make_target_that_is_written_about_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "check", "bench", "soak"} <= targets
    form = re.compile(r"(?:^ +|^\$ |^|`)make ([a-z]+)\b(?=`|$|  +#)", re.M)
    assert {"demo", "test"} <= set(form.findall((ROOT / "README.md").read_text()))
    written = {name for path in DOCUMENTS for name in form.findall(path.read_text())}
    assert written <= targets


def test_every_command_that_is_written_about_exists() -> None:
    callbacks = {str(command.callback and command.callback.__name__) for command in app.registered_commands}
    commands = {name.replace("_", "-") for name in callbacks}
    several = {"serve", "join", "token", "compare", "report", "export", "watch"}
    assert {
        "run",
        "resume",
        "calibrate",
        "strategies",
        "check-strategy",
        "scenario",
        "replay",
        "tasks",
        "doctor",
    } == commands - several
    assert several <= commands
    form = re.compile(r"(?:^ +|^\$ |`)paceline ([a-z][a-z-]*)", re.M)
    written = {name for path in DOCUMENTS for name in form.findall(path.read_text())}
    assert {"run", "scenario"} <= written <= commands


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.name}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []


def test_the_documentation_has_every_page_and_no_other() -> None:
    pages = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert pages == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_the_version_has_one_source() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_what_was_tested_together_lies_in_the_declared_ranges() -> None:
    pinned = pins()
    extras = PYPROJECT["project"]["optional-dependencies"]
    declared = [
        *PYPROJECT["project"]["dependencies"],
        *(
            each
            for name in ("tasks", "ray", "dev", "bench", "docs")
            for each in extras[name]
            if not each.startswith("paceline[")
        ),
    ]
    for requirement in map(Requirement, declared):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against the pin {version}"
    assert pinned["torch"] == "2.13.0"


@functools.cache
def imported_by_the_package() -> set[str]:
    """Top-level names of everything that some module of the package imports, wherever it does so."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def test_an_extra_for_users_holds_what_the_package_imports_and_no_other_does() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == "paceline"
    assert everything.extras == set(extras) - {"all", "dev", "bench", "docs"}
    module = {"scikit-learn": "sklearn"}
    for extra, requirements in extras.items():
        names = {module.get(name, name) for name in (Requirement(each).name for each in requirements)} - {"paceline"}
        used = names & imported_by_the_package()
        assert used == (names if extra in everything.extras else set()), extra


def test_nothing_is_unpickled_but_what_the_security_page_names() -> None:
    """What `launch` was given; `torch.load` unpickles too, and NumPy where it is told that it may."""
    modules = r"\b(?:import|from) (?:cloud)?(?:pickle|dill|joblib|shelve)\b"
    unpickling = re.compile(rf"{modules}|(?<!safetensors\.)\btorch\.load\(|allow_pickle")
    found = {path.name for path in (ROOT / "src").rglob("*.py") if unpickling.search(path.read_text())}
    assert found == {"own_optimizer.py", "workload.py"}
    promised = "the function that `paceline.launch` was given, and the classes in its `optimizers`"
    assert promised in (ROOT / "SECURITY.md").read_text()


def test_ci_runs_lint_types_documentation_and_the_whole_suite_without_gaps() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert {"set -euo pipefail", "export PACELINE_CI_NO_SKIPS=1"} <= set(lines)
    assert [line for line in lines if line.startswith("make")] == ["make lint", "make docs", "make test"]
    recipes = {name: commands_of(name) for name in ("lint", "docs", "test")}
    assert recipes["lint"] == ["$(BIN)/ruff check .", "$(BIN)/ruff format --check .", "$(BIN)/mypy"]
    assert "mkdocs build --strict" in recipes["docs"][0]
    assert recipes["test"] == ["$(PYTEST)"]


def commands_of(target: str) -> list[str]:
    """What `make` runs for it."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None, target
    return [line.strip() for line in recipe[1].splitlines()]


def test_a_test_that_hangs_is_ended(tmp_path: Path) -> None:
    assert PYPROJECT["tool"]["pytest"]["ini_options"]["timeout"] == 120
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 0.2\n")
    (tmp_path / "test_it.py").write_text("import time\n\ndef test_hangs():\n    time.sleep(600)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "Timeout" in done.stdout
    assert "1 failed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("no_skips", "code"), [("1", 1), ("0", 0)])
def test_a_skipped_test_fails_the_suite_where_that_is_asked_for(no_skips: str, code: int, tmp_path: Path) -> None:
    for name in ("conftest.py", "support/leaks.py", "support/warm_python.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / Path(name).name)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    left_out = "@pytest.mark.skip(reason='no shared folder')\ndef test_left_out(): pass\n"
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_runs(): pass\n\n{left_out}")
    environment = {**os.environ, "PACELINE_CI_NO_SKIPS": no_skips}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert ("test_left_out: Skipped: no shared folder" in done.stdout) == bool(code)
