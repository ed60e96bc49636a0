"""Run a slice of the tests, chosen by a seed and limited in time: `--slice SEED --within SECONDS`.

Consecutive tests of a file mostly share fixtures, so they are shuffled in runs. The summary states how many of how many tests ran, and how
to repeat the slice. A slice without any test has failed.
"""

import random
import time
from itertools import groupby

import pytest

IN_A_RUN = 20  # tests
WITHIN_S = 480.0


class Slice:
    """The plugin that shuffles the collected tests, and skips those that would begin too late."""

    def __init__(self, seed: str, within_s: float) -> None:
        self.seed, self.within_s = seed, within_s
        self.began_s = time.monotonic()
        self.run = self.all = 0

    @pytest.hookimpl(trylast=True)  # after deselection
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        runs = [
            of_file[start : start + IN_A_RUN]
            for _, group in groupby(items, key=lambda item: item.path)
            for of_file in [list(group)]
            for start in range(0, len(of_file), IN_A_RUN)
        ]
        random.Random(self.seed).shuffle(runs)
        items[:] = [item for each in runs for item in each]
        self.all = len(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Return True, which marks the test as handled, if it would begin too late."""
        if time.monotonic() - self.began_s > self.within_s:
            return True
        self.run += 1
        return None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.run and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"slice: {self.run} of {self.all} tests were begun within {self.within_s:g} s; "
            f"the same ones: --slice {self.seed} --within {self.within_s:g} on a machine as fast as this one"
        )


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption(
        "--slice", metavar="SEED", help="run the tests in an order that SEED chooses, until --within is over"
    )
    parser.addoption(
        "--within", metavar="SECONDS", type=float, default=WITHIN_S, help="when no other test of --slice begins"
    )


def register(config: pytest.Config) -> None:
    """Activate the plugin if its option was given."""
    seed, within_s = config.getoption("slice"), config.getoption("within")
    if seed is not None and within_s is not None:
        config.pluginmanager.register(Slice(seed, within_s), "slice")
