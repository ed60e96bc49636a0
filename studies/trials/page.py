"""The shared parts of trial studies: their options, the file of finished trials, and their part of a page."""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsync_lab import environment, json_lines
from sparsync_lab.cli_options import positive
from sparsync_lab.netlab import restart_with_rights
from sparsync_lab.report.parts import replaced
from sparsync_lab.writable import check_file
from studies import parts

FILE_NAME = "trials.jsonl"
SHOWN = 300  # characters of an error
_NOISE = re.compile(
    r"\[/[^]]*\] |Got the following error when running the callback: | This is typically caused by .*?GLHF! \S+"
)

Record = Mapping[str, Any]  # Any: JSON; a finished trial


def options(name: str, about: str | None, jobs: int) -> argparse.ArgumentParser:
    """Build the parser of a study that runs `jobs` trials at a time."""
    parser = parts.options(name, about, writes=False)
    add = parser.add_argument
    add("--trials", type=int, default=200, help="how many (default: 200)")
    add("--seed", type=int, default=0, help="of the drawn trials (default: 0)")
    add("--only", type=lambda text: text.split(","), default=(), metavar="A,B", help="names from the tables")
    add("--timeout", type=positive, default=3.0, metavar="S", help="of the library, for one operation (default: 3)")
    add("--jobs", type=int, default=jobs, metavar="N", help=f"trials at a time (default: {jobs})")
    add("--page", type=Path, default=None, metavar="FILE.md", help=f"rewrite the part {name} of this page")
    add("--out", type=Path, default=Path("build") / name, help=f"folder of finished trials (default: build/{name})")
    return parser


def run(
    name: str,
    words: Sequence[str],
    given: argparse.Namespace,
    trials: Sequence[Any],  # Any: a dataclass with a `label`
    tried: Callable[[Any], tuple[str, dict[str, Any]]],
    content: Callable[[Sequence[Record]], Sequence[str]],
) -> None:
    """Do the trials that the file lacks, print the tables of all, and write them into the page.

    `tried` returns a verdict to print and a trial's results to keep; `content` formats records as paragraphs.
    """
    check_file(given.out / FILE_NAME)
    if given.page is not None:
        replaced(given.page, name, "")  # raises ValueError if the page has no such part
    if given.jobs < 1:
        raise ValueError(f"--jobs must be above 0, got {given.jobs}")
    restart_with_rights("studies", [name, *words])
    key = [given.timeout, environment.versions()["commit"]]
    earlier = json_lines.read(given.out / FILE_NAME, dict, "finished trial")
    done = {_text(each["trial"]): each for each in earlier if each["key"] == key}
    missing = [each for each in trials if _text(asdict(each)) not in done]
    with ThreadPoolExecutor(given.jobs) as pool:
        waiting = {pool.submit(tried, each): each for each in missing}
        try:
            for number, ended in enumerate(as_completed(waiting), start=1):
                trial, (verdict, kept) = waiting[ended], ended.result()
                record = {"trial": asdict(trial), "key": key, "label": trial.label, **kept}
                done[_text(asdict(trial))] = record
                json_lines.append(given.out / FILE_NAME, record)
                print(f"[{number}/{len(missing)}] {trial.label}: {verdict}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    found = [done[_text(asdict(each))] for each in trials]
    text = "\n\n".join([f"```text\n{shlex.join(['python', '-m', 'studies', name, *words])}\n```", *content(found)])
    print(text)
    if given.page is not None:
        given.page.write_text(replaced(given.page, name, text))


def _text(trial: Any) -> str:  # Any: JSON
    return json.dumps(trial)


def by_name(
    heads: Sequence[str],
    names: Mapping[str, str],
    found: Sequence[Any],
    of: Callable[[Any], str],
    cells: Callable[[Sequence[Any]], list[str]],  # Any: of `found`
) -> str:
    """Tabulate `found` with a row for each name that occurs, and one for all."""
    rows: list[list[str]] = []
    for name, about in {**names, "all": ""}.items():
        these = [each for each in found if name in ("all", of(each))]
        if these:
            rows.append([f"{name}: {about}" if about else name, str(len(these)), *cells(these)])
    return f"By {heads[0]}:\n\n{parts.table(heads, rows)}"


def exceptions(lines: Sequence[str]) -> str:
    """List the trials that did not end correctly."""
    return "\n".join(["Exceptions:", "", *(f"- {plain(line)}" for line in lines)]) if lines else "No exceptions."


def short(why: str) -> str:
    """Shorten an error to its first line, without torch's source files and advice."""
    line = _NOISE.sub("", why.partition("\n")[0]).strip()
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def plain(line: str) -> str:
    """Escape Markdown markup."""
    return "".join(f"\\{each}" if each in "\\`*_<>[]|" else each for each in line)
