"""The code, the commands and the links of the README and the pages.

Blocks of Python run as they are written; commands of `sparsync` parse and name schemes, jobs and pages that are there, and the quick ones
are run; links lead somewhere.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case
from helpers.distributed import run_fresh as on_ranks
from helpers.docs_blocks import ROOT, CodeBlock, blocks
from helpers.programs import output_of
from sparsync_lab import cli, workloads
from sparsync_lab.predict import probe_file
from sparsync_lab.report.parts import replaced
from sparsync_lab.scheme_choice import parse_schemes
from studies import __main__ as studies

DOCS = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]
BLOCKS = [block for page in PAGES for block in blocks(page)]
# The pages that a reader meets first; the others are in the slow tests, each in another interpreter.
FIRST = (
    "docs/quickstart.md",
    "docs/own_scheme.md",
    "docs/compare.md",
    "docs/advise.md",
    "docs/adamw_steps.md",
    "docs/local_steps.md",
)
NOT_RUN_AT_MOST = 2

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`((?:\.venv/bin/)?sparsync [^`]+|make [a-z-]+)`")
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"`sparsync\.(\w+)((?:\.\w+)*)\(")  # in running text
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # as torchrun sets them
ALONE |= {"TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.fixture
def probed(tmp_path: Path) -> Path:
    """The folder of a reader who has called `sparsync probe`."""
    group = probe_file.ProbedGroup(4, "gloo", 1, "made", "cpu", 2, "", "")
    operation = tuple(probe_file.Operation("all_reduce", nbytes, 1.0, 1.0, 1.0) for nbytes in (1, 2))
    latency, memory = probe_file.Latency(0.0), probe_file.Memory(1.0)
    made = probe_file.Probe(group, operation, latency, memory, (probe_file.Kernel("apply", 1.0, 0.0),))
    probe_file.write(made, tmp_path / "probe.toml")
    return tmp_path


def run_python(pages: Sequence[str], folder: Path) -> None:
    """Run the blocks of these pages in a world of one rank. Those of a page share their names, as for a reader who types them in order."""
    os.environ.update(ALONE)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for page in pages:
        names = {"__name__": "__main__"}
        for block in blocks(page):
            if block.runs_here:
                if "init_process_group" in block.code and dist.is_initialized():
                    dist.destroy_process_group()
                with case(block.name):
                    exec(compile("\n" * block.above + block.code, page, "exec"), names)


def run_diffs() -> list[object]:
    """Run the changed scripts of the README, with a step of each; return what they exchange."""
    exchanges: list[object] = []
    for diff in DIFF.findall((ROOT / "README.md").read_text("utf-8")):
        names: dict[str, Any] = {"torch": torch, "DistributedDataParallel": DistributedDataParallel}
        names["model"] = torch.nn.Linear(64, 32)
        exec("\n".join(line[1:] for line in diff.splitlines()), names)
        names["model"](torch.ones(2, 64)).sum().backward()
        names["optimizer"].step()
        exchanges.append(names["handle"].exchange)
    return exchanges


def run_first(folder: Path) -> list[object]:
    run_python(FIRST, folder)
    return run_diffs()


def test_the_code_of_the_first_pages_runs_as_written(probed: Path) -> None:
    assert on_ranks(run_first, 1, folder=probed) == [[sparsync.Steps(keep=0.0)]]
    assert probe_file.read(probed / "probe.toml").backward is not None  # docs/advise.md writes it


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.runs_here}))
def test_the_python_of_every_page_runs_as_written_in_a_process_of_its_own(page: str, probed: Path) -> None:
    on_ranks(run_python, 1, pages=[page], folder=probed, within_s=600.0)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.ranks], ids=lambda block: block.name)
def test_the_python_for_several_ranks_runs_as_written_under_torchrun(block: CodeBlock, tmp_path: Path) -> None:
    (tmp_path / "this_file.py").write_text(block.code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={block.ranks}"]
    output_of([*torchrun, "this_file.py"], tmp_path)


def test_blocks_that_do_not_run_are_few_and_say_why() -> None:
    assert len([block.name for block in BLOCKS if block.not_run]) <= NOT_RUN_AT_MOST
    for block in BLOCKS:
        compile(block.code, block.name, "exec")


def commands(page: str) -> Iterator[list[str]]:
    """Yield the commands of `sparsync`, `python -m studies` and `make` in the blocks and the running text of a page, as lists of words.

    Output of commands ("sparsync launch: ...") does not count.
    """
    text = (ROOT / page).read_text("utf-8")
    lines = [
        line
        for language, content in FENCE.findall(text)
        if language in ("sh", "text")
        for line in content.replace("\\\n", " ").splitlines()
    ]
    for line in [*lines, *INLINE.findall(FENCE.sub("", text))]:
        is_command = re.match(r"(\.venv/bin/)?(sparsync|python -m studies) (?!\w+:)|make ", line)
        words = shlex.split(line.replace("python -m studies", "studies"), comments=True) if is_command else []
        if words and "..." not in words:
            yield words


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader: the examples, the pages, and the code that docs/own_scheme.md says to save."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copytree(ROOT / "docs", "docs")
    cli.main(["workloads", "--new", "my_job.py"])
    (saved,) = (block for block in blocks("docs/own_scheme.md") if "class RandomK(" in block.code)
    Path("random_k.py").write_text(saved.code)
    return tmp_path


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))])
def test_commands_parse_and_name_what_is_there(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # commands for a GPU parse where there is one
    for program, *arguments in commands(page):
        where = shlex.join([program, *arguments])
        try:
            if program == "make":
                _check_target(arguments)
            elif program.endswith("studies"):
                _check_study(arguments)
            else:
                _check_command(arguments)
        except (SystemExit, ValueError, OSError) as error:
            raise AssertionError(f"{page}: {where}: {error!r}") from error


def _check_target(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if arguments[0] not in targets:
        raise ValueError(f"the targets are {targets}")


def _check_command(arguments: list[str]) -> None:
    """Parse a command, its schemes and its job; raise SystemExit or ValueError if that fails.

    JOB and C stand for any job and number.
    """
    if arguments in (["--version"], ["--help"]):
        return
    if len(arguments) == 1 and arguments[0] in cli.commands():  # its name in running text
        return
    _check_options(cli._parser().parse_args(arguments))


def _check_study(arguments: list[str]) -> None:
    """Parse `python -m studies ARGUMENTS`, as `_check_command` does."""
    name, *words = arguments if arguments[0] != "bench" else [".".join(arguments[:2]), *arguments[2:]]
    assert arguments[0] in studies.PARTS
    module = import_module("studies.campaign.command" if name == "campaign" else f"studies.{name}")
    if hasattr(module, "_options"):
        _check_options(module._options(words))


def _check_options(options: argparse.Namespace) -> None:
    if schemes := getattr(options, "schemes", None):
        parse_schemes(schemes, getattr(options, "density", 0.01))
    workload = getattr(options, "workload", None)
    if workload and workload != "JOB" and "clip_norm=C" not in getattr(options, "option", ()):
        workloads.get(workload, **cli._workload_options(options))
    if page := getattr(options, "page", None):
        replaced(page, getattr(options, "part", None) or getattr(options, "workload", "campaign"), "")


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


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # which has earlier names too
def test_calls_in_running_text_are_of_what_import_sparsync_gives(page: str) -> None:
    for name, rest in CALL.findall(FENCE.sub("", (ROOT / page).read_text("utf-8"))):
        # Not the modules that another test has imported.
        assert name in sparsync.__all__, f"{page}: import sparsync does not give sparsync.{name}{rest}()"
        assert callable(attrgetter(f"{name}{rest}")(sparsync)), page


def anchor(heading: str) -> str:
    """Return the name that a heading has in a link."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
