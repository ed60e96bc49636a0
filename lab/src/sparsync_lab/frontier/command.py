"""The command `sparsync frontier`: run its trainings, then write a table, a picture and part of a page."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sparsync_lab.frontier import runs
from sparsync_lab.frontier.figures import Panel, panels
from sparsync_lab.frontier.study import FrontierStudy, complete
from sparsync_lab.frontier.tables import brief, broken, remarks, table
from sparsync_lab.labels import short_labels
from sparsync_lab.report.parts import replaced
from sparsync_lab.report.rows import write_csv
from sparsync_lab.terminal import Table, markdown, show
from sparsync_lab.writable import check_file

PICTURE = "frontier.png"
TABLES = "frontier.md"


@dataclass(frozen=True)
class Outputs:
    """The outputs of a study: a folder, optionally one part of a page, and optionally a CSV file."""

    out: Path
    page: Path | None = None
    part: str | None = None  # None: named after the workload
    csv: Path | None = None


def frontier(
    study: FrontierStudy,
    where: Outputs,
    jobs: int,
    command: Sequence[str],
    beside: Mapping[str, FrontierStudy] = MappingProxyType({}),
) -> None:
    """Complete the study in its folder, write its Markdown tables and a picture there, and print the tables.

    With a page, tables, picture and the given command also replace one part of that page. `beside`: the same methods on other jobs, by
    the names that head a column for each.
    Raises ValueError before any training if the settings cannot work.
    """
    out, page, part = where.out, where.page, where.part or study.workload
    if page is not None:
        replaced(page, part, "")  # fail before the trainings if the page lacks that part
    check_file(out / runs.FILE_NAME)
    found = _panels(study, out, jobs)
    others = {name: _panels(each, out, jobs) for name, each in beside.items()}
    from sparsync_lab.frontier.picture import picture

    workload = study.check()
    image = picture(found, f"{study.workload}: {workload.unit}, beside dense")
    names = short_labels([choice.label for choice in study.schemes])
    whole = {label: label for label in names}
    full = _tables(found, others, workload.metric, whole)
    _write(out / TABLES, _markdown(found, full, command, PICTURE))
    _write(out / PICTURE, image)
    if page is not None:
        name = f"frontier_{part}.png"
        _write(page.parent / name, image)
        _write(page, replaced(page, part, _markdown(found, full, command, name, in_page=True)))
    if where.csv is not None:
        write_csv(where.csv, runs.rows(out))
    warnings = [(f"!!! {line}", "bold white on red") for line in broken(found)]
    show(
        _tables(found, others, workload.metric, names),
        warnings,
        [*((line, "dim") for line in remarks(found)), *warnings],
    )
    print(f"Written to {out}: {TABLES}, {PICTURE}")
    if page is not None:
        print(f"Written: {page}, and its picture beside it")
    if warnings:
        raise RuntimeError("a method failed or exchanged nothing; the tables say which, and the other rows count")


def _panels(study: FrontierStudy, out: Path, jobs: int) -> tuple[Panel, ...]:
    finished = complete(study, out, jobs, lambda line: print(line, file=sys.stderr, flush=True))
    workload = study.check()
    return panels(study, finished, workload.better == "lower", metric=workload.metric)


def _tables(
    found: Sequence[Panel], others: Mapping[str, Sequence[Panel]], metric: str, names: Mapping[str, str]
) -> list[Table]:
    return [
        table(panel, metric, names, {name: each[place] for name, each in others.items()})
        for place, panel in enumerate(found)
    ]


def _markdown(
    found: Sequence[Panel], tables: Sequence[Table], command: Sequence[str], picture: str, in_page: bool = False
) -> str:
    """Format command, picture and tables; tables in a page are brief and have no remarks, as the page explains them."""
    parts = [f"```text\n{shlex.join(command)}\n```", f"![Percent behind dense over the bits sent]({picture})"]
    for shown in tables:
        parts += [f"{shown.title}:", markdown(brief(shown) if in_page else shown)]
    parts += [f"**{line}**" for line in broken(found)]
    return "\n\n".join(parts if in_page else [*parts, " ".join(remarks(found))])


def _write(path: Path, content: str | bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error}; choose another folder") from error
