"""What the ranks write, line by line behind their prefix, in the order in which it came, without blocking."""

import os
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sparsync_lab.terminal import WIDTH, wrapped

LONGEST_LINE = 1 << 16  # bytes; longer ones are cut
MOST_WAITING = 1 << 20  # bytes; while more wait to be written, nothing is read from the ranks
PIECE = select.PIPE_BUF  # a pipe that is ready takes so much at once
# torch writes this once for each rank: the addresses of limited links have no names.
_NOISE = b"[c10d] The hostname of the client socket cannot be retrieved"


@dataclass
class Lines:
    """Cuts what one stream of a rank writes into lines with a prefix. Of a line that was overwritten ("\\r") the last state is shown."""

    prefix: bytes
    _rest: bytes = b""

    def cut(self, content: bytes) -> bytes:
        """Return the lines that are complete with `content`; an empty one means that the stream has ended, and ends the last line."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        if self._rest and (not content or len(self._rest) > LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines if _NOISE not in line)
        return b"".join(self.prefix + line + b"\n" for line in shown)


@dataclass
class Output:
    """What is to be written to standard output and error of this process: `write` queues it, `flush` writes as much as does not block."""

    terminal: bool  # standard error is one
    closed: set[int] = field(default_factory=set)  # descriptors that nobody reads any more
    _waiting: deque[tuple[int, bytes]] = field(default_factory=deque)
    _nbytes: int = 0

    @property
    def full(self) -> bool:
        return self._nbytes > MOST_WAITING

    @property
    def waits_for(self) -> int | None:
        """The file descriptor that the next piece is for; None where nothing waits."""
        return self._waiting[0][0] if self._waiting else None

    @property
    def width(self) -> int:
        """The columns of standard error."""
        return os.get_terminal_size(2).columns if self.terminal else WIDTH

    def lines(self, descriptor: int, prefix: bytes) -> Callable[[bytes], None]:
        """Return what takes the content of one stream of a rank, and writes its lines behind the prefix."""
        lines = Lines(prefix)
        return lambda content: self.write(descriptor, lines.cut(content))

    def write(self, descriptor: int, content: bytes) -> None:
        if content:
            self._waiting.append((descriptor, content))
            self._nbytes += len(content)

    def say(self, text: str) -> None:
        """Write lines of this program's own to standard error."""
        self.write(2, f"{wrapped(f'sparsync launch: {text}', error=True)}\n".encode())

    def flush(self) -> None:
        """Write pieces while their descriptors are ready; drop those of descriptors that are closed."""
        while self._waiting:
            descriptor, content = self._waiting[0]
            if descriptor in self.closed:
                self._waiting.popleft()
                self._nbytes -= len(content)
                continue
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            if not poll.poll(0):
                return
            try:
                written = os.write(descriptor, content[:PIECE])
            except OSError:  # a pipe or a terminal that was closed, or a disk that is full
                self.closed.add(descriptor)
                continue
            self._nbytes -= written
            self._waiting.popleft()
            if written < len(content):
                self._waiting.appendleft((descriptor, content[written:]))


def prefix(rank: int, ranks: int) -> bytes:
    """Return what stands before each line of a rank."""
    return f"[rank {rank:>{len(str(ranks - 1))}}] ".encode()
