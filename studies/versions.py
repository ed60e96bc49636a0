"""Tries the package with several versions of Python and torch, and rewrites the table of docs/what_works.md: `make test-versions`.

`python studies/versions.py 3.11/2.15.0 ...` tries only these, and writes the table from their results and those of earlier runs. Each
pair has a virtual environment in build/versions, which is used again. Fails, and writes nothing, where a row fails.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from version_rows import ROWS

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
WITHIN_S = 1800.0  # for one version, on a machine that does something else besides

Verdicts = dict[str, dict[str, str]]


def main() -> None:
    wanted = [tuple(each.split("/")) for each in sys.argv[1:]] or VERSIONS
    for python, torch in wanted:
        print(f"Python {python}, torch {torch}", flush=True)
        for row, verdict in _tried(python, torch).items():
            print(f"  {row}: {verdict['word']} {verdict['reason'][:2000]}", flush=True)
    found = {each: verdicts for each in VERSIONS if len(verdicts := _read(*each)) == len(ROWS)}
    if missing := ["/".join(each) for each in VERSIONS if each not in found]:
        print(f"no whole result yet of {', '.join(missing)}, which the page therefore leaves out")
    if failing := [
        f"{'/'.join(each)} {row}" for each, rows in found.items() for row in ROWS if rows[row]["word"] == "fails"
    ]:
        raise SystemExit(f"these fail: {', '.join(failing)}; nothing was written")
    PAGE.write_text(replaced(PAGE, PART, _part(found)))


def _tried(python: str, torch: str) -> Verdicts:
    """Make what is missing of the environment, install the package there, and return the verdicts."""
    folder = BUILD / f"py{python}-torch{torch}"
    own = folder / "bin" / "python"
    if not own.exists():
        _run(_interpreter(python), "-m", "venv", folder)
        _run(own, "-m", "pip", "install", "--quiet", f"torch=={torch}", *NEEDED)
    _run(own, "-m", "pip", "uninstall", "--quiet", "--yes", "sparsync", "sparsync-elastic", "sparsync-lab")
    _run(own, "-m", "pip", "install", "--quiet", ROOT / "lab")  # brings the library, built here
    out = _result(python, torch)
    out.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [str(own), str(ROOT / "studies" / "version_features.py"), str(out)]
    done = subprocess.run(
        command,
        env=environment,
        timeout=WITHIN_S,
        check=False,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return _read(python, torch)


def _interpreter(python: str) -> str:
    found = shutil.which(f"python{python}")
    if found is None:
        raise SystemExit(f"python{python} is not on the PATH; install it, or name the versions to try: 3.11/2.13.0")
    return found


def _result(python: str, torch: str) -> Path:
    return BUILD / f"py{python}-torch{torch}.json"


def _read(python: str, torch: str) -> Verdicts:
    path = _result(python, torch)
    return json.loads(path.read_text()) if path.exists() else {}


def _run(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True)


def _part(found: dict[tuple[str, str], Verdicts]) -> str:
    """Return the part of the page: a table of what works with which versions, and the reasons below it."""
    torches = sorted({torch for _, torch in found}, key=_numbers)
    floors = {row: _floor(row, found, torches) for row in ROWS}
    reasons: dict[str, int] = {}

    def before(row: str) -> str:
        told = (verdicts[row]["reason"] for verdicts in found.values())
        texts = (re.sub(r"of torch \S+", "of this torch", reason) for reason in told if reason)
        return ", ".join(dict.fromkeys(f"({reasons.setdefault(text, len(reasons) + 1)})" for text in texts))

    rows = [["what works", "from torch", "older torch"], ["---"] * 3]
    rows += [[text, floors[row], before(row)] for row, text in ROWS.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    pairs = ", ".join(f"{python} / {torch}" for python, torch in found)
    return f"{_HEAD.format(pairs=pairs)}{table}\n\n{notes}"


def _floor(row: str, found: dict[tuple[str, str], Verdicts], torches: list[str]) -> str:
    """Return the lowest torch from which on a row works with all that were tried."""
    lowest = "none"
    for torch in reversed(torches):
        if any(verdicts[row]["word"] != "works" for (_, each), verdicts in found.items() if each == torch):
            break
        lowest = torch
    return ".".join(lowest.split(".")[:2])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


_HEAD = """`make test-versions` tries each row on Linux x86-64 and CPU with Python / torch {pairs}.
Rows that need several processes run with 2 over gloo, the checkpoint with 3.

"""

if __name__ == "__main__":
    main()
