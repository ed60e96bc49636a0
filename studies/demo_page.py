"""Run the demo, its transformer with three seeds, and write each half's picture, caption, table and command into two pages.

    .venv/bin/python -m studies demo_page [FOLDER]

Halves that exist in FOLDER, build/demo_page by default, are not repeated. The pictures go to docs/.
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparsync_lab import cli
from sparsync_lab.demo import HALVES as DEMO
from sparsync_lab.demo import commands
from sparsync_lab.report.format import place_text, quality_axis
from sparsync_lab.report.page import PICTURE
from sparsync_lab.report.results import read
from sparsync_lab.report.summary import summarise
from sparsync_lab.report.tables import reached
from sparsync_lab.terminal import Table, markdown
from studies import parts

PAGES = {"gpt": "README.md", "lstm": "docs/schemes.md"}  # by half
# The transformer's short trainings vary.
HALVES = [
    replace(half, arguments=half.arguments.replace("--seed 0", "--seeds 0,1,2" if half.folder == "gpt" else "--seed 0"))
    for half in DEMO
]
LESS = ("sent in\na step", "bits on\nthe inter-\nface")  # columns left out


def main(argv: Sequence[str]) -> None:
    options = parts.options("demo_page", __doc__, writes=False)
    options.add_argument("folder", type=Path, nargs="?", default=Path("build/demo_page"))
    folder: Path = options.parse_args(argv).folder
    for half, command in zip(HALVES, commands(folder, halves=HALVES), strict=True):
        if not (folder / half.folder / PICTURE).exists():
            cli.main(command)
        found = summarise(read(folder / half.folder).runs[-1])
        picture = Path("docs") / f"demo_{half.folder}.png"
        shutil.copyfile(folder / half.folder / PICTURE, parts.ROOT / picture)
        run, elements = found.run, found.run.workload["parameters"]
        caption = f"{quality_axis(run)} over training time; {place_text(run)}"
        title = f"{half.title}, {elements / 1e6:.2f} M parameters"
        shown = markdown(without(reached(found, title), LESS))
        page = PAGES[half.folder]
        link = os.path.relpath(picture, Path(page).parent)
        warned = "".join(f"\n\n{each.text.capitalize()} {each.why}" for each in found.banners)
        text = f"{title}:\n\n![{caption}]({link})\n\n{shown}\n\n`{shlex.join(['sparsync', *run.command[1:]])}`{warned}"
        parts.put(page, f"demo {half.folder}", text)
        print(f"Written: {page}, {picture}")


def without(shown: Table, heads: Sequence[str]) -> Table:
    kept = [i for i, head in enumerate(shown.heads) if head not in heads]
    rows = tuple(tuple(row[i] for i in kept) for row in shown.rows)
    return Table(shown.title, tuple(shown.heads[i] for i in kept), rows)
