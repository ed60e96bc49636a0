"""The fault campaign: run real trainings in gloo processes, each with one fault, and check that every surviving rank names it in time.

    python -m studies campaign [--trials 200] [--seed 0] [--only freeze,ddp] [--out build/campaign] [--page docs/reliability.md]

A stopped campaign resumes where it stopped.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from studies.campaign.supervisor import observe
from studies.campaign.trials import FAULTS, Trial, drawn
from studies.campaign.verdict import VERDICTS, Verdict, judged
from studies.trials import page
from studies.trials.page import Record

ATTEMPTS = 3  # of a trial whose fault did not strike
_ORDER: tuple[Verdict, ...] = ("right", "wrong", "torch", "hung", "silent", "crashed", "missed")


def main(words: Sequence[str]) -> None:
    """Do the trials that the folder lacks, and print the tables of all or write them into the page."""
    given = _options(words)
    trials = drawn(given.seed, given.trials, given.only)
    page.run("campaign", words, given, trials, lambda trial: tried(trial, given.timeout), content)


def _options(words: Sequence[str]) -> Any:  # Any: argparse's
    return page.options("campaign", __doc__, jobs=4).parse_args(words)


def tried(trial: Trial, timeout_s: float) -> tuple[Verdict, dict[str, Any]]:
    """Run a trial, again if its fault did not strike, because on a busy machine ranks may not meet in time."""
    attempt = 0
    while True:
        attempt += 1
        seen = observe(trial, timeout_s)
        verdict, why = judged(trial, seen, lambda: observe(trial, timeout_s, undisturbed=True).ranks[0].said)
        if verdict != "missed" or attempt == ATTEMPTS:
            return verdict, {"verdict": verdict, "why": why, "seen": asdict(seen)}


def content(found: Sequence[Record]) -> list[str]:
    """Tabulate verdicts by fault, without those that did not occur, and list the slowest error and the exceptions."""
    occurred = {each["verdict"] for each in found}
    shown: list[Verdict] = [verdict for verdict in _ORDER if verdict == "right" or verdict in occurred]

    def counts(these: Sequence[Record]) -> list[str]:
        counted = Counter(each["verdict"] for each in these)
        return [str(counted[verdict]) for verdict in shown]

    heads = ["fault", "tried", *(VERDICTS[verdict] for verdict in shown)]
    bad = sorted((each for each in found if each["verdict"] != "right"), key=lambda each: each["verdict"])
    absent = [VERDICTS[each] for each in _ORDER[:-1] if each not in shown]
    return [
        page.by_name(heads, FAULTS, found, lambda each: each["trial"]["fault"], counts),
        *([f"Verdicts that did not occur: {', '.join(absent)}."] if absent else []),
        page.plain(slowest(found)),
        page.exceptions([f"{each['verdict']}: {each['label']}: {page.short(each['why'])}" for each in bad]),
    ]


def slowest(found: Sequence[Record]) -> str:
    """Describe the error with the longest delay after its fault, among the trials that ended correctly."""
    times = [
        (end["after_s"], each)
        for each in found
        if each["verdict"] == "right"
        for end in each["seen"]["ranks"]
        if end["state"] == "error" and end["after_s"] is not None
    ]
    if not times:
        return "No trial had an error."
    after_s, last = max(times, key=lambda each: each[0])
    return (
        f"With a timeout of {last['key'][0]:g} s the last error came {after_s:.1f} s after its fault: {last['label']}."
    )
