"""The command `python -m studies campaign`: its trials, those that are finished already left out, and then its tables."""

import re
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from sparsync_lab import environment
from sparsync_lab.netlab import NO_DELAY, Delay
from sparsync_lab.progress import progress
from sparsync_lab.report.parts import replaced
from sparsync_lab.terminal import Table, markdown, show
from studies.campaign import records
from studies.campaign.compares import compared
from studies.campaign.records import FinishedTrial
from studies.campaign.supervisor import observe
from studies.campaign.trials import FAULTS, INTEGRATIONS, Trial, drawn
from studies.campaign.verdict import VERDICTS, Verdict, judged

PART = "campaign"
ATTEMPTS = 2  # of a trial whose fault did not strike; then it is tried for the last time
SHOWN = 300  # characters of an error under the tables
_NOISE = re.compile(
    r"\[/[^]]*\] |Got the following error when running the callback: | This is typically caused by .*?GLHF! \S+"
)
_ORDER: tuple[Verdict, ...] = ("right", "wrong", "torch", "hung", "silent", "crashed", "missed")


def campaign(
    seed: int,
    count: int,
    timeout_s: float,
    only: Collection[str],
    jobs: int,
    out: Path,
    page: Path | None,
    command: Sequence[str],
    delay: Delay = NO_DELAY,
) -> list[FinishedTrial]:
    """Do the trials that folder `out` lacks, `jobs` at a time, print the tables of all, and return them.

    With `delay` the ranks of a trial, but not those of `sparsync compare`, have links of 1 Gbit/s with this delay.
    With `page`, the tables also replace the part "campaign" of that page. Raises ValueError for settings that cannot work.
    """
    if count < 1 or jobs < 1 or not timeout_s > 0:
        raise ValueError(f"--trials, --jobs and --timeout must be above 0, got {count}, {jobs} and {timeout_s:g}")
    if page is not None:
        replaced(page, PART, "")  # so that a page without that part is found before the trials
    trials, commit = drawn(seed, count, only), environment.versions()["commit"]
    done = {each.key: each for each in records.read(out) if each.verdict != "missed"}
    missing = [trial for trial in trials if (trial, timeout_s, commit, delay) not in done]
    with progress("trials", len(missing)) as shown:
        for number, finished in enumerate(_tried(missing, timeout_s, commit, jobs, delay), start=1):
            done[finished.key] = finished
            records.append(out, finished)
            print(f"[{number}/{len(missing)}] {finished.verdict}: {finished.trial.label}", file=sys.stderr, flush=True)
            shown.advance()
    found = [done[trial, timeout_s, commit, delay] for trial in trials]
    below = [(line, "dim") for line in (slowest(found), *remarks(found))]
    show(tables(found), below=below)
    print(f"Written to {out / records.FILE_NAME}")
    if page is not None:
        _write(page, replaced(page, PART, _markdown(found, command)))
        print(f"Written: {page}")
    return found


def tables(found: Sequence[FinishedTrial]) -> list[Table]:
    """Return what became of the trials, by fault and by integration; verdicts that did not occur have no column."""
    shown: list[Verdict] = [
        verdict for verdict in _ORDER if verdict == "right" or any(each.verdict == verdict for each in found)
    ]
    columns = [VERDICTS[verdict] for verdict in shown]

    def rows(names: Mapping[str, str], of: Callable[[Trial], str]) -> tuple[tuple[str, ...], ...]:
        counted = {name: Counter(each.verdict for each in found if of(each.trial) == name) for name in names}
        lines = [
            (f"{name}: {text}", str(counted[name].total()), *[str(counted[name][verdict]) for verdict in shown])
            for name, text in names.items()
            if counted[name]
        ]
        whole = Counter(each.verdict for each in found)
        return (*lines, ("all", str(whole.total()), *[str(whole[verdict]) for verdict in shown]))

    return [
        Table("By fault", ("fault", "tried", *columns), rows(FAULTS, lambda trial: trial.fault)),
        Table(
            "By integration", ("integration", "tried", *columns), rows(INTEGRATIONS, lambda trial: trial.integration)
        ),
    ]


def remarks(found: Sequence[FinishedTrial]) -> list[str]:
    """Return a line for each trial that did not end as it should."""
    bad = [each for each in found if each.verdict not in ("right", "missed")]
    bad.sort(key=lambda each: (list(VERDICTS).index(each.verdict), each.trial.label))
    return [f"{each.verdict}: {each.trial.label}: {_short(each.why)}" for each in bad]


def slowest(found: Sequence[FinishedTrial]) -> str:
    """Return a sentence about the error that came last after its fault, of the trials that ended as they should."""
    times = [
        (end["after_s"], each)
        for each in found
        if each.verdict == "right" and each.trial.integration != "compare"
        for end in each.seen["ranks"]
        if end["state"] == "error" and end["after_s"] is not None
    ]
    if not times:
        return "No trial had an error."
    after_s, last = max(times, key=lambda each: each[0])
    return f"With a timeout of {last.timeout_s:g} s the last error came {after_s:.1f} s after its fault: {last.trial.label}."


def _tried(
    trials: Sequence[Trial], timeout_s: float, commit: str | None, jobs: int, delay: Delay
) -> Iterator[FinishedTrial]:
    """Yield each trial when it ends. The first error of the campaign's own ends all."""
    reference = _References(timeout_s)

    def once(trial: Trial) -> FinishedTrial:
        if trial.integration == "compare":
            verdict, why, seen = compared(trial)
        else:
            seen = observe(trial, timeout_s, delay=delay)
            verdict, why = judged(trial, seen, lambda: reference(trial))
        return FinishedTrial(trial, timeout_s, commit, verdict, why, seen.content(), delay)

    def one(trial: Trial) -> FinishedTrial:
        # A busy machine may keep ranks from meeting in time, before anything was done to them.
        tries = (once(trial) for _ in range(ATTEMPTS))
        return next((found for found in tries if found.verdict != "missed"), None) or once(trial)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(one, trial) for trial in trials}
        try:
            while waiting:
                ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for each in ended:
                    yield each.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _References:
    """The results of trainings that nothing disturbs, each made once."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._digests: dict[tuple[object, ...], str] = {}

    def __call__(self, trial: Trial) -> str:
        key = (trial.integration, trial.scheme, trial.ranks, trial.seed)
        with self._lock:
            if key not in self._digests:
                self._digests[key] = observe(trial, self._timeout_s, undisturbed=True).ranks[0].said
            return self._digests[key]


def _markdown(found: Sequence[FinishedTrial], command: Sequence[str]) -> str:
    parts = [f"```text\n{shlex.join(command)}\n```"]
    for shown in tables(found):
        parts.append(f"{shown.title}:\n\n{markdown(shown, code=False)}")
    absent = [" ".join(VERDICTS[each].split()) for each in _ORDER[:-1] if all(one.verdict != each for one in found)]
    if absent:
        parts.append(f"Verdicts that did not occur: {', '.join(absent)}.")
    parts.append(_plain(slowest(found)))
    if bad := remarks(found):
        parts.append("\n".join(["Exceptions:", "", *(f"- {_plain(line)}" for line in bad)]))
    return "\n\n".join(parts)


def _short(why: str) -> str:
    """Return the first line of an error, without torch's source files and advice."""
    line = _NOISE.sub("", why.partition("\n")[0]).strip()
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def _plain(line: str) -> str:
    """Return the line without what Markdown would read as markup."""
    return "".join(f"\\{each}" if each in "\\`*_<>[]|" else each for each in line)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, "utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error}; choose another --page") from error
