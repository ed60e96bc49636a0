"""The program that carries packets between the ranks if links have a delay: compiled once per user, started, queried, and ended.

`forwarder.c` beside this file is the program, and says what it does with a packet.
"""

import hashlib
import json
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
QUEUE_BYTES = 64 << 20  # of a rank's packets that may be under way, in addition to rate x delay
# The largest default socket buffers of Linux, the most that they may hold here, and how many times rate x round trip they need: TCP counts
# the memory of packets, and lets a window be half of it.
RECEIVED_BYTES, SENT_BYTES, MOST_BYTES, WINDOWS = 6 << 20, 4 << 20, 1 << 30, 4
CURE = "or leave --delay out: links without a delay need neither a compiler nor TUN devices"


@dataclass(frozen=True)
class Forwarded:
    """The traffic that the forwarder has carried since it was started, and its cost."""

    packets: int  # of up to 64 kB each, as the ranks' interfaces count them
    nbytes: int  # with one header of IP and TCP for each packet
    frame_nbytes: int  # as Ethernet frames of 1514 bytes, which count against the rate
    dropped: int  # to or from a rank that is cut or has no interface
    processor_s: float  # of the forwarder, which has the receiving half of TCP in it

    @property
    def processor_s_per_gb(self) -> float:
        """Seconds of processor time for 1e9 bytes; 0 before the first one."""
        return self.processor_s / self.nbytes * 1e9 if self.nbytes else 0.0


@dataclass(eq=False)
class Forwarder:
    """The running program."""

    process: subprocess.Popen[bytes]

    def count(self) -> Forwarded:
        """Return what it has carried. Raises RuntimeError if it has ended."""
        return self._ask("count")

    def cut(self, rank: int) -> None:
        """Lose every packet from and to this rank from now on."""
        self._ask(f"cut {rank}")

    def mend(self, rank: int) -> None:
        """Carry the packets of this rank again."""
        self._ask(f"mend {rank}")

    def _ask(self, command: str) -> Forwarded:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # its reason is read below
            self.process.stdin.write(f"{command}\n".encode())
        return Forwarded(**json.loads(_line(self.process)))


@contextmanager
def forwarder(
    anchors: Sequence[int], up_bits_per_s: float | None, down_bits_per_s: float | None, delay: Delay
) -> Iterator[Forwarder]:
    """Yield the program that connects the namespaces of these processes, by one device `eth0` each, until the block ends.

    A rate of None has no limit. Raises NetworkUnavailableError if it cannot be compiled, or the kernel refuses the devices.
    """
    if not DEVICE.exists():
        raise NetworkUnavailableError(
            f"links with a delay need {DEVICE}, which is missing; load the kernel's module (modprobe tun), or give the container the "
            f"device (docker: --device {DEVICE}), {CURE}"
        )
    rates = [0.0 if rate is None else rate for rate in (up_bits_per_s, down_bits_per_s)]
    slowest = min(rate for rate in rates if rate)
    under_way = round(slowest / 8 * 2 * (delay.one_way_s + delay.jitter_s))  # in a round trip
    received, sent = (min(MOST_BYTES, max(least, WINDOWS * under_way)) for least in (RECEIVED_BYTES, SENT_BYTES))
    times = (round(1e9 * each) for each in (delay.one_way_s, delay.jitter_s, CATCH_UP_S))
    numbers = (*rates, *times, QUEUE_BYTES + 2 * under_way, received, sent, *anchors)
    # A separate session, as for an anchor: Ctrl-C must not cut the links before the ranks could stop in order.
    pipe = subprocess.PIPE
    argv = [program(), *map(str, numbers)]
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
    try:
        _line(process)
        yield Forwarder(process)
    finally:
        process.kill()  # not only end-of-file: a forked child of this program may hold a copy of the write end
        process.communicate()


def program() -> str:
    """Return the path of the compiled program in the user's cache folder. Raises NetworkUnavailableError."""
    source = SOURCE.read_bytes()
    compiler = shlex.split(os.environ.get("CC") or "cc")
    digest = hashlib.sha256(source + repr((compiler, os.uname().machine)).encode()).hexdigest()[:16]
    made = cache_folder() / f"forwarder-{digest}"
    if not os.access(made, os.X_OK):
        made.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, made)
    return str(made)


def _compile(compiler: Sequence[str], made: Path) -> None:
    """Compile the program and move it into place: another run may compile it at the same time."""
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
    """Return the next line of the program's output. Raises NetworkUnavailableError if there is none."""
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
