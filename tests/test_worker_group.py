"""Which rank a group blames: from how its processes ended, and what they have reported."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sparsync_lab.workers.group import Worker, diagnosis
from sparsync_lab.workers.ranks import Rank

WAITED = "Timed out waiting 8000ms for recv operation to complete"
ENDED, RUNS = "import sys; sys.exit(0)", "input()"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def worker(
    stack: ExitStack, folder: Path, number: int, code: str, error: str | None = None, done: bool = False
) -> Worker:
    process = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE))
    stack.callback(process.kill)
    made = Worker(folder / f"{number}", error=error, done=done)
    made.stderr.touch()
    made.rank = Rank(number, process.pid, 0, process.poll, {}, None if code == RUNS else process.wait())
    return made


def test_a_rank_that_ended_with_status_0_and_was_not_done_is_blamed(started: ExitStack, tmp_path: Path) -> None:
    waits = worker(started, tmp_path, 0, ENDED, error="Connection closed by peer")
    left = worker(started, tmp_path, 1, ENDED)
    done = worker(started, tmp_path, 2, ENDED, done=True)
    assert diagnosis([waits, left, done], waits) == (
        "rank 1 ended with exit status 0 before its task was done: something in it has ended the process\n"
        "rank 0: Connection closed by peer"
    )


def test_where_one_has_waited_in_vain_those_that_report_nothing_are_blamed(started: ExitStack, tmp_path: Path) -> None:
    waits = worker(started, tmp_path, 0, ENDED, error=WAITED)
    hangs = worker(started, tmp_path, 1, RUNS)
    other = worker(started, tmp_path, 2, ENDED, error=WAITED)
    told = "rank 1 hangs, or its step takes longer than --timeout: it still runs, and has reported no error"
    assert diagnosis([waits, hangs, other], waits) == f"{told}; rank 0 failed: {WAITED}\nrank 2: {WAITED}"
    waits.error = "no sample 5"
    assert diagnosis([waits, hangs], waits) == "rank 0 failed: no sample 5"
