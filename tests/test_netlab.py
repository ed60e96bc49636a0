"""The emulated network against plain TCP streams: rates, framing, isolation, and nothing is left afterwards.

Times have lower bounds only, which a busy machine cannot break: no transfer is faster than its link.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.quick import slow
from helpers.rights import ORDINARY, builds
from sparsync_lab.netlab import (
    FRAME_BYTES,
    Counters,
    NetworkUnavailableError,
    RunNetwork,
    counters,
    interface_counters,
    network,
    parse_rate,
    reexecution_prefix,
    rights,
)

PATIENCE_S = 300.0
FRAME_PAYLOAD_BYTES = 1448  # what TCP puts into a frame: less 20 of IP, 20 of TCP and 12 of TCP timestamps
FRAMING = FRAME_BYTES / FRAME_PAYLOAD_BYTES  # bytes sent per byte of payload, one way
ACKNOWLEDGEMENT_BYTES = 66  # Ethernet 14, IP 20, TCP 20, timestamps 12

Stream = tuple[int, int, int]  # sender, receiver, bytes of payload


@dataclass(frozen=True)
class StreamsSeen:
    """One run of some streams: the seconds from the first byte to the last, and each rank's counters."""

    seconds: float
    counters: list[Counters]

    @property
    def busiest_bytes(self) -> int:
        """The most that any interface carried in one direction."""
        return max(max(each.sent_bytes, each.received_bytes) for each in self.counters)


def run_streams(links: RunNetwork, ranks: int, streams: list[Stream]) -> StreamsSeen:
    script = str(Path(__file__).with_name("helpers") / "netlab_streams.py")
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            addresses = [links.address(each) for each in range(ranks)]
            fixed = [str(counters.__file__), links.interface, str(rank), json.dumps(addresses), json.dumps(streams)]
            argv = links.command(rank, [sys.executable, "-S", script, *fixed])
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.kill)
            processes.append(stack.enter_context(process))
        for state in ["listening", "connected", "counted", "done"]:
            for process in processes:
                assert process.stdout.readline() == f"{state}\n"
            for process in processes:
                process.stdin.write("go\n")
                process.stdin.flush()
        ends = [json.loads(process.stdout.readline()) for process in processes]
        for process in processes:
            process.communicate(timeout=PATIENCE_S)
    start_s = min(end.pop("start_s") for end in ends)
    stop_s = max(end.pop("stop_s") for end in ends)
    return StreamsSeen(stop_s - start_s, [Counters(**end) for end in ends])


RATE = 20e6
PAYLOAD = 1_000_000


