"""The code, the commands and the links of the README and the pages.

Blocks of Python run as they are written; commands of `sparsync` parse and name schemes, jobs and pages that are there, and the quick ones
are run; links lead somewhere.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from helpers.docs_blocks import ROOT, Block, blocks
from sparsync.lab import cli, workloads
from sparsync.lab.frontier.study import ORACLE
from sparsync.lab.report.parts import replaced
from sparsync.lab.scheme_choice import parse_schemes
from sparsync.predict import probe_file

DOCS = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]
BLOCKS = [block for page in PAGES for block in blocks(page)]
# Those that a reader meets first; the others are in the slow tests, each page in an interpreter of its own.
FIRST = ("README.md", "docs/quickstart.md", "docs/concepts.md", "docs/adamw_steps.md", "docs/local_steps.md")
NOT_RUN_AT_MOST = 2

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:\.venv/bin/)?sparsync [^`]+|make [a-z-]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

# Blocks of one page share their names, as they do for a reader who types one after the other.
RUNNER = """
import sys
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from helpers.docs_blocks import blocks

for page in sys.argv[2:]:
    names = {"__name__": "__main__"}
    for block in blocks(page):
        if block.runs_here:
            if "init_process_group" in block.code and dist.is_initialized():
                dist.destroy_process_group()
            exec(compile("\\n" * block.above + block.code, page, "exec"), names)
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
ALONE |= {"TORCHELASTIC_RESTART_COUNT": "0"}  # as torchrun sets them


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a command of the documentation in `folder`, and return what it printed."""
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def probed(tmp_path: Path) -> Path:
    """The folder of a reader who has called `sparsync probe`."""
    group = probe_file.Group(4, "gloo", 1, "made", "cpu", 2, "", "")
    operation = tuple(probe_file.Operation("all_reduce", nbytes, 1.0, 1.0, 1.0) for nbytes in (1, 2))
    latency, memory = probe_file.Latency(0.0, 0.0, 0.0, 1.0, 0.0), probe_file.Memory(1.0)
    made = probe_file.Probe(group, operation, latency, memory, (probe_file.Kernel("apply", 1.0, 0.0),))
    probe_file.write(made, tmp_path / "probe.toml")
    return tmp_path


def test_the_python_of_the_first_pages_runs_as_written(probed: Path) -> None:
    """In one process, a world of one rank; tracebacks name the line of the page."""
    run([sys.executable, "-c", RUNNER, str(ROOT / "tests"), *FIRST], probed, ALONE)
    assert probe_file.read(probed / "probe.toml").backward is not None  # of the quickstart


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.runs_here}))
def test_the_python_of_every_page_runs_as_written_in_an_interpreter_of_its_own(page: str, probed: Path) -> None:
    run([sys.executable, "-c", RUNNER, str(ROOT / "tests"), page], probed, ALONE)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.ranks], ids=lambda block: block.name)
def test_the_python_for_several_ranks_runs_as_written_under_torchrun(block: Block, tmp_path: Path) -> None:
    (tmp_path / "this_file.py").write_text(block.code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={block.ranks}"]
    run([*torchrun, "this_file.py"], tmp_path, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})


def test_blocks_that_do_not_run_are_few_and_say_why() -> None:
    assert len([block.name for block in BLOCKS if block.not_run]) <= NOT_RUN_AT_MOST
    for block in BLOCKS:
        compile(block.code, block.name, "exec")


def commands(page: str) -> Iterator[list[str]]:
    """Yield the commands of `sparsync` and `make` in the blocks and the running text of a page, as lists of words.

    What commands print ("sparsync launch: ...") is none.
    """
    text = (ROOT / page).read_text("utf-8")
    lines = [
        line
        for language, content in FENCE.findall(text)
        if language in ("sh", "text")
        for line in content.replace("\\\n", " ").splitlines()
    ]
    for line in [*lines, *INLINE.findall(FENCE.sub("", text))]:
        words = shlex.split(line, comments=True) if re.match(r"(\.venv/bin/)?sparsync (?!\w+:)|make ", line) else []
        if words and "..." not in words:
            yield words


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader: the examples, the pages, and the code that the quickstart says to save."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copytree(ROOT / "docs", "docs")
    cli.main(["workloads", "--new", "my_job.py"])
    (saved,) = (block for block in blocks("docs/quickstart.md") if "class RandomK" in block.code)
    Path("random_k.py").write_text(saved.code)
    return tmp_path


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))])
def test_commands_parse_and_name_what_is_there(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # commands for a GPU parse where there is one
    for program, *arguments in commands(page):
        where = shlex.join([program, *arguments])
        try:
            _check_target(arguments) if program == "make" else _check_command(arguments)
        except (SystemExit, ValueError, OSError) as error:
            raise AssertionError(f"{page}: {where}: {error!r}") from error


def _check_target(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if arguments[0] not in targets:
        raise ValueError(f"the targets are {targets}")


def _check_command(arguments: list[str]) -> None:
    """Parse a command, its schemes and its job; raise SystemExit or ValueError where that cannot be done.

    JOB and C stand for any job and number.
    """
    if arguments == ["--version"]:
        return
    if len(arguments) == 1 and arguments[0] in cli.commands():  # its name in running text
        return
    options = cli._parser().parse_args(arguments)
    if options.run is cli._bench:
        options = import_module(f"sparsync.lab.bench.{options.subject}")._options(options.arguments)
    if schemes := getattr(options, "schemes", None):
        skip = getattr(options, "skip", None)
        parse_schemes(schemes, getattr(options, "density", 0.01), skip, ORACLE)
    workload = getattr(options, "workload", None)
    if workload and workload != "JOB" and "clip_norm=C" not in arguments:
        workloads.get(workload, **cli._workload_options(options))
    if page := getattr(options, "page", None):
        replaced(page, getattr(options, "part", None) or getattr(options, "workload", "campaign"), "")


TRAFFIC = [
    (page, shlex.split(code.replace("\\\n", " "), comments=True), text)
    for page in DOCS
    for code, text in re.findall(
        r"^```sh\n(sparsync traffic [^`]*)^```$(?:\n+!\[[^\n]*\n+```text\n(.*?)^```$)?",
        (ROOT / page).read_text(),
        re.MULTILINE | re.DOTALL,
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "words", "shown"), TRAFFIC)
def test_commands_of_traffic_print_what_the_page_shows(page: str, words: list[str], shown: str, reader: Path) -> None:
    found = run([sys.executable, "-m", "sparsync.lab.cli", *words[1:]], reader)
    assert found.strip() == shown.strip() if shown else "random_k" in found


@pytest.mark.slow
@pytest.mark.parametrize("words", [["schemes"], ["schemes", "topk"], ["workloads"], ["--version"]])
def test_the_lists_answer(words: list[str], tmp_path: Path) -> None:
    assert run([sys.executable, "-m", "sparsync.lab.cli", *words], tmp_path)


@pytest.mark.slow
@pytest.mark.network
def test_the_comparison_of_the_quickstart_and_its_report_run(reader: Path) -> None:
    """As written, but for the number of steps."""
    text = (ROOT / "docs/quickstart.md").read_text().replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("sparsync ")]
    (report,) = (line for line in lines if line[1] == "report")
    (compare,) = (line for line in lines if line[1] == "compare" and line[-1] == report[-1])
    for words in [[*compare, "--steps", "20"], report]:
        assert "On my_job.py:MyJob (4 ranks, 100 Mbit/s" in run(
            [sys.executable, "-m", "sparsync.lab.cli", *words[1:]], reader
        )
    assert (reader / "results" / "report.html").exists()


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
