"""What holds for the whole suite: soak tests run only when asked for, and on CI a skipped test is a failure."""

import gc
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import hypothesis
import leaks
import pytest
import warm_python

from paceline.engines.local import nursery

NO_SKIPS = os.environ.get("PACELINE_CI_NO_SKIPS") == "1"
NO_DEVICE = "needs CUDA"  # the one reason that no machine of CI can do anything about
SOAK = os.environ.get("PACELINE_SOAK") == "1"
SOAK_TIMEOUT_S = 1800  # they run for minutes

# Variables that change from test to test and that no import reads.
OF_A_TEST = (
    "PYTEST_CURRENT_TEST", leaks.TAG, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR",
    "PACELINE_CI_NO_SKIPS", "COLUMNS", "PYTHONBREAKPOINT",
)  # fmt: skip

_skipped: list[str] = []

# A shell's background job ignores Ctrl-C, and one under nohup a closed terminal; some tests press and close.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same commit makes the same examples, and how long one takes on a busy machine says nothing.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --rewrite tests/strategies/test_transcripts.py` writes what strategies answer into the transcripts.

    With tests/sim/test_reference_runs.py or tests/sim/test_recorded_runs.py it keeps what those runs do today, with
    tests/unit/test_public.py the public names and signatures.
    """
    parser.addoption("--rewrite", action="store_true", help="regenerate what tests compare the package with")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselected, not skipped: leaving soak tests out of an ordinary run is no gap in it."""
    left_out = [item for item in items if item.get_closest_marker("soak")]
    if SOAK:
        for item in left_out:
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S))
        return
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test skipped anywhere, fixtures included."""
    if report.skipped and not hasattr(report, "wasxfail") and NO_DEVICE not in _reason(report):
        _skipped.append(f"{report.nodeid}: {_reason(report)}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A whole file skipped while it is collected."""
    if report.skipped and NO_DEVICE not in _reason(report):
        _skipped.append(f"{report.nodeid}: {_reason(report)}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that passed only because it left tests out."""
    if NO_SKIPS and _skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was left out."""
    if NO_SKIPS and _skipped:
        terminalreporter.section("skipped, which PACELINE_CI_NO_SKIPS=1 forbids", red=True)
        for line in _skipped:
            terminalreporter.write_line(line)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


@pytest.fixture
def shared() -> Path:
    """The folder of shared data beside the checkout; tests that use it are marked `shared`."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the shared data folder {folder}")
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_nursery() -> Iterator[None]:
    """All runs of this process start from one nursery: a test that starts five processes imports torch in none."""
    # It sets variables of the process when it is imported, and a nursery from before that serves no run after it.
    importlib.import_module("sklearn")
    # Half a million objects of torch and of the tests: each loop of a script with a scheduler looks through all that
    # are not frozen, and so does every collection of garbage.
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # with the first optimizer it would come anyway
    gc.collect()
    gc.freeze()
    os.environ[leaks.TAG] = leaks.SESSION
    with pytest.MonkeyPatch.context() as patched, nursery.kept(ignoring=OF_A_TEST):
        patched.setattr(nursery, "_inherited", _without_scripts(nursery._inherited))
        # Most scripts of tests load its digits, and importing it takes a worker most of a second.
        patched.setattr(
            nursery, "_BEGIN", nursery._BEGIN.replace("; from paceline", "; import sklearn.datasets; from paceline")
        )
        yield
    del os.environ[leaks.TAG]


def _without_scripts(inherited: Callable[..., tuple[object, ...]]) -> Callable[..., tuple[object, ...]]:
    """Let a script's own folder on the import path not make the nursery useless: no test's has a module of torch's."""
    known = set(sys.path)

    def reduced(ignoring: Collection[str]) -> tuple[object, ...]:
        command, path, *rest = inherited(ignoring)
        assert isinstance(path, list)
        return command, [folder for folder in path if folder in known or not Path(folder).is_dir()], *rest

    return reduced


@pytest.fixture(scope="session")
def warm() -> Iterator[type[warm_python.Popen]]:
    """`subprocess.Popen` for programs of Python that need not import torch themselves."""
    with warm_python.kept():
        yield warm_python.Popen


@pytest.fixture
def nothing_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[leaks.Watch]:
    """No process, descriptor, thread, shared memory or temporary file outlives the test."""
    temporary = tmp_path_factory.mktemp("temporary")
    waiting = nursery._keep.nursery
    if waiting is not None and not waiting.serves:  # an earlier test has imported what sets variables
        nursery._keep.nursery = None
        waiting.end()
    nursery.prepare()  # it is not this test's, and outlives it
    watch = leaks.Watch(temporary)
    monkeypatch.setenv(leaks.TAG, watch.tag)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("torch")))  # torch makes it on import
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield watch
    watch.require_nothing_left()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and no variable that could change a setting; a script's argv and path go with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paceline"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in list(os.environ):
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)
    return tmp_path