@pytest.mark.parametrize(
    ("ranks", "streams"),
    [
        slow(pytest.param(2, [(0, 1, PAYLOAD)], id="one_way")),
        pytest.param(2, [(0, 1, PAYLOAD), (1, 0, PAYLOAD)], id="both_ways_at_once"),
        slow(pytest.param(3, [(0, 2, PAYLOAD // 2), (1, 2, PAYLOAD // 2)], id="two_senders_share_a_receiver")),
        slow(pytest.param(3, [(0, 1, PAYLOAD // 2), (0, 2, PAYLOAD // 2)], id="two_receivers_share_a_sender")),
    ],
)
@builds
def test_no_interface_is_faster_than_the_rate(ranks: int, streams: list[Stream]) -> None:
    with network(ranks, RATE) as links:
        seen = run_streams(links, ranks, streams)
    assert seen.busiest_bytes >= FRAMING * PAYLOAD
    assert seen.busiest_bytes * 8 / RATE <= 1.02 * seen.seconds


@pytest.mark.slow
@builds
def test_the_rates_of_the_two_directions_may_differ() -> None:
    with network(2, 4 * RATE, down_bits_per_s=RATE) as links:
        assert links.up and links.down and links.up.rate_bits_per_s == 4 * links.down.rate_bits_per_s
        for nbytes in (PAYLOAD // 4, PAYLOAD):
            seen = run_streams(links, 2, [(0, 1, nbytes)])
            assert seen.seconds >= (FRAMING * nbytes - links.down.burst_bytes) * 8 / RATE
    with network(2, RATE, down_bits_per_s=4 * RATE) as links:
        assert links.up is not None
        seen = run_streams(links, 2, [(0, 1, PAYLOAD)])
        assert seen.seconds >= (FRAMING * PAYLOAD - links.up.burst_bytes) * 8 / RATE


@builds
def test_every_frame_is_counted_with_its_headers() -> None:
    payload = 1000 * FRAME_PAYLOAD_BYTES
    with network(2, 100e6) as links:
        sender, receiver = run_streams(links, 2, [(0, 1, payload)]).counters
    assert 1000 <= sender.sent_packets <= 1010
    assert FRAMING <= sender.sent_bytes / payload <= 1.01 * FRAMING
    # An acknowledgement is longer by 12 to 36 bytes when two frames changed places, as they do when a process changes cores.
    assert 1 <= sender.received_bytes / (ACKNOWLEDGEMENT_BYTES * sender.received_packets) <= 1.1
    # One for two frames, and fewer when the receiver is slow.
    assert sender.received_packets / sender.sent_packets <= 0.8
    assert (receiver.received_bytes, receiver.sent_bytes) == (sender.sent_bytes, sender.received_bytes)


@pytest.mark.slow
@builds
def test_nothing_is_dropped_when_all_send_to_one() -> None:
    with network(4, RATE) as links:
        zero, *senders = run_streams(links, 4, [(rank, 0, PAYLOAD // 2) for rank in (1, 2, 3)]).counters
    assert zero.received_bytes == sum(each.sent_bytes for each in senders)
    assert zero.sent_bytes == sum(each.received_bytes for each in senders)


@pytest.mark.slow
@builds
def test_a_command_is_the_process_itself_and_sees_only_its_own_interfaces() -> None:
    code = "import os; from sparsync_lab.netlab import interface_counters; print(os.getpid(), interface_counters('eth0').sent_bytes >= 0)"
    with network(64, RATE) as links:
        process = subprocess.Popen(links.command(63, [sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True)
        assert process.communicate(timeout=PATIENCE_S)[0].split() == [str(process.pid), "True"]
        names = subprocess.check_output(links.command(63, ["cat", "/proc/self/net/dev"]), text=True, timeout=PATIENCE_S)
    assert [line.split(":")[0].strip() for line in names.splitlines()[2:]] == ["lo", "eth0"]
    assert links.address(63) == "10.77.0.64"


# Run in a network namespace of its own, so that interfaces of others do not come and go while it looks. It reports the interfaces outside
# the network before and while it stands, and the namespaces that hold it; then it waits to be ended.
OWNER = """
import json, os, sys, time
from pathlib import Path
from sparsync_lab.netlab import network

def interfaces():
    return sorted(line.split(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])

def parent(stat):
    try:
        return int(stat.read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None

before = interfaces()
with network(3, 1e6) as links:
    anchors = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if parent(stat) == os.getpid()]
    spaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in anchors]
    print(json.dumps({"before": before, "during": interfaces(), "spaces": spaces}), flush=True)
    if sys.stdin.readline().strip() == "raise":
        raise KeyError("the exception of the block")
print(json.dumps(interfaces()), flush=True)
"""


def namespaces_in_use() -> set[str]:
    spaces = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            spaces.add(str((process / "ns" / "net").readlink()))
        except OSError:  # it has ended, or belongs to another user
            continue
    return spaces


def interrupt(owner: subprocess.Popen[str]) -> None:
    os.killpg(owner.pid, signal.SIGINT)  # as a terminal does on Ctrl-C, to the whole foreground group


@pytest.mark.parametrize(
    ("end", "says"),
    [
        pytest.param(lambda owner: owner.stdin.write("return\n"), "", id="return"),
        pytest.param(lambda owner: owner.stdin.write("raise\n"), "KeyError", id="exception"),
        pytest.param(interrupt, "KeyboardInterrupt", id="SIGINT"),
        pytest.param(lambda owner: owner.send_signal(signal.SIGTERM), "", id="SIGTERM"),
        pytest.param(lambda owner: owner.send_signal(signal.SIGKILL), "", id="SIGKILL"),
    ],
)
@builds
def test_nothing_is_left_behind_after(end: Callable[[subprocess.Popen[str]], object], says: str) -> None:
    argv = [rights.tool("unshare"), "--net", "--", sys.executable, "-c", OWNER]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as owner:
        assert owner.stdout and owner.stdin and owner.stderr
        report = json.loads(owner.stdout.readline())
        assert report["during"] == report["before"]
        assert len(set(report["spaces"])) == 4  # three ranks and the switch
        assert set(report["spaces"]) <= namespaces_in_use()
        end(owner)
        rest, said = owner.communicate(timeout=PATIENCE_S)
    assert said.count("Traceback") == (1 if says else 0)
    assert says in said
    assert owner.returncode or json.loads(rest) == report["before"]
    deadline_s = time.monotonic() + PATIENCE_S
    while not namespaces_in_use().isdisjoint(report["spaces"]):
        assert time.monotonic() < deadline_s, "a namespace outlives its owner"
        time.sleep(0.02)


REEXECUTED = """
import os, subprocess, sys
from sparsync_lab.netlab import network, reexecution_prefix
prefix = reexecution_prefix()
if prefix:
    os.execv(prefix[0], [*prefix, sys.executable, "-c", sys.argv[1], sys.argv[1], "again"])
with network(2, 1e6) as links:
    print(sys.argv[2:], subprocess.check_output(links.command(1, ["ip", "-brief", "-4", "address"]), text=True).split()[-1])
"""


@builds
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv takes root's rights away")
def test_an_ordinary_user_gets_the_network_in_a_user_namespace() -> None:
    argv = [*ORDINARY, sys.executable, "-c", REEXECUTED, REEXECUTED]
    done = subprocess.run(argv, capture_output=True, check=False, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("['again'] 10.77.0.2/24\n", "")


REFUSED = """
from sparsync_lab.netlab import NetworkUnavailableError, network, reexecution_prefix
for build in [reexecution_prefix, lambda: network(2, 1e6).__enter__()]:
    try:
        build()
    except NetworkUnavailableError as error:
        print(error)
"""


@builds
def test_missing_rights_are_an_error_with_the_cure() -> None:
    # A user namespace may forbid itself, and those inside it, further network namespaces.
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" -c "$1"'
    argv = [rights.tool("unshare"), "--user", "--map-root-user", "--", "sh", "-c", shell, sys.executable, REFUSED]
    done = subprocess.run(argv, capture_output=True, check=True, text=True, timeout=PATIENCE_S)
    prefix, build = done.stdout.splitlines()
    assert "No space left on device" in prefix and "No space left on device" in build
    assert all(cure in prefix for cure in ["sudo", "user.max_user_namespaces", "--link none"])
    assert all(cure in build for cure in ["sudo", "reexecution_prefix()", "--link none"])


def test_missing_commands_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rights, "_which", lambda name: None if name in ("ip", "tc") else f"/bin/{name}")
    with pytest.raises(NetworkUnavailableError, match=r"not found: ip, tc; install iproute2, or .*--link none"):
        reexecution_prefix()


def test_without_a_rate_the_ranks_share_loopback_and_nothing_is_limited() -> None:
    with network(2, None) as links:
        assert not links.limited
        assert (links.interface, links.address(1)) == ("lo", "127.0.0.1")
        assert links.command(1, ["python", "worker.py"]) == ["python", "worker.py"]
    counted = interface_counters("lo")  # read once, for others may be sending
    assert counted.sent_bytes == counted.received_bytes


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        *[("1000bit", 1e3), ("64kbit", 64e3), ("100mbit", 1e8), ("2.5 Gbit", 2.5e9), (" 1gbit ", 1e9), ("9 MBIT", 9e6)],
        *[
            ("100Mbps", 1e8),
            ("1Gbps", 1e9),
            ("100Mb/s", 1e8),
            ("100 Mbit/s", 1e8),
            ("10 gbits/s", 1e10),
            ("8kb/s", 8e3),
        ],
    ],
)
def test_a_rate_is_read_as_people_write_it_in_decimal_units(text: str, bits_per_s: float) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize(
    "text", ["", "100", "mbit", "100mb", "100MBps", "100 MB/s", "100mbyte", "-1mbit", "1e3mbit", "nanmbit", "none"]
)
def test_an_invalid_rate_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match=r"bit, kbit, mbit, gbit .* got '"):
        parse_rate(text)


def reached(links: RunNetwork, by: int, other: int, within_s: float = PATIENCE_S) -> str:
    """Return the name of the error that a connection ends with; a rank that is reached refuses it, for nobody listens."""
    program = (
        f"import socket\ntry: socket.create_connection(({links.address(other)!r}, 9), timeout={within_s})\n"
        "except OSError as error: print(type(error).__name__)"
    )
    done = subprocess.run(
        links.command(by, [sys.executable, "-c", program]), capture_output=True, check=False, text=True
    )
    return done.stdout.strip()


@builds
def test_a_link_that_is_cut_loses_everything_in_both_directions_and_no_other_does() -> None:
    with network(3, parse_rate("100mbit")) as links:
        assert reached(links, 0, 1) == "ConnectionRefusedError"
        links.cut(1)
        assert reached(links, 0, 1, within_s=0.5) != "ConnectionRefusedError"
        assert reached(links, 1, 0, within_s=0.5) != "ConnectionRefusedError"
        assert reached(links, 0, 2) == "ConnectionRefusedError"
        links.mend(1)
        assert reached(links, 0, 1) == "ConnectionRefusedError"
    with network(2, None) as loopback, pytest.raises(ValueError, match="over loopback there is no link to cut"):
        loopback.cut(0)
