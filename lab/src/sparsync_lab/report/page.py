"""Write the report of a comparison from results.jsonl alone: tables on the terminal, and a picture."""

from pathlib import Path

from sparsync_lab.report.choice import failure
from sparsync_lab.report.results import read
from sparsync_lab.report.summary import summarise
from sparsync_lab.report.tables import as_text
from sparsync_lab.writable import write

PICTURE = "quality_over_time.png"


def report(folder: Path) -> None:
    """Draw the picture into `folder`, and print the tables, even if the picture cannot be made.

    Shows the newest run; runs are not mixed. Raises ValueError if the folder holds no such results, RuntimeError if
    writing fails.
    """
    summary, path = summarise(read(folder).runs[-1]), Path(folder) / PICTURE
    from sparsync_lab.report.plots import picture  # loads matplotlib

    try:
        write(path, picture(summary))
    finally:
        print(as_text(summary))
    print(f"Picture: {path}")


def check(folder: Path) -> None:
    """Raise RuntimeError if the folder's newest run failed: see `choice.failure`."""
    if wrong := failure(summarise(read(folder).runs[-1])):
        raise RuntimeError(wrong)
