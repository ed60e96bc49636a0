"""The command `python -m studies elastic`: trials until enough events have struck, those that are finished left out; then its tables."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from sparsync_lab import environment, json_lines
from sparsync_lab.netlab import restart_with_rights
from sparsync_lab.report.parts import replaced
from studies.elastic.drawing import EXCHANGES, KINDS, drawn
from studies.elastic.supervisor import observe, places
from studies.elastic.verdict import Outcome, dropped, judged
from studies.parts import options, table

FILE_NAME, PART = "events.jsonl", "elastic"
SHOWN = 300  # characters of what went wrong
Record = Mapping[str, Any]  # Any: JSON; a trial and its outcomes


def main(words: Sequence[str]) -> None:
    """Do the trials, and write the page."""
    parser = options("elastic", __doc__, writes=False)
    add = parser.add_argument
    add("--events", type=int, default=100, help="how many are to strike (default: 100)")
    add("--seed", type=int, default=0, help="of events, moments, ranks and schemes (default: 0)")
    add("--only", default="", metavar="A,B", help=f"events of these kinds: {', '.join(KINDS)}")
    add("--timeout", type=float, default=3.0, metavar="S", help="of the runs (default: 3)")
    add("--from", dest="first", type=int, default=0, metavar="N", help="number of the first trial (default: 0)")
    add("--page", type=Path, default=None, metavar="FILE.md", help="a page, of which the part elastic is written anew")
    add("--out", type=Path, default=Path("elastic"), help="folder of finished trials (default: elastic)")
    given = parser.parse_args(words)
    restart_with_rights("studies", ["elastic", *words])
    only = [each for each in given.only.split(",") if each]
    found = records(given.out, given.seed, given.events, given.timeout, only, given.first)
    content = page(found, ["python", "-m", "studies", "elastic", *words])
    print(content)
    if given.page is not None:
        given.page.write_text(replaced(given.page, PART, content))


def records(
    out: Path, seed: int, events: int, timeout_s: float, only: Sequence[str] = (), first: int = 0
) -> list[Record]:
    """Return the records of trials with this many events, and do those that the folder lacks."""
    path, commit = out / FILE_NAME, environment.versions()["commit"]
    done = {
        each["number"]: each for each in json_lines.read(path, dict, "trial") if each["key"] == [seed, timeout_s, *only]
    }
    found: list[Record] = []
    struck = 0
    with places() as (links, loopback):
        for number in count(first):
            if struck >= events:
                return found
            trial = drawn(seed, number, timeout_s, only)
            if number not in done:
                seen = observe(trial, timeout_s, links, out / f"{seed}-{number}")
                outcomes = [asdict(each) for each in judged(seen, timeout_s, trial.exchange.startswith("local"))]
                about = {"number": number, "key": [seed, timeout_s, *only], "commit": commit, "loopback": loopback}
                drawn_as = {"ranks": trial.ranks, "exchange": trial.exchange, "scheme": trial.scheme}
                done[number] = {**about, **drawn_as, "dropped": dropped(seen), "outcomes": outcomes}
                json_lines.append(path, done[number])
            found.append(done[number])
            struck += len(done[number]["outcomes"])
            bad = [f"{each['kind']}: {each['why'][:SHOWN]}" for each in done[number]["outcomes"] if each["why"]]
            print(f"[{struck}/{events}] {trial.label}: {'; '.join(bad) or 'survived'}", file=sys.stderr, flush=True)
    raise AssertionError


def page(found: Sequence[Record], command: Sequence[str]) -> str:
    """Return the tables by event and by exchange, and a line for each exception."""
    all_of = [(record, Outcome(**each)) for record in found for each in record["outcomes"]]
    heads = ["tried", "survived", "seconds, median", "worst", "until it is back, median", "worst"]
    lines = [
        f"- {_plain(_label(record))}: {each.kind}: {_plain(each.why.partition(chr(10))[0][:SHOWN])}"
        for record, each in all_of
        if each.why
    ]
    parts = [
        f"```text\n{shlex.join(command)}\n```",
        "By event:\n\n" + _table("event", heads, KINDS, all_of, lambda record, each: each.kind),
        "By exchange:\n\n" + _table("exchange", heads, EXCHANGES, all_of, lambda record, each: record["exchange"]),
        *(["\n".join(["Exceptions:", "", *lines])] if lines else ["No exceptions."]),
        f"Ranks that others dropped though nothing had happened to them, and that came back: {sum(each['dropped'] for each in found)}.",
        *{f"Without partitions: {_plain(each['loopback'])}" for each in found if each["loopback"]},
    ]
    return "\n\n".join(parts)


def _table(
    first: str,
    heads: Sequence[str],
    names: Mapping[str, str],
    found: Sequence[tuple[Record, Outcome]],
    of: Callable[[Record, Outcome], str],
) -> str:
    rows: list[list[str]] = []
    for name, about in {**names, "all": ""}.items():
        these = [each for record, each in found if name in ("all", of(record, each))]
        if these:
            times = [_times([each.seconds for each in these]), _times([each.back_s for each in these])]
            survived = sum(each.survived for each in these)
            rows.append([f"{name}: {about}" if about else name, str(len(these)), str(survived), *times[0], *times[1]])
    return table([first, *heads], rows)


def _times(seconds: Sequence[float | None]) -> list[str]:
    known = [each for each in seconds if each is not None]
    return [f"{median(known):.1f}", f"{max(known):.1f}"] if known else ["-", "-"]


def _label(record: Record) -> str:
    return f"trial {record['number']}, {record['exchange']}, {record['scheme']}"


def _plain(line: str) -> str:
    """Return the line without what Markdown would read as markup."""
    return "".join(f"\\{each}" if each in "\\`*_<>[]|" else each for each in line)
