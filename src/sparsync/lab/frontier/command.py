"""The command `sparsync frontier`: its trainings, and then its outputs: a table, a picture, and a part of a page."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsync.lab.frontier.figures import Panel, panels
from sparsync.lab.frontier.study import Study, complete
from sparsync.lab.frontier.tables import markdown, remarks, table
from sparsync.lab.report.parts import replaced
from sparsync.lab.report.tables import WIDTH, lines_of

PICTURE = "frontier.png"
TABLES = "frontier.md"


def frontier(
    study: Study, out: Path, jobs: int, ours: Sequence[str], page: Path | None, part: str | None, command: Sequence[str]
) -> None:
    """Complete the study in folder `out`, print its tables, and write them as Markdown and a picture into the folder.

    With `page` they also replace the part called `part` of that page, the picture beside it, under the command that was given.
    Raises ValueError for settings that cannot work, before anything is trained.
    """
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    part = part or study.workload
    if page is not None:
        replaced(page, part, "")  # so that a page without that part is found before the trainings
    finished = complete(study, out, jobs, lambda line: print(line, file=sys.stderr, flush=True))
    from sparsync.lab.frontier.picture import picture

    workload = study.check()
    found = panels(study, finished, workload.better == "lower", ours)
    tables = [table(panel, workload.metric) for panel in found]
    terminal = sys.stdout.isatty()
    print(
        lines_of(
            tables,
            below=[(line, "dim") for line in remarks(found)],
            width=max(WIDTH, shutil.get_terminal_size().columns) if terminal else 2 * WIDTH,
            colour=terminal,
            ascii_only=not (sys.stdout.encoding or "utf-8").lower().startswith("utf"),
        )
    )
    image = picture(found, f"{study.workload}: {workload.unit}, beside dense")
    _write(out / TABLES, _markdown(found, workload.metric, command, PICTURE))
    _write(out / PICTURE, image)
    print(f"Written to {out}: {TABLES}, {PICTURE}")
    if page is not None:
        name = f"frontier_{part}.png"
        _write(page.parent / name, image)
        _write(page, replaced(page, part, _markdown(found, workload.metric, command, name)))
        print(f"Written: {page}, {page.parent / name}")


def _markdown(found: Sequence[Panel], metric: str, command: Sequence[str], picture: str) -> str:
    parts = [f"```text\n{shlex.join(command)}\n```", f"![Percent behind dense over the bits sent]({picture})"]
    parts += [markdown(table(panel, metric)) for panel in found]
    return "\n\n".join([*parts, " ".join(remarks(found))])


def _write(path: Path, content: str | bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error}; choose another folder") from error
