"""The Python blocks of the README and the pages, and their requirements."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# Marks after ```python: none, "ranks 4" for a block to run with torchrun, "needs PACKAGE" for one to run if the package is installed, or
# "no-run: " and the reason.
_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeBlock:
    """One block; `mark` is the text after ```python."""

    page: str
    above: int  # lines
    mark: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.above + 1}"

    @property
    def not_run(self) -> str | None:
        """The reason not to run it; None if it runs. Raises ValueError for a mark of unknown kind or without a reason."""
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
        """Whether it runs in one process with the installed packages."""
        package = self.mark.removeprefix("needs ") if self.mark.startswith("needs ") else None
        return self.not_run is None and self.ranks is None and (package is None or find_spec(package) is not None)


def blocks(page: str) -> Iterator[CodeBlock]:
    """Yield the blocks of a page, whose path is relative to the repository."""
    text = (ROOT / page).read_text("utf-8")
    for found in _BLOCK.finditer(text):
        yield CodeBlock(page, text[: found.start(2)].count("\n"), found[1].strip(), found[2])
