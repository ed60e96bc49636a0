"""The code and the links of the README and the pages: blocks of Python run as they are written, and links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ("README.md", "docs/quickstart.md", "docs/concepts.md")
DOCS = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]

# A block that is not to be run starts with ```python no-run.
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

# Blocks of one page share their names, as they do for a reader who types one after the other.
RUNNER = """
import sys
from pathlib import Path
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from test_docs import BLOCK, ROOT, RUN

for page in RUN:
    text = (ROOT / page).read_text()
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        if "init_process_group" in block[1] and dist.is_initialized():
            dist.destroy_process_group()
        above = text[: block.start(1)].count("\\n")
        exec(compile("\\n" * above + block[1], page, "exec"), names)
"""


def test_the_python_of_readme_quickstart_and_concepts_runs_as_written(tmp_path: Path) -> None:
    """In one process, a world of one rank; tracebacks name the line of the page."""
    as_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(Path(__file__).parent)],
        cwd=tmp_path,
        env={**os.environ, **as_torchrun, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_are_there(page: str) -> None:
    source = ROOT / page
    text = re.sub(r"^```.*?^```$", "", source.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, heading = link.partition("#")
        target = source.parent / path if path else source
        assert target.exists(), f"{page} links to {link}, and there is no {target}"
        if heading:
            anchors = {anchor(each) for each in HEADING.findall(target.read_text())}
            assert heading in anchors, f"{page} links to {link}; the headings of {path} are {sorted(anchors)}"


def anchor(heading: str) -> str:
    """Return the name that a heading has in a link."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
