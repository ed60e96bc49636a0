"""The fault campaign: real trainings over gloo processes, each with one fault, and whether every surviving rank said in time what happened.

    python -m studies campaign [--trials 200] [--seed 0] [--only freeze,ddp] [--delay 25ms] [--out campaign] [--page docs/reliability.md]

A stopped campaign goes on where it was. With --delay the ranks of a trial, but not those of `sparsync compare`, have links of 1 Gbit/s
with this delay.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsync_lab import environment, json_lines
from sparsync_lab.cli_options import add_named
from sparsync_lab.netlab import Delay, delay_of, restart_with_rights
from sparsync_lab.progress import progress
from sparsync_lab.writable import check_file
from studies.campaign.compares import compared
from studies.campaign.supervisor import observe
from studies.campaign.trials import FAULTS, INTEGRATIONS, Trial, drawn
from studies.campaign.verdict import VERDICTS, Verdict, judged
from studies.trials import page

PART, FILE_NAME = "campaign", "campaign.jsonl"
ATTEMPTS = 3  # of a trial whose fault did not strike
_ORDER: tuple[Verdict, ...] = ("right", "wrong", "torch", "hung", "silent", "crashed", "missed")


@dataclass(frozen=True)
class Finished:
    """A trial with the library's timeout, and what came out."""

    trial: Trial
    setting: tuple[float, str | None, float, float]  # timeout, commit, delay between the ranks, its jitter
    verdict: Verdict
    why: str  # "" where all is as it should be
    seen: Mapping[str, Any]  # Any: JSON, supervisor.TrialSeen

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Finished":  # Any: JSON
        trial, setting = Trial(**content["trial"]), tuple(content["setting"])
        return cls(trial, setting, content["verdict"], content["why"], content["seen"])


def main(words: Sequence[str]) -> None:
    """Do the trials that the folder lacks, some at a time, and print the tables of all or write them into the page."""
    given = _options(words)
    check_file(given.out / FILE_NAME)
    page.check(given.page, PART)
    delay = delay_of(given.delay, given.jitter)
    if given.trials < 1 or given.jobs < 1:
        raise ValueError(f"--trials and --jobs must be above 0, got {given.trials} and {given.jobs}")
    trials = drawn(given.seed, given.trials, given.only)
    restart_with_rights("studies", ["campaign", *words])
    setting = (given.timeout, environment.versions()["commit"], delay.one_way_s, delay.jitter_s)
    done = {each.trial: each for each in read(given.out) if each.setting == setting and each.verdict != "missed"}
    missing = [trial for trial in trials if trial not in done]
    with progress("trials", len(missing)) as shown:
        for number, each in enumerate(_tried(missing, setting, given.jobs, delay), start=1):
            done[each.trial] = each
            json_lines.append(given.out / FILE_NAME, asdict(each))
            print(f"[{number}/{len(missing)}] {each.verdict}: {each.trial.label}", file=sys.stderr, flush=True)
            shown.advance()
    page.show(given.page, PART, ["campaign", *words], content([done[trial] for trial in trials]))


def _options(words: Sequence[str]) -> Any:  # Any: argparse's
    parser = page.options("campaign", __doc__, "trials", 200)
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="trials at a time (default: 4)")
    add_named(parser, "--delay --jitter")
    return parser.parse_args(words)


def read(folder: Path) -> list[Finished]:
    """Return the finished trials in `folder`. Raises ValueError as `json_lines.read`."""
    return json_lines.read(folder / FILE_NAME, Finished.read, "finished trial")


def content(found: Sequence[Finished]) -> list[str]:
    """Return what became of the trials, by fault and by integration; verdicts that did not occur have no column."""
    occurred = {each.verdict for each in found}
    shown: list[Verdict] = [verdict for verdict in _ORDER if verdict == "right" or verdict in occurred]
    heads = ["tried", *(VERDICTS[verdict] for verdict in shown)]

    def counts(these: list[Finished]) -> list[str]:
        counted = Counter(each.verdict for each in these)
        return [str(counted[verdict]) for verdict in shown]

    bad = sorted((each for each in found if each.verdict not in ("right", "missed")), key=lambda each: each.verdict)
    absent = [VERDICTS[each] for each in _ORDER[:-1] if each not in shown]
    return [
        page.by_name(["fault", *heads], FAULTS, found, lambda each: each.trial.fault, counts),
        page.by_name(["integration", *heads], INTEGRATIONS, found, lambda each: each.trial.integration, counts),
        *([f"Verdicts that did not occur: {', '.join(absent)}."] if absent else []),
        page.plain(slowest(found)),
        page.exceptions([f"{each.verdict}: {each.trial.label}: {page.short(each.why)}" for each in bad]),
    ]


def slowest(found: Sequence[Finished]) -> str:
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
    return f"With a timeout of {last.setting[0]:g} s the last error came {after_s:.1f} s after its fault: {last.trial.label}."


def _tried(
    trials: Sequence[Trial], setting: tuple[float, str | None, float, float], jobs: int, delay: Delay
) -> Iterator[Finished]:
    """Yield each trial when it ends. The first error of the campaign's own ends all."""
    timeout_s, lock = setting[0], threading.Lock()
    digests: dict[tuple[object, ...], str] = {}

    def undisturbed(trial: Trial) -> str:
        """Return the result of the training without the fault, which is made once."""
        key = (trial.integration, trial.scheme, trial.ranks, trial.seed)
        with lock:
            if key not in digests:
                digests[key] = observe(trial, timeout_s, undisturbed=True).ranks[0].said
            return digests[key]

    def one(trial: Trial) -> Finished:
        # A busy machine may keep ranks from meeting in time, before anything was done to them.
        for attempt in range(1, ATTEMPTS + 1):
            if trial.integration == "compare":
                verdict, why, seen = compared(trial)
            else:
                seen = observe(trial, timeout_s, delay=delay)
                verdict, why = judged(trial, seen, lambda: undisturbed(trial))
            if verdict != "missed" or attempt == ATTEMPTS:
                return Finished(trial, setting, verdict, why, asdict(seen))
        raise AssertionError

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, trial) for trial in trials]
        try:
            for ended in as_completed(waiting):
                yield ended.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
