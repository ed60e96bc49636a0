"""The command `sparsync frontier`: run its trainings, then write a table, a picture and part of a page."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sparsync_lab.frontier import runs
from sparsync_lab.frontier.figures import Panel, panels
from sparsync_lab.frontier.study import FrontierStudy, complete
from sparsync_lab.frontier.tables import broken, remarks, table
from sparsync_lab.report.parts import replaced
from sparsync_lab.terminal import Table, markdown, show
from sparsync_lab.writable import check_file, write

PICTURE = "frontier.png"
TABLES = "frontier.md"


def frontier(
    study: FrontierStudy,
    out: Path,
    jobs: int,
    command: Sequence[str],
    beside: Mapping[str, FrontierStudy] = MappingProxyType({}),
    page: Path | None = None,
    part: str | None = None,
) -> None:
    """Complete the study in its folder, write its Markdown tables and a picture there, and print the tables.

    With a page, tables, picture and the given command also replace its part `part`, named after the workload unless given. `beside`: the
    same methods on other jobs, by the names that head a column for each.
    Raises ValueError before any training if the settings cannot work.
    """
    part = part or study.workload
    if page is not None:
        replaced(page, part, "")  # fail before the trainings if the page lacks that part
    check_file(out / runs.FILE_NAME)
    found = _panels(study, out, jobs)
    others = {name: _panels(each, out, jobs) for name, each in beside.items()}
    from sparsync_lab.frontier.picture import picture

    workload = study.check()
    image = picture(found, f"{study.workload}: {workload.unit}, beside dense")
    full = _tables(found, others, workload.metric)
    write(out / TABLES, _markdown(found, full, command, PICTURE))
    write(out / PICTURE, image)
    if page is not None:
        name = f"frontier_{part}.png"
        write(page.parent / name, image)
        write(page, replaced(page, part, _markdown(found, full, command, name)))
    warnings = [(f"!!! {line}", "bold white on red") for line in broken(found)]
    show(full, warnings, [*((line, "dim") for line in remarks(found)), *warnings])
    print(f"Written to {out}: {TABLES}, {PICTURE}{f', and a part of {page}' if page else ''}")
    if warnings:
        raise RuntimeError("a method failed or exchanged nothing; the tables say which, and the other rows count")


def _panels(study: FrontierStudy, out: Path, jobs: int) -> tuple[Panel, ...]:
    finished = complete(study, out, jobs, lambda line: print(line, file=sys.stderr, flush=True))
    workload = study.check()
    return panels(study, finished, workload.better == "lower", metric=workload.metric)


def _tables(found: Sequence[Panel], others: Mapping[str, Sequence[Panel]], metric: str) -> list[Table]:
    return [
        table(panel, metric, {name: each[place] for name, each in others.items()}) for place, panel in enumerate(found)
    ]


def _markdown(found: Sequence[Panel], tables: Sequence[Table], command: Sequence[str], picture: str) -> str:
    """Format command, picture and tables."""
    parts = [f"```text\n{shlex.join(command)}\n```", f"![Percent behind dense over the bits sent]({picture})"]
    for shown in tables:
        parts += [f"{shown.title}:", markdown(shown)]
    return "\n\n".join([*parts, *(f"**{line}**" for line in broken(found))])
