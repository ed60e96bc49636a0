"""Network namespaces that live exactly as long as the program that requested them; `topology` adds their interfaces.

An anchor keeps a namespace alive: a `cat` that reads a pipe whose write end only this program holds. However the program ends (return,
exception, SIGINT, SIGTERM, SIGKILL), the kernel closes that end, `cat` reads end-of-file and exits, and the kernel removes the namespace
with its interfaces and queues. PR_SET_PDEATHSIG would not do: it fires when the *thread* that started the anchor ends. Named namespaces
(`ip netns add`) are mounts, which outlive every process and clash between runs.
"""

import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from sparsync_lab.netlab.rights import CURE, TIMEOUT_S, NetworkUnavailableError, tool

Batch = tuple[int, str, Sequence[str]]  # process id of the anchor, "ip" or "tc", the lines of its batch file


@contextmanager
def namespaces(count: int) -> Iterator[tuple[int, ...]]:
    """Create `count` network namespaces for the block, and yield the process ids of their anchors.

    A process still running in a namespace afterwards keeps it alive, but disconnected from the others.
    Raises NetworkUnavailableError if the machine refuses one.
    """
    anchors: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            anchors.append(_start_anchor())
        for anchor in anchors:
            _await_anchor(anchor)
        yield tuple(anchor.pid for anchor in anchors)
    finally:
        for anchor in anchors:
            anchor.kill()  # closing the pipe is not enough: a forked child of this program may hold a copy of its write end
        for anchor in anchors:
            anchor.communicate()


def inside(anchor: int, argv: Sequence[str]) -> list[str]:
    """Build the argv that runs `argv` in the anchor's namespace, in the same process: nsenter replaces itself."""
    return [tool("nsenter"), "--target", str(anchor), "--net", "--", *argv]


def run_batches(batches: Sequence[Batch]) -> None:
    """Run every batch of `ip` or `tc` commands in its namespace, all concurrently.

    Raises NetworkUnavailableError with the tool's message for the first failed batch.
    """
    started = [_start_batch(anchor, name) for anchor, name, _ in batches]
    try:
        for process, (_, name, lines) in zip(started, batches, strict=True):
            message = _message(process, lines)
            if process.returncode != 0:
                raise NetworkUnavailableError(
                    f"{name} refused to set up the rate-limited network: {message}; its commands were: {'; '.join(lines)}; "
                    f"the kernel needs veth, bridge, sch_tbf and tcp_cubic, {CURE}"
                )
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _message(process: subprocess.Popen[str], lines: Sequence[str]) -> str:
    try:
        return process.communicate("\n".join(lines) + "\n", timeout=TIMEOUT_S)[1].strip()
    except subprocess.TimeoutExpired:
        process.kill()
        return f"no answer within {TIMEOUT_S:g} s ({process.communicate()[1].strip()})"


def _start_batch(anchor: int, name: str) -> subprocess.Popen[str]:
    argv = inside(anchor, [tool(name), "-batch", "-"])
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _start_anchor() -> subprocess.Popen[bytes]:
    # In a separate session: Ctrl-C reaches the whole foreground group and would cut the cables before the ranks can stop in order.
    argv = [tool("unshare"), "--net", "--", tool("cat")]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)


def _await_anchor(anchor: subprocess.Popen[bytes]) -> None:
    """Wait until `cat` echoes a byte, which shows that unshare has created the namespace and replaced itself."""
    assert anchor.stdin and anchor.stdout and anchor.stderr
    with suppress(BrokenPipeError):  # unshare has failed already; its reason is read below
        anchor.stdin.write(b"\n")
    echo = select.poll()
    echo.register(anchor.stdout, select.POLLIN)
    if not echo.poll(TIMEOUT_S * 1000):
        raise NetworkUnavailableError(
            f"no network namespace within {TIMEOUT_S:g} s; the machine is overloaded, try again, {CURE}"
        )
    if anchor.stdout.read(1) == b"":
        raise NetworkUnavailableError(
            f"this user may not create a network namespace: {anchor.stderr.read().decode().strip()}; run as root (sudo) or "
            f"inside the user namespace that reexecution_prefix() gives, {CURE}"
        )
