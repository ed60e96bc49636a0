"""Run one trial: start its ranks, let the fault happen, and wait until each surviving rank ends."""

import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsync_lab.netlab import RunNetwork, network
from studies.campaign.rank import CUT, END, GO, JOIN_S, run
from studies.campaign.trials import Trial
from studies.trials.process import LOOK_S, Entry, Seat, Worker, await_all, stacks, stop

GRACE_S = 6.0  # after the timeout: ranks exchange causes for up to 3 s, and the machine may be busy
TRAIN_S = 60.0  # for an undisturbed training
END_S = 15.0  # for a process to end after its error
RATE_BITS_PER_S = 1e9  # of links that are cut
MESSAGE = 1000
LAST = ("done", "left", "error")  # the last entry of a rank


@dataclass
class RankEnd:
    """The end of one rank."""

    rank: int
    state: str = "hung"  # or "done", "error", "left", "crashed", "victim"
    said: str = ""  # its error, digest or exit status, or the stacks of a hanging rank
    ours: bool = True  # False: the error of a torch collective
    after_s: float | None = None  # since the fault


@dataclass
class TrialSeen:
    """The ends of all ranks, and where the fault struck; "" if it did not."""

    struck: str
    ranks: list[RankEnd]
    seconds: float


@dataclass(frozen=True)
class _Struck:
    where: str = ""
    at: float = 0.0
    victim: int | None = None  # the rank that was killed or stopped


def observe(trial: Trial, timeout_s: float, undisturbed: bool = False, grace_s: float = GRACE_S) -> TrialSeen:
    """Run the ranks of a trial, and report how each ended; no process is left. `undisturbed`: without the fault.

    A rank hangs if it has neither raised nor finished `timeout_s` plus `grace_s` seconds after the fault.
    """
    began = time.monotonic()
    cut = trial.fault == "partition" and not undisturbed
    rate = RATE_BITS_PER_S if cut else None
    with tempfile.TemporaryDirectory(prefix="sparsync-campaign-") as name, network(trial.ranks, rate) as links:
        folder = Path(name)
        seats = [Seat(number, number, folder, links) for number in range(trial.ranks)]
        workers = [Worker(seat, run, trial, timeout_s, undisturbed) for seat in seats]
        try:
            struck = _watch(trial, workers, links, folder, timeout_s + grace_s)
            ends = _ends(workers, struck, folder)
        finally:
            stop(workers)
    return TrialSeen(struck.where, ends, round(time.monotonic() - began, 2))


def _watch(trial: Trial, workers: Sequence[Worker], links: RunNetwork, folder: Path, bound_s: float) -> _Struck:
    """Wait until every rank has ended or time is up, and report where and when the fault struck."""
    struck, strike_at, silent = _Struck(), None, trial.fault in ("kill", "freeze")
    deadline = time.monotonic() + JOIN_S + TRAIN_S
    while time.monotonic() < deadline and not all(_settled(each, struck) for each in workers):
        time.sleep(LOOK_S)
        if all(each.said("joined") for each in workers):
            (folder / GO).touch()
        now = time.monotonic()
        if trial.when == "random" and strike_at is None and all(each.said("ready") for each in workers):
            strike_at = now + trial.after_s
        told = next((entry for each in workers if (entry := each.said("strike"))), None)
        if not struck.where and told:
            struck = _Struck(told["strike"], told["t"], trial.victim if silent else None)
            if trial.fault == "partition":
                links.cut(trial.victim)
                (folder / CUT).touch()
        elif not struck.where and strike_at and now >= strike_at:
            struck = _Struck(f"after {trial.after_s:g} s", now, trial.victim if silent else None)
            if trial.fault == "partition":
                links.cut(trial.victim)
            else:
                workers[trial.victim].signal(signal.SIGKILL if trial.fault == "kill" else signal.SIGSTOP)
        if struck.where and not trial.survivable:
            deadline = min(deadline, struck.at + bound_s)
    return struck


def _settled(worker: Worker, struck: _Struck) -> bool:
    # Check for its end first, because a rank reports its last entry before it ends.
    return worker.seat.number == struck.victim or not worker.alive or worker.said(*LAST) is not None


def _ends(workers: Sequence[Worker], struck: _Struck, folder: Path) -> list[RankEnd]:
    """Collect the end of each rank, after giving processes with a last entry some time to exit."""
    others = [each for each in workers if each.seat.number != struck.victim]
    last = {each.seat.number: each.said(*LAST) for each in others}
    told = [each for each in others if last[each.seat.number]]
    (folder / END).touch()
    await_all(lambda: not any(each.alive for each in told), time.monotonic() + END_S)
    hung = stacks([each for each in others if each.alive])
    ends = [RankEnd(struck.victim, "victim")] if struck.victim is not None else []
    for each in others:
        number = each.seat.number
        end = _end(number, last[number], None if each.alive else each.process.exitcode, hung.get(number, ""))
        if (entry := last[number]) and struck.where:
            end.after_s = round(max(0.0, entry["t"] - struck.at), 2)
        ends.append(end)
    return sorted(ends, key=lambda end: end.rank)


def _end(number: int, last: Entry | None, status: int | None, stack: str) -> RankEnd:
    """Classify the end of a rank with last entry `last`; `status` is its process's exit status, None while it runs."""
    if last is None:
        return RankEnd(number, "hung", stack) if status is None else RankEnd(number, "crashed", f"exit status {status}")
    state = next(each for each in LAST if each in last)
    end = RankEnd(number, state, last[state][:MESSAGE], last.get("ours", True))
    if status is None:
        end.state, end.said = "hung", f"its process does not end, after {end.said}\n{stack}"
    elif status < 0:
        end.state, end.said = "crashed", f"its process ended by signal {-status}, after {end.said}"
    return end
