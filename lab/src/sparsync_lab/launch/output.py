"""Show the ranks' output line by line, each with its rank's prefix, in order of arrival."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from sparsync_lab.terminal import WIDTH, wrapped

LONGEST_LINE = 1 << 16  # bytes; longer ones are cut
# torch writes this once per rank, because the addresses of limited links have no names.
_NOISE = b"[c10d] The hostname of the client socket cannot be retrieved"


@dataclass
class Lines:
    """Cuts a rank's output stream into prefixed lines. For a line overwritten with "\\r" the last state is shown."""

    prefix: bytes
    _rest: bytes = b""

    def cut(self, content: bytes) -> bytes:
        """Return the lines that `content` completes. Empty content is the end of the stream and completes the last line."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        if self._rest and (not content or len(self._rest) > LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines if _NOISE not in line)
        return b"".join(self.prefix + line + b"\n" for line in shown)


@dataclass
class Output:
    """Standard output and error of this process. If nobody reads them, this process blocks, and so do ranks that write more."""

    closed: set[int] = field(default_factory=set)  # descriptors without a reader

    @property
    def width(self) -> int:
        """The width of standard error in columns."""
        return os.get_terminal_size(2).columns if os.isatty(2) else WIDTH

    def lines(self, descriptor: int, rank: int, ranks: int) -> Callable[[bytes], None]:
        """Make a function that takes the content of one stream of a rank and writes its prefixed lines."""
        lines = Lines(f"[rank {rank:>{len(str(ranks - 1))}}] ".encode())
        return lambda content: self.write(descriptor, lines.cut(content))

    def say(self, text: str) -> None:
        """Write lines of this program to standard error."""
        self.write(2, f"{wrapped(f'sparsync launch: {text}', error=True)}\n".encode())

    def write(self, descriptor: int, content: bytes) -> None:
        while content and descriptor not in self.closed:
            try:
                content = content[os.write(descriptor, content) :]
            except OSError:  # a closed pipe or terminal, or a full disk
                self.closed.add(descriptor)
