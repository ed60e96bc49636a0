"""Random events in runs of `sparsync_elastic`, several in each, and what must hold afterwards.

    python -m studies elastic [--events 100] [--seed 0] [--only kill,join] [--out elastic] [--page docs/reliability.md]

Trials are made until enough events have struck; those that are finished are left out.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from sparsync_lab import environment, json_lines
from sparsync_lab.netlab import restart_with_rights
from studies.elastic.drawing import EXCHANGES, KINDS, drawn
from studies.elastic.supervisor import observe, places
from studies.elastic.verdict import Outcome, dropped, judged
from studies.trials import page

FILE_NAME, PART = "events.jsonl", "elastic"
Record = Mapping[str, Any]  # Any: JSON; a trial and its outcomes


def main(words: Sequence[str]) -> None:
    """Do the trials, print the tables, and write them into the page."""
    parser = page.options("elastic", __doc__, "events", 100)
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="number of the first trial")
    given = parser.parse_args(words)
    page.check(given.page, PART)
    restart_with_rights("studies", ["elastic", *words])
    found = records(given.out, given.seed, given.events, given.timeout, given.only, given.first)
    page.show(given.page, PART, ["elastic", *words], content(found))


def records(
    out: Path, seed: int, events: int, timeout_s: float, only: Sequence[str] = (), first: int = 0
) -> list[Record]:
    """Return the records of trials with this many events, and do those that the folder lacks."""
    path, key = out / FILE_NAME, [seed, timeout_s, *only]
    done = {each["number"]: each for each in json_lines.read(path, dict, "trial") if each["key"] == key}
    found: list[Record] = []
    struck = 0
    with places() as (links, loopback):
        for number in count(first):
            if struck >= events:
                break
            trial = drawn(seed, number, timeout_s, only)
            if number not in done:
                seen = observe(trial, timeout_s, links, out / f"{seed}-{number}")
                done[number] = {
                    "number": number,
                    "key": key,
                    "commit": environment.versions()["commit"],
                    "loopback": loopback,
                    "exchange": trial.exchange,
                    "label": trial.label,
                    "dropped": dropped(seen),
                    "outcomes": [asdict(each) for each in judged(seen, timeout_s, trial.exchange.startswith("local"))],
                }
                json_lines.append(path, done[number])
            found.append(done[number])
            struck += len(done[number]["outcomes"])
            bad = [f"{each['kind']}: {page.short(each['why'])}" for each in done[number]["outcomes"] if each["why"]]
            print(f"[{struck}/{events}] {trial.label}: {'; '.join(bad) or 'survived'}", file=sys.stderr, flush=True)
    return found


def content(found: Sequence[Record]) -> list[str]:
    """Return the tables by event and by exchange, and a line for each exception."""
    all_of = [(record, Outcome(**each)) for record in found for each in record["outcomes"]]
    heads = ["tried", "survived", "seconds, median", "worst", "until it is back, median", "worst"]
    bad = [f"{record['label']}: {each.kind}: {page.short(each.why)}" for record, each in all_of if each.why]
    lost = sum(each["dropped"] for each in found)
    return [
        page.by_name(["event", *heads], KINDS, all_of, lambda each: each[1].kind, _cells),
        page.by_name(["exchange", *heads], EXCHANGES, all_of, lambda each: each[0]["exchange"], _cells),
        page.exceptions(bad),
        f"Ranks that others dropped though nothing had happened to them, and that came back: {lost}.",
        *{f"Without partitions: {page.plain(each['loopback'])}" for each in found if each["loopback"]},
    ]


def _cells(these: list[tuple[Record, Outcome]]) -> list[str]:
    survived = sum(each.survived for _, each in these)
    return [str(survived), *_times([each.seconds for _, each in these]), *_times([each.back_s for _, each in these])]


def _times(seconds: Sequence[float | None]) -> list[str]:
    known = [each for each in seconds if each is not None]
    return [f"{median(known):.1f}", f"{max(known):.1f}"] if known else ["-", "-"]
