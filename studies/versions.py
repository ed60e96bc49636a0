"""Test the package with several versions of Python and torch, and rewrite the table of docs/what_works.md: `make test-versions`.

`python studies/versions.py 3.11/2.15.0 ...` tests only these, and writes the table from their results and those of earlier runs. Each
pair has a virtual environment in build/versions, which is reused, and in which this file runs with the words `check FILE [ROW ...]`.
Each row runs some checks of the table "What works where" or of the invariants on the installed package. Fails, and writes nothing, if a
row fails.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "lab" / "src"))  # runs without an installed package
from sparsync_lab.report.parts import replaced  # noqa: E402

PAGE, PART = ROOT / "docs" / "what_works.md", "versions"
BUILD = ROOT / "build" / "versions"
VERSIONS = (  # of Python, of torch
    ("3.10", "2.12.1"),
    ("3.11", "2.8.0"),
    ("3.11", "2.10.0"),
    ("3.11", "2.11.0"),
    ("3.11", "2.12.1"),
    ("3.11", "2.13.0"),
    ("3.11", "2.14.1"),
    ("3.11", "2.15.0"),
    ("3.12", "2.15.0"),
    ("3.13", "2.15.0"),
)
NEEDED = ("beartype", "hypothesis", "pytest", "pytest-rerunfailures", "pytest-timeout")
WITHIN_S = 1800.0  # for one version, on a busy machine
WORKS, REFUSED, FAILS = "works", "refused", "fails"

Verdict = tuple[str, str]  # a word, and the reason
Verdicts = dict[str, Verdict]  # by row


def main(wanted: Sequence[tuple[str, str]]) -> None:
    for python, torch in wanted:
        print(f"Python {python}, torch {torch}", flush=True)
        for row, (word, reason) in _tried(python, torch).items():
            print(f"  {row}: {word} {reason[:2000]}", flush=True)
    found = {each: verdicts for each in VERSIONS if len(verdicts := _read(*each)) == len(ROWS)}
    if missing := ["/".join(each) for each in VERSIONS if each not in found]:
        print(f"no whole result yet of {', '.join(missing)}, which the page therefore leaves out")
    failing = [f"{'/'.join(each)} {row}" for each, rows in found.items() for row in ROWS if rows[row][0] == FAILS]
    if failing:
        raise SystemExit(f"these fail: {', '.join(failing)}; nothing was written")
    PAGE.write_text(replaced(PAGE, PART, _part(found)))


def _tried(python: str, torch: str) -> Verdicts:
    """Complete the environment, install the package there, and return the verdicts."""
    folder, out = BUILD / f"py{python}-torch{torch}", _result(python, torch)
    own = folder / "bin" / "python"
    if not own.exists():
        if (found := shutil.which(f"python{python}")) is None:
            raise SystemExit(f"python{python} is not on the PATH; install it, or name the versions to try: 3.11/2.13.0")
        subprocess.run([found, "-m", "venv", folder], check=True)
        _pip(own, "install", f"torch=={torch}", *NEEDED)
    _pip(own, "uninstall", "--yes", "sparsync", "sparsync-elastic", "sparsync-lab")
    _pip(own, "install", str(ROOT / "lab"))  # brings the library, built here
    out.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    subprocess.run([own, __file__, "check", out], env=environment, timeout=WITHIN_S, check=True)
    return _read(python, torch)


def _pip(python: Path, command: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", command, "--quiet", *arguments], check=True)


def _result(python: str, torch: str) -> Path:
    return BUILD / f"py{python}-torch{torch}.json"


def _read(python: str, torch: str) -> Verdicts:
    path = _result(python, torch)
    return (
        {row: (word, reason) for row, (word, reason) in json.loads(path.read_text()).items()} if path.exists() else {}
    )


def _part(found: dict[tuple[str, str], Verdicts]) -> str:
    """Format the part of the page: a table of what works with which versions, and the reasons below it."""
    torches = sorted({torch for _, torch in found}, key=lambda each: [int(part) for part in each.split(".")])
    reasons: dict[str, int] = {}

    def floor(row: str) -> str:
        """Find the lowest torch from which a row works with all tested versions."""
        lowest = "none"
        for torch in reversed(torches):
            if any(verdicts[row][0] != WORKS for (_, each), verdicts in found.items() if each == torch):
                break
            lowest = torch
        return ".".join(lowest.split(".")[:2])

    def before(row: str) -> str:
        told = [verdicts[row][1] for verdicts in found.values()]
        texts = [re.sub(r"of torch \S+", "of this torch", reason) for reason in told if reason]
        return ", ".join(dict.fromkeys(f"({reasons.setdefault(text, len(reasons) + 1)})" for text in texts))

    rows = [["what works", "from torch", "older torch"], ["---"] * 3]
    rows += [[text, floor(row), before(row)] for row, (text, _) in ROWS.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    pairs = ", ".join(f"{python} / {torch}" for python, torch in found)
    return (
        f"`make test-versions` tries each row on Linux x86-64 and CPU with Python / torch {pairs}.\n"
        f"Rows that need several processes run with 2 over gloo, the checkpoint with 3.\n\n{table}\n\n{notes}"
    )


def check(out: Path, rows: Sequence[str]) -> None:
    """Test rows with the running Python and torch, and add the verdicts to the file."""
    sys.path.insert(0, str(ROOT / "tests"))
    warnings.simplefilter("ignore")  # torch's, about future renames, and the doctor's
    verdicts: dict[str, Verdict] = json.loads(out.read_text()) if out.exists() else {}
    for row in rows:
        try:
            verdicts[row] = ROWS[row][1]()
        except (Exception, SystemExit) as error:
            verdicts[row] = FAILS, f"{type(error).__name__}: {error}"
        out.write_text(json.dumps(verdicts, indent=1))


def package() -> Verdict:
    import sparsync

    for name in sparsync.__all__:
        getattr(sparsync, name)
    assert Path(sparsync.__file__).is_relative_to(sys.prefix), f"{sparsync.__file__} is not what was installed"
    return WORKS, ""


def command() -> Verdict:
    own = Path(sys.prefix) / "bin" / "sparsync"
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (
            "--help",
            "workloads --new job.py",
            "compare --workload job.py:MyJob --link none --ranks 2 --steps 3 --schemes dense,topk --out results",
        ):
            run = [own, *arguments.split()]
            done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                return FAILS, f"sparsync {arguments}: {done.stderr[-2000:]}"
        assert (Path(folder) / "results" / "quality_over_time.png").exists()
    return WORKS, ""


def compiled() -> Verdict:
    from sparsync.kernels import dispatch

    return (WORKS, "") if dispatch.backend().startswith("cpp/") else (REFUSED, dispatch.why_missing or "")


def schemes() -> Verdict:
    from integrations.table import SCHEMES
    from invariants.table import ROWS as SCHEME_ROWS
    from sparsync.testing import check

    for row in SCHEME_ROWS:
        if row.id in SCHEMES.values():
            check("conservation" if row.has_residual else "replicas", row.subject_in((4,)))
    return WORKS, ""


def situation(where: str, cases: str, name: str) -> Callable[[], Verdict]:
    """Make the check of one situation with one integration, for all schemes of the table "What works where"."""

    def check() -> Verdict:
        from integrations.table import cells

        found = list(cells(dict(getattr(import_module(f"integrations.{where}"), cases)), [name])[name].values())
        worst = min(found, key=lambda each: [FAILS, WORKS].index(each.word) if each.word in (FAILS, WORKS) else 2)
        return worst.word, worst.reason

    return check


def on_ranks(name: str) -> Callable[[], Verdict]:
    """Make the check that a function of helpers.version_training performs on 2 ranks."""

    def check() -> Verdict:
        from helpers import version_training
        from helpers.distributed import run

        reason = next(iter(run(getattr(version_training, name), 2)))
        return (REFUSED, reason) if reason else (WORKS, "")

    return check


PLAIN = "float32 parameters"
# What was done if the table says that it works, and the check.
ROWS: dict[str, tuple[str, Callable[[], Verdict]]] = {
    "the package": ("wheel built and installed, every public name imported", package),
    "the command": (
        "`pip install ./lab`, and `sparsync compare` with a job by `sparsync workloads --new job.py`",
        command,
    ),
    "C++ kernels": ("the C++ kernels; without them the slow ones run, with the same results", compiled),
    "schemes": ("six schemes in a `LocalWorld` of 4: nothing is lost, and replicas are the same", schemes),
    "GradientReducer": ("`GradientReducer`: the same bits as in a `LocalWorld`", situation("manual", "CASES", PLAIN)),
    "DDP": ("`attach`, DistributedDataParallel: the same bits", situation("attach", "CASES", PLAIN)),
    "DDP, failure": ("the same, after a rank fails in a step", situation("attach", "CASES", "a rank fails in a step")),
    "checkpoint": (
        "the same, saved on 3 ranks and resumed on 2",
        situation("attach", "CASES", "resuming with another number of ranks"),
    ),
    "LocalSteps": ("`LocalSteps`: two trainings on two ranks end the same", on_ranks("local_steps")),
    "AdamWSteps": ("`AdamWSteps`: the same", on_ranks("adamw_steps")),
    "FSDP2, replicate": ("`attach`, FSDP2, `replicate=`: the same bits", situation("fsdp", "REPLICAS", PLAIN)),
    "FSDP2, two axes": ("`attach`, FSDP2 with a mesh of two axes: the same as `replicate=`", on_ranks("two_axes")),
    "FSDP2, shard": ("`attach`, FSDP2, shard axis: the same bits", situation("fsdp", "SHARDS", PLAIN)),
    "FSDP2, parameters": ('`Options(parameters="float32")`: gradients are exact', on_ranks("gathered")),
    "FSDP2, unused": ("FSDP2, a parameter that gets no gradient in a step", on_ranks("unused")),
    "FSDP2, failure": ("FSDP2, going on after a step that failed", on_ranks("failed")),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(Path(sys.argv[2]), sys.argv[3:] or list(ROWS))
    else:
        main([(python, torch) for python, _, torch in (each.partition("/") for each in sys.argv[1:])] or VERSIONS)
