"""The blocks of Python in the README and the pages, and what each needs to run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# Behind ```python: nothing, "ranks 4" for a block that torchrun starts with so many, "needs PACKAGE" for one that runs where the package is
# installed, or "no-run: " and the reason.
_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeBlock:
    """One block; `mark` is what stands behind ```python."""

    page: str
    above: int  # lines
    mark: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.above + 1}"

    @property
    def not_run(self) -> str | None:
        """Why it is not run; None where it is. Raises ValueError for a mark without a reason, or of an unknown kind."""
        kind, _, reason = self.mark.partition(": ")
        if self.mark == "" or re.fullmatch(r"ranks \d+|needs \w+", self.mark):
            return None
        if kind == "no-run" and reason:
            return reason
        raise ValueError(
            f"{self.name}: ```python {self.mark} is neither no-run: REASON, nor ranks N, nor needs PACKAGE"
        )

    @property
    def ranks(self) -> int | None:
        return int(self.mark.removeprefix("ranks ")) if self.mark.startswith("ranks ") else None

    @property
    def runs_here(self) -> bool:
        """Whether it runs in one process, with the packages that are installed."""
        package = self.mark.removeprefix("needs ") if self.mark.startswith("needs ") else None
        return self.not_run is None and self.ranks is None and (package is None or find_spec(package) is not None)


def blocks(page: str) -> Iterator[CodeBlock]:
    """Yield the blocks of a page, whose path is relative to the repository."""
    text = (ROOT / page).read_text("utf-8")
    for found in _BLOCK.finditer(text):
        yield CodeBlock(page, text[: found.start(2)].count("\n"), found[1].strip(), found[2])
