"""Disturb runs of `sparsync_elastic` with several random events each, and check them afterwards.

    python -m studies elastic [--trials 160] [--seed 0] [--only kill,join] [--out build/elastic] [--page docs/reliability.md]

A trial has 5 to 8 events. Finished trials are not repeated.
"""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from studies.elastic.drawing import KINDS, Trial, drawn
from studies.elastic.supervisor import observe
from studies.elastic.verdict import Outcome, dropped, judged
from studies.trials import page
from studies.trials.page import Record


def main(words: Sequence[str]) -> None:
    """Do the trials that the folder lacks, and print the tables of all or write them into the page."""
    given = page.options("elastic", __doc__, jobs=1).parse_args(words)
    trials = [drawn(given.seed, number, given.timeout, given.only) for number in range(given.trials)]
    page.run("elastic", words, given, trials, lambda trial: tried(trial, given.timeout), content)


def tried(trial: Trial, timeout_s: float) -> tuple[str, dict[str, Any]]:
    seen = observe(trial, timeout_s)
    outcomes = judged(seen, timeout_s, trial.exchange.startswith("local"))
    bad = [f"{each.kind}: {page.short(each.why)}" for each in outcomes if each.why]
    kept = {"dropped": dropped(seen), "outcomes": [asdict(each) for each in outcomes]}
    return "; ".join(bad) or f"{len(outcomes)} events survived", kept


def content(found: Sequence[Record]) -> list[str]:
    """Make a table by event, and a line for each exception."""
    all_of = [(record["label"], Outcome(**each)) for record in found for each in record["outcomes"]]
    heads = ["event", "tried", "survived", "seconds, median", "worst", "until it is back, median", "worst"]
    bad = [f"{label}: {each.kind}: {page.short(each.why)}" for label, each in all_of if each.why]
    lost = sum(each["dropped"] for each in found)
    return [
        page.by_name(heads, KINDS, [each for _, each in all_of], lambda each: each.kind, _cells),
        page.exceptions(bad),
        f"Ranks that others dropped though nothing had happened to them, and that came back: {lost}.",
    ]


def _cells(these: Sequence[Outcome]) -> list[str]:
    seconds, back = [each.seconds for each in these], [each.back_s for each in these]
    return [str(sum(each.survived for each in these)), *_times(seconds), *_times(back)]


def _times(seconds: Sequence[float | None]) -> list[str]:
    known = [each for each in seconds if each is not None]
    return [f"{median(known):.1f}", f"{max(known):.1f}"] if known else ["-", "-"]
