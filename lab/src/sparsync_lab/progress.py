"""Show the progress of long work as lines on standard error."""

import sys
import time

SILENT_S = 2.0  # shorter work prints no line
EVERY_S = 5.0  # between two lines


class Progress:
    """A count of finished items, of `total` if known, with an estimate of the remaining time: a line every 5 s, the first after 2 s.

    `announced` prints the title at once.
    """

    def __init__(self, title: str, total: int | None = None, announced: bool = False) -> None:
        if announced:
            print(title, file=sys.stderr, flush=True)
        self.title, self.total, self.done = title, total, 0
        self.began = time.monotonic()
        self._next_s = self.began + SILENT_S

    def at(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show that `done` items are done, with a note; `total` replaces the total from now on."""
        self.done, self.total = done, self.total if total is None else total
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + EVERY_S
        counted, left = f"{done}", ""
        if self.total is not None:
            counted = f"{done}/{self.total}"
            if done:
                seconds = (now - self.began) / done * (self.total - done)
                left = f"{int(seconds // 60)}:{int(seconds % 60):02d} left  "
        print(f"{self.title}: {counted}  {left}{note}".rstrip(), file=sys.stderr, flush=True)

    def advance(self) -> None:
        """Show that one more is done."""
        self.at(self.done + 1)
