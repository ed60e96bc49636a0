"""Progress of what takes longer than a few seconds, on standard error: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SILENT_S = 2.0  # what takes no longer prints no line
EVERY_S = 5.0  # between two lines


class Progress(ABC):
    """A count of what is done, and an estimate of the time left."""

    def __init__(self, total: int | None) -> None:
        self.total, self.done = total, 0
        self.began = time.monotonic()

    def at(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show that `done` are done, of another `total` from now on where that is given; `note` says what of."""
        self.done = done
        self.total = self.total if total is None else total
        self._show(note)

    def measured(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        self.at(done, total=total)

    def advance(self) -> None:
        """Show that one more is done."""
        self.at(self.done + 1)

    def left(self) -> str:
        """Return the time left at the pace so far; "" where it is unknown."""
        if not self.done or self.total is None:
            return ""
        seconds = (time.monotonic() - self.began) / self.done * (self.total - self.done)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left  "

    @abstractmethod
    def _show(self, note: str) -> None: ...


@contextmanager
def progress(title: str, total: int | None = None, announced: bool = False) -> Iterator[Progress]:
    """Yield a display of what `title` names, from 0 to `total`; None: how much it will be is not known.

    On a terminal a bar that vanishes at the end, above which other lines may be printed. Elsewhere a line every 5
    seconds, the first after 2; `announced`: the title at once.
    """
    if not sys.stderr.isatty():
        if announced:
            print(title, file=sys.stderr, flush=True)
        yield _Lines(title, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}{task.fields[note]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield _Bar(bars, title, total)


class _Lines(Progress):
    def __init__(self, title: str, total: int | None) -> None:
        super().__init__(total)
        self._title, self._next_s = title, self.began + SILENT_S

    def _show(self, note: str) -> None:
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + EVERY_S
        counted = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        print(f"{self._title}: {counted}  {self.left()}{note}".rstrip(), file=sys.stderr, flush=True)


class _Bar(Progress):
    def __init__(self, bars: Any, title: str, total: int | None) -> None:  # Any: rich's Progress, imported late
        super().__init__(total)
        self._bars, self._task = bars, bars.add_task(title, total=total, left="", note="")

    def _show(self, note: str) -> None:
        self._bars.update(self._task, completed=self.done, total=self.total, left=self.left(), note=note)
