"""`sparsync compare` under faults: the program or a worker is killed, the disk is full, two of them write into one folder."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparsync_lab.report import results
from studies.campaign.supervisor import RankEnd, TrialSeen
from studies.campaign.trials import Trial
from studies.campaign.verdict import Verdict
from studies.trials.process import await_all, descendants_of

START_S = 200.0  # for Python and torch to be loaded three times, on a machine that is busy
BOUND_S = 20.0  # from the fault to the end of all processes; workers get 3 s to report, and 3 s to end
ENDLESS, SHORT = 1_000_000, 60  # steps
SHOWN = 1000  # characters of what a program says
COMPARE = (
    "compare --ranks 2 --link none --schemes topk --density 0.1 --timeout 90 --eval-every 10 "
    "--workload sparsync_lab.workloads.starting_point:MyJob --option width=16"
)
WORKER = b"sparsync_lab.workers.process"
Program = subprocess.Popen[bytes]
Found = tuple[Verdict, str, str]  # the verdict, why, and what the program said


class _NotStartedError(Exception):
    """The comparison has ended, or its time is over, before anything was done to it."""


def compared(trial: Trial) -> tuple[Verdict, str, TrialSeen]:
    """Run the comparison of a trial, and return the verdict, why, and what was seen. No process is left."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sparsync-campaign-") as folder:
        tried = {"full_disk": _full_disk, "two_at_once": _two_at_once}.get(trial.fault, _killed)
        try:
            verdict, why, said = tried(trial, Path(folder))
        except _NotStartedError as error:
            verdict, why, said = "missed", str(error), str(error)
    end = RankEnd(0, "error" if said else "done", said[:SHOWN])
    return verdict, why, TrialSeen("while it trains", [end], round(time.monotonic() - began, 2))


def _killed(trial: Trial, out: Path) -> Found:
    with _running(out, ENDLESS) as (program, told):
        records = out / results.FILE_NAME
        _await(lambda: records.exists() and b'"kind": "step"' in records.read_bytes(), program, told)
        time.sleep(trial.after_s)
        workers = _workers(program.pid)
        if trial.fault == "killed_worker":
            os.kill(workers[trial.victim], signal.SIGKILL)
            return _ended(program, told, f"rank {trial.victim} was killed by signal 9", workers.values(), BOUND_S)
        program.kill()
        left = _left(workers.values())
        return ("hung" if left else "right"), (f"{len(left)} workers are left" if left else ""), ""


def _full_disk(trial: Trial, out: Path) -> Found:
    # In a separate mount namespace, so that nothing is mounted when the program has ended, however it did.
    mount = f'mount -t tmpfs -o size={8 + int(trial.after_s * 100)}k tmpfs "$0" && exec "$@"'
    with _running(out, ENDLESS, ["unshare", "--mount", "--", "sh", "-c", mount, str(out)]) as (program, told):
        _await(lambda: bool(_workers(program.pid)), program, told)
        return _ended(program, told, "No space left on device", _workers(program.pid).values(), START_S)


def _two_at_once(trial: Trial, out: Path) -> Found:
    with _running(out, SHORT) as (one, one_told), _running(out, SHORT) as (other, other_told):
        ended = await_all(lambda: None not in (one.poll(), other.poll()), time.monotonic() + START_S)
        said = one_told() + other_told()
        if not ended:
            return "hung", "a comparison does not end", said
        if (one.returncode, other.returncode) != (0, 0):
            return ("wrong" if "Traceback" in said or str(out) not in said else "right"), said, said
    try:
        runs = results.read(out).runs
    except ValueError as error:
        return "silent", str(error), said
    whole = [run for run in runs if all(trace.end and len(trace.steps) == SHORT for trace in run.traces.values())]
    return ("right", "", said) if len(whole) == 2 else ("silent", f"{len(whole)} of 2 runs are whole", said)


@contextmanager
def _running(out: Path, steps: int, prefix: Collection[str] = ()) -> Iterator[tuple[Program, Callable[[], str]]]:
    """Start a comparison, and yield its process and what reads its standard error. It and its workers are killed in the end."""
    with tempfile.NamedTemporaryFile(prefix="sparsync-campaign-") as stderr:
        argv = [sys.executable, "-m", "sparsync_lab.cli", *COMPARE.split(), "--steps", str(steps), "--out", str(out)]
        program = subprocess.Popen(
            [*prefix, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr.file
        )
        try:
            yield program, lambda: Path(stderr.name).read_text(errors="replace")
        finally:
            workers = _workers(program.pid)
            program.kill()
            program.wait()
            for pid in workers.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _await(condition: Callable[[], bool], program: Program, told: Callable[[], str]) -> None:
    await_all(lambda: condition() or program.poll() is not None, time.monotonic() + START_S)
    if not condition() or program.poll() is not None:
        raise _NotStartedError(f"the comparison has not started to train: {told()[-500:]}")


def _ended(program: Program, told: Callable[[], str], due: str, workers: Collection[int], bound_s: float) -> Found:
    """Return the verdict on a program that is to end with an error that says `due`, and to leave no worker."""
    try:
        code = program.wait(bound_s)
    except subprocess.TimeoutExpired:
        return "hung", f"the program goes on for {bound_s:g} s after the fault", told()
    said = told()
    if left := _left(workers):
        return "hung", f"workers are left: {left}", said
    if code != 1 or due not in said or "Traceback" in said.partition("last lines of rank")[0]:
        return ("silent" if code == 0 else "crashed" if code < 0 else "wrong"), f"exit {code}: {said}", said
    return "right", "", said


def _left(pids: Collection[int]) -> list[int]:
    """Return the processes that still run after their time, and kill them."""
    await_all(lambda: not any(map(_runs, pids)), time.monotonic() + BOUND_S)
    left = [pid for pid in pids if _runs(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _workers(pid: int) -> dict[int, int]:
    """Return the process ids of the workers below `pid` by rank; none until both have started."""
    found: dict[int, int] = {}
    for child in descendants_of(pid):
        with suppress(OSError):
            rank = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{child}/environ").read_bytes())
            if rank and WORKER in Path(f"/proc/{child}/cmdline").read_bytes():
                found[int(rank[1])] = child
    return found if len(found) == 2 else {}
