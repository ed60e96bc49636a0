"""Compile, start, query and end the program that carries packets between the ranks if links have a delay.

The program is `forwarder.c` beside this file, which explains how it treats a packet. It is compiled once per user.
"""

import hashlib
import os
import select
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sparsync_lab.netlab.delay import Delay
from sparsync_lab.netlab.rate import CATCH_UP_S
from sparsync_lab.netlab.rights import TIMEOUT_S, NetworkUnavailableError
from sparsync_lab.writable import cache_folder

SOURCE = Path(__file__).with_suffix(".c")
DEVICE = Path("/dev/net/tun")
QUEUE_BYTES = 64 << 20  # of a rank's packets in flight, in addition to rate x delay
# Linux's largest default socket buffers, our maximum for them, and their multiple of rate x round trip: TCP also counts the packets'
# memory and limits a window to half of the buffer.
RECEIVED_BYTES, SENT_BYTES, MOST_BYTES, WINDOWS = 6 << 20, 4 << 20, 1 << 30, 4
CURE = "or leave --delay out: links without a delay need neither a compiler nor TUN devices"


@dataclass(eq=False)
class Forwarder:
    """The running program."""

    process: subprocess.Popen[bytes]

    def count(self) -> int:
        """Count the bytes carried, as Ethernet frames of 1514 bytes. Raises NetworkUnavailableError if the program has ended."""
        return self._ask("count")

    def cut(self, rank: int) -> None:
        """Drop every packet from and to this rank from now on."""
        self._ask(f"cut {rank}")

    def mend(self, rank: int) -> None:
        """Carry the packets of this rank again."""
        self._ask(f"mend {rank}")

    def _ask(self, command: str) -> int:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # its reason is read below
            self.process.stdin.write(f"{command}\n".encode())
        return int(_line(self.process))


@contextmanager
def forwarder(
    anchors: Sequence[int], up_bits_per_s: float, down_bits_per_s: float, delay: Delay
) -> Iterator[Forwarder]:
    """Yield a program that connects the anchors' namespaces until the block ends, through one device `eth0` in each.

    Raises NetworkUnavailableError if the program cannot be compiled or the kernel refuses the devices.
    """
    if not DEVICE.exists():
        raise NetworkUnavailableError(
            f"links with a delay need {DEVICE}, which is missing; load the kernel's module (modprobe tun), or give the container the "
            f"device (docker: --device {DEVICE}), {CURE}"
        )
    rates = (up_bits_per_s, down_bits_per_s)
    slowest = min(rates)
    under_way = round(slowest / 8 * 2 * (delay.one_way_s + delay.jitter_s))  # in a round trip
    received, sent = (min(MOST_BYTES, max(least, WINDOWS * under_way)) for least in (RECEIVED_BYTES, SENT_BYTES))
    times = (round(1e9 * each) for each in (delay.one_way_s, delay.jitter_s, CATCH_UP_S))
    numbers = (*rates, *times, QUEUE_BYTES + 2 * under_way, received, sent, *anchors)
    # In a separate session, as an anchor: Ctrl-C must not cut the links before the ranks can stop in order.
    pipe = subprocess.PIPE
    argv = [program(), *map(str, numbers)]
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
    try:
        _line(process)
        yield Forwarder(process)
    finally:
        process.kill()  # closing the pipe is not enough: a forked child of this program may hold a copy of its write end
        process.communicate()


def program() -> str:
    """Compile the program if necessary, and return its path in the user's cache folder. Raises NetworkUnavailableError."""
    source = SOURCE.read_bytes()
    compiler = shlex.split(os.environ.get("CC") or "cc")
    digest = hashlib.sha256(source + repr((compiler, os.uname().machine)).encode()).hexdigest()[:16]
    made = cache_folder() / f"forwarder-{digest}"
    if not os.access(made, os.X_OK):
        made.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, made)
    return str(made)


def _compile(compiler: Sequence[str], made: Path) -> None:
    """Compile the program, then rename it into place, since another run may do the same concurrently."""
    with tempfile.NamedTemporaryFile(dir=made.parent, delete=False) as part:
        command = [*compiler, "-O2", "-o", part.name, str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        said = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        said = f"there is no program {compiler[0]!r}"
    if said:
        Path(part.name).unlink()
        raise NetworkUnavailableError(
            f"links with a delay need a C compiler, once: {shlex.join(command)}: {said}; install one (Debian: apt install gcc libc6-dev), "
            f"or name yours by the variable CC, {CURE}"
        )
    Path(part.name).chmod(0o755)
    Path(part.name).rename(made)


def _line(process: subprocess.Popen[bytes]) -> bytes:
    """Read the next line of the program's output. Raises NetworkUnavailableError if there is none."""
    assert process.stdout and process.stderr
    answer = select.poll()
    answer.register(process.stdout, select.POLLIN)
    if not answer.poll(TIMEOUT_S * 1000):
        raise NetworkUnavailableError(f"no answer within {TIMEOUT_S:g} s of the program that delays packets, {CURE}")
    said = process.stdout.readline()
    if not said:
        raise NetworkUnavailableError(
            f"the program that delays packets has ended: {process.stderr.read().decode().strip()}; it needs {DEVICE}, and root or a user "
            f"namespace whose user may open it (chmod a+rw {DEVICE}), {CURE}"
        )
    return said
