"""`sparsync compare` under faults: the program or a worker is killed, the disk is full, two of them write into one folder."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from sparsync_lab.report import results
from studies.campaign.supervisor import RankEnd, TrialSeen
from studies.campaign.trials import Trial
from studies.campaign.verdict import Verdict

START_S = 200.0  # for Python and torch to be loaded three times, on a machine that is busy
BOUND_S = 20.0  # from the fault to the end of all processes; workers get 3 s to report, and 3 s to end
TIMEOUT = "90"  # of an operation of a rank, in seconds
ENDLESS = "1000000"
SHOWN = 1000  # characters of what a program says
WORKER = b"sparsync_lab.workers.process"

T = TypeVar("T")
Found = tuple[Verdict, str, TrialSeen]


def compared(trial: Trial) -> Found:
    """Run the comparison of a trial, and return the verdict, why, and what was seen. No process is left."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sparsync-campaign-") as folder:
        tried = {
            "killed_worker": _killed_worker,
            "killed_parent": _killed_parent,
            "full_disk": _full_disk,
            "two_at_once": _two_at_once,
        }[trial.fault]
        try:
            verdict, why, end = tried(trial, Path(folder))
        except _NotStartedError as error:
            verdict, why, end = "missed", str(error), RankEnd(0, "crashed", str(error))
    struck = "" if verdict == "missed" else "while it trains"
    return verdict, why, TrialSeen(struck, [end], round(time.monotonic() - began, 2))


def _killed_worker(trial: Trial, out: Path) -> tuple[Verdict, str, RankEnd]:
    with _Program(out, ENDLESS) as program:
        workers = _training(program, out, trial.after_s)
        at = time.monotonic()
        os.kill(workers[trial.victim], signal.SIGKILL)
        return _ended(program, at, f"rank {trial.victim} was killed by signal 9", list(workers.values()))


def _killed_parent(trial: Trial, out: Path) -> tuple[Verdict, str, RankEnd]:
    with _Program(out, ENDLESS) as program:
        workers = list(_training(program, out, trial.after_s).values())
        at = time.monotonic()
        program.process.kill()
        left = _left(workers, at + BOUND_S)
        end = RankEnd(0, "hung" if left else "done", f"{len(left)} workers are left", after_s=_since(at))
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ("hung", end.said, end) if left else ("right", "", end)


def _full_disk(trial: Trial, out: Path) -> tuple[Verdict, str, RankEnd]:
    # In a separate mount namespace, so that nothing is mounted when the program has ended, however it did.
    kib = 8 + int(trial.after_s * 100)
    mount = f'mount -t tmpfs -o size={kib}k tmpfs "$0" && exec "$@"'
    with _Program(out, ENDLESS, ["unshare", "--mount", "--", "sh", "-c", mount, str(out)]) as program:
        workers = _await(lambda: _workers(program.process.pid), program)
        began = time.monotonic()
        return _ended(program, began, "No space left on device", list(workers.values()), START_S)


def _two_at_once(trial: Trial, out: Path) -> tuple[Verdict, str, RankEnd]:
    with _Program(out, "60") as one, _Program(out, "60") as other:
        at = time.monotonic()
        for program in (one, other):
            with suppress(subprocess.TimeoutExpired):
                program.process.wait(START_S)
        end = RankEnd(0, "done", (one.told() + other.told())[:SHOWN], after_s=_since(at))
        if one.process.poll() is None or other.process.poll() is None:
            return "hung", "a comparison does not end", end
        if (one.process.returncode, other.process.returncode) != (0, 0):
            clear = "Traceback" not in end.said and str(out) in end.said
            return ("right" if clear else "wrong"), end.said, end
    try:
        runs = results.read(out).runs
    except ValueError as error:
        return "silent", str(error), end
    whole = [run for run in runs if all(trace.end and len(trace.steps) == 60 for trace in run.traces.values())]
    return ("right", "", end) if len(whole) == 2 else ("silent", f"{len(whole)} of 2 runs are whole", end)


class _NotStartedError(Exception):
    """The comparison has ended, or its time is over, before anything was done to it."""


class _Program:
    """A running `sparsync compare`, which is killed with its workers at the end of the block."""

    def __init__(self, out: Path, steps: str, prefix: list[str] | None = None) -> None:
        options = ["--ranks", "2", "--link", "none", "--schemes", "topk", "--density", "0.1", "--timeout", TIMEOUT]
        job = ["--workload", "studies.campaign.job:CampaignFit", "--steps", steps, "--eval-every", "10"]
        argv = [sys.executable, "-m", "sparsync_lab.cli", "compare", *options, *job, "--out", str(out)]
        with tempfile.NamedTemporaryFile(prefix="sparsync-campaign-", suffix=".err", delete=False) as self._stderr:
            self.process = subprocess.Popen(
                [*(prefix or []), *argv], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr
            )

    def told(self) -> str:
        return Path(self._stderr.name).read_text(errors="replace")

    def __enter__(self) -> "_Program":
        return self

    def __exit__(self, *_: object) -> None:
        workers = _workers(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in workers.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        Path(self._stderr.name).unlink()


def _training(program: _Program, out: Path, after_s: float) -> dict[int, int]:
    """Wait until steps are recorded and `after_s` seconds more, and return the process ids of the workers by rank."""
    path = out / results.FILE_NAME
    _await(lambda: path.exists() and b'"kind": "step"' in path.read_bytes(), program)
    time.sleep(after_s)
    return _await(lambda: _workers(program.process.pid), program)


def _ended(
    program: _Program, at: float, due: str, workers: list[int], bound_s: float = BOUND_S
) -> tuple[Verdict, str, RankEnd]:
    """Return the verdict on a program that is to end with an error that says `due`, and to leave no worker."""
    try:
        code = program.process.wait(bound_s)
    except subprocess.TimeoutExpired:
        end = RankEnd(0, "hung", program.told()[:SHOWN])
        return "hung", f"the program goes on for {bound_s:g} s after the fault", end
    told = program.told()
    end = RankEnd(0, "error", told[:SHOWN], after_s=_since(at))
    if left := _left(workers, time.monotonic() + BOUND_S):
        return "hung", f"workers are left: {left}", end
    if code != 1 or due not in told or "Traceback" in told.partition("last lines of rank")[0]:
        return ("silent" if code == 0 else "crashed" if code < 0 else "wrong"), f"exit {code}: {end.said}", end
    return "right", "", end


def _left(pids: list[int], deadline: float) -> list[int]:
    """Return the processes that run at the deadline; returns before it when there are none."""
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _workers(pid: int) -> dict[int, int]:
    """Return the process ids of the workers below `pid` by rank; none until both have started."""
    found: dict[int, int] = {}
    for child in _children(pid):
        with suppress(OSError):
            rank = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{child}/environ").read_bytes())
            if rank and WORKER in Path(f"/proc/{child}/cmdline").read_bytes():
                found[int(rank[1])] = child
    return found if len(found) == 2 else {}


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return found + [grandchild for child in found for grandchild in _children(child)]
    return []


def _await(condition: Callable[[], T], program: _Program) -> T:
    deadline = time.monotonic() + START_S
    while not (value := condition()):
        if program.process.poll() is not None or time.monotonic() > deadline:
            raise _NotStartedError(f"the comparison has not started to train: {program.told()[-500:]}")
        time.sleep(0.02)
    return value


def _since(at: float) -> float:
    return round(time.monotonic() - at, 2)
