"""All tests run with one torch thread and the same hypothesis examples each time; `--annotations` executes those of the package."""

import atexit
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch

from helpers import annotations, slices

# Programs that shells start in the background ignore it, and so would the programs under test.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which other tests do too
# Examples of hypothesis, unless a test asks for another number: with executed annotations, and without.
EXAMPLES, QUICK_EXAMPLES = 100, 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--annotations", action="store_true", help="execute the annotations of sparsync, in this process")
    slices.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("annotations"):
        assert "sparsync" not in sys.modules, "sparsync was imported before its annotations could be made to check"
        jaxtyping.jaxtyped = annotations.executed
        jaxtyping.install_import_hook("sparsync", "helpers.annotations.checked")
    examples = EXAMPLES if config.getoption("annotations") else QUICK_EXAMPLES
    hypothesis.settings.register_profile("sparsync", deadline=None, derandomize=True, max_examples=examples)
    hypothesis.settings.load_profile("sparsync")
    slices.register(config)


def pytest_sessionstart() -> None:
    """Collect no garbage while tests are collected: it takes seconds and frees nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep the 600,000 objects that are there by now out of later collections: some tests make dozens, at 0.2 s each."""
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or nanobind says that all its functions leak


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the processor time of the run, because `make test` has a budget of 150 s."""
    from helpers import distributed  # not above: it imports sparsync

    distributed.LIVE.end()
    for reason in distributed.LIVE.thrown_away:
        terminalreporter.write_line(f"live ranks were started anew: {reason}")
    # HACK: the time of the ranks counts once the fork server that started them has ended, and only this private method ends it now.
    # Price: the count lacks them if Python changes the method.
    with suppress(AttributeError):
        forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, children = (each.ru_utime + each.ru_stime for each in used)
    terminalreporter.write_line(f"processor time: {own + children:.0f} s, of which {children:.0f} s in child processes")


@pytest.fixture
def signal_handlers_are_put_back() -> Iterator[None]:
    """The command line takes SIGTERM over; called inside this process it must not keep it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from sparsync_lab.workloads.store import cache_folder  # not above: it imports sparsync

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder()


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, so that tests need no download."""
    folder = tmp_path_factory.mktemp("play")
    text = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "
    (folder / "play.txt").write_text(text * 200)
    return folder


@pytest.fixture(scope="session")
def rights_to_build() -> None:
    """Skip a test that builds a rate-limited network where this process may not."""
    from helpers.rights import missing_rights  # not above: it imports sparsync

    if reason := missing_rights():
        pytest.skip(reason)
