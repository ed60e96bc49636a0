"""Write the report of a comparison from results.jsonl alone: tables on the terminal, and a picture."""

from pathlib import Path

from sparsync_lab.report.choice import failure
from sparsync_lab.report.results import Results, read
from sparsync_lab.report.summary import RunSummary, summarise
from sparsync_lab.report.tables import as_text
from sparsync_lab.writable import write

PICTURE = "quality_over_time.png"


def report(folder: Path) -> None:
    """Draw the picture into `folder`, and print the tables, even if the picture cannot be made.

    Shows the newest run; runs are not mixed. Raises ValueError if the folder holds no such results, RuntimeError if
    writing fails.
    """
    summary, path = _newest(read(folder)), Path(folder) / PICTURE
    from sparsync_lab.report.plots import picture  # loads matplotlib

    try:
        write(path, picture(summary))
    finally:
        print(as_text(summary))
    print(f"Picture: {path}")


def check(folder: Path) -> None:
    """Raise RuntimeError if the folder's newest run failed: see `choice.failure`."""
    if wrong := failure(_newest(read(folder))):
        raise RuntimeError(wrong)


def _newest(results: Results) -> RunSummary:
    return summarise(results.runs[-1])
