"""Put small faults into the library, each with quick tests of which one must fail.

    .venv/bin/python -m studies mutations [NAME ...]

Run it before and after a change that removes tests. Mutations are data (`mutations.toml`): a file of the package, a text that occurs in it
once, its replacement, and tests. Each is applied to a copy of the package, never to the sources. First the tests must pass on an unchanged
copy. Exit status 1 unless all mutations are caught.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sparsync_lab.toml import tomllib
from studies import parts

PACKAGES = {
    "sparsync": parts.ROOT / "src" / "sparsync",
    "sparsync_elastic": parts.ROOT / "elastic" / "src" / "sparsync_elastic",
}
CAUGHT, NOT_CAUGHT, DOES_NOT_APPLY, DO_NOT_RUN = "caught", "NOT CAUGHT", "does not apply", "tests do not run"
TIMEOUT_S = 300  # of one test: a mutation may make ranks wait for each other


@dataclass(frozen=True)
class Mutation:
    """A fault in one file of a package."""

    name: str
    file: str  # relative to the package's folder
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # node ids, at least one of which must fail
    package: str = "sparsync"

    def applied_to(self, source: str) -> str:
        """Apply the mutation to the file's source. Raises ValueError unless the old text occurs once."""
        if (found := source.count(self.old)) != 1:
            raise ValueError(
                f"the old text of {self.name!r} must occur once in {self.file}, got {found} times; "
                "update the fault in studies/mutations.toml to the current source"
            )
        return source.replace(self.old, self.new)


def mutations() -> list[Mutation]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["mutation"]
    return [Mutation(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def main(argv: Sequence[str]) -> None:
    known = {each.name: each for each in mutations()}
    parser = parts.options("mutations", __doc__, writes=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone; without any, all of them")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no mutation is named {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in given.names] or list(known.values())
    with TemporaryDirectory() as folder:
        unchanged = Path(folder) / "unchanged"
        for name, source in PACKAGES.items():
            shutil.copytree(source, unchanged / name, ignore=shutil.ignore_patterns("__pycache__"))
        status, output = run(unchanged, sorted({test for each in chosen for test in each.tests}))
        if status:
            sys.exit(f"{output}\nthe tests fail without a mutation; mend them first")
        caught = 0
        for each in chosen:
            result, why = tried(each, unchanged)
            caught += result == CAUGHT
            print(f"{result:16} {each.name}\n{why}".rstrip(), flush=True)
    print(f"{caught} of {len(chosen)} mutations are caught")
    sys.exit(int(caught != len(chosen)))


def tried(mutation: Mutation, unchanged: Path) -> tuple[str, str]:
    """Run a mutation's tests on a mutated copy of `unchanged`; returns the result, with the failing tests or the error."""
    folder = unchanged.with_name(mutation.name)
    shutil.copytree(unchanged, folder)
    file = folder / mutation.package / mutation.file
    try:
        file.write_text(mutation.applied_to(file.read_text("utf-8")), "utf-8")
    except (ValueError, OSError) as error:
        return DOES_NOT_APPLY, f"    {error}"
    status, output = run(folder, ["-x", *mutation.tests])
    if status > 1:  # pytest was interrupted, or a test is missing or not quick
        return DO_NOT_RUN, output
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    return (CAUGHT if status else NOT_CAUGHT), "\n".join(f"    {each}" for each in failed)


def run(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run quick tests with the packages in `folder`; return pytest's exit status and output."""
    path = os.pathsep.join(filter(None, [str(folder), str(parts.ROOT / "lab" / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", "-rfE", "--tb=short"),
            *(f"--timeout={TIMEOUT_S}", *arguments),
        ],
        cwd=parts.ROOT,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr
