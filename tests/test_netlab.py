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
from pathlib import Path

import pytest

from helpers.quick import slow
from helpers.rights import ORDINARY, builds
from sparsync_lab.netlab import Counters, Delay, RunNetwork, interface_counters, network, parse_rate, rights
from sparsync_lab.netlab.rate import CATCH_UP_S, FRAME_BYTES

PATIENCE_S = 300.0
QUIET_S = 0.1  # after which no acknowledgement is under way: TCP delays them by at most 40 ms
FRAME_PAYLOAD_BYTES = 1448  # what TCP puts into a frame: less 20 of IP, 20 of TCP and 12 of TCP timestamps
FRAMING = FRAME_BYTES / FRAME_PAYLOAD_BYTES  # bytes sent per byte of payload, one way
ACKNOWLEDGEMENT_BYTES = 66  # Ethernet 14, IP 20, TCP 20, timestamps 12
HELPER = str(Path(__file__).with_name("helpers") / "netlab_peer.py")

Stream = tuple[int, int, int]  # sender, receiver, bytes of payload


def peer(
    links: RunNetwork, rank: int, role: str, answering: int, port: int = 5000, count: int = 0
) -> subprocess.Popen[str]:
    """Start one end of an experiment as a rank; wait until it listens, if it does."""
    words = [sys.executable, "-S", HELPER, role, links.addresses[answering], str(port), str(count)]
    started = subprocess.Popen(links.command(rank, words), stdout=subprocess.PIPE, text=True)
    if rank == answering:
        assert started.stdout and started.stdout.readline() == "listening\n"
    return started


def run_streams(links: RunNetwork, streams: list[Stream]) -> tuple[float, list[Counters]]:
    """Return the seconds from the first byte to the last, and what each rank's interface has counted."""
    before = [interface_counters(links.interface, anchor) for anchor in links.anchors]
    with ExitStack() as stack:
        ends: list[subprocess.Popen[str]] = []
        for role in ("receive", "send"):
            for number, (sender, receiver, nbytes) in enumerate(streams):
                rank = receiver if role == "receive" else sender
                ends.append(stack.enter_context(peer(links, rank, role, receiver, 5000 + number, nbytes)))
                stack.callback(ends[-1].kill)
        stops_s, starts_s = [], []
        for place, end in enumerate(ends):
            (starts_s if place >= len(streams) else stops_s).append(float(end.communicate(timeout=PATIENCE_S)[0]))
    time.sleep(QUIET_S)
    after = [interface_counters(links.interface, anchor) for anchor in links.anchors]
    return max(stops_s) - min(starts_s), [b - a for a, b in zip(before, after, strict=True)]


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
        seconds, counted = run_streams(links, streams)
    busiest = max(max(each.sent_bytes, each.received_bytes) for each in counted)
    assert busiest >= FRAMING * PAYLOAD
    assert busiest * 8 / RATE <= 1.02 * seconds


@pytest.mark.slow
@pytest.mark.parametrize(("up", "down"), [(4 * RATE, RATE), (RATE, 4 * RATE)])
@builds
def test_the_rates_of_the_two_directions_may_differ(up: float, down: float) -> None:
    with network(2, up, down_bits_per_s=down) as links:
        seconds, _ = run_streams(links, [(0, 1, PAYLOAD)])
    burst_bytes = 2 * FRAME_BYTES + CATCH_UP_S * RATE / 8  # passes at once; RATE is that of the slower direction
    assert seconds >= (FRAMING * PAYLOAD - burst_bytes) * 8 / RATE


@builds
def test_every_frame_is_counted_with_its_headers() -> None:
    payload = 1000 * FRAME_PAYLOAD_BYTES
    with network(2, 100e6) as links:
        _, (sender, receiver) = run_streams(links, [(0, 1, payload)])
    assert 1000 <= sender.sent_packets <= 1010
    assert FRAMING <= sender.sent_bytes / payload <= 1.01 * FRAMING
    # An acknowledgement is longer by 12 to 36 bytes when two frames changed places, as they do when a process changes cores.
    # ARP has 42 bytes.
    assert 0.99 <= sender.received_bytes / (ACKNOWLEDGEMENT_BYTES * sender.received_packets) <= 1.1
    # One for two frames, and fewer when the receiver is slow.
    assert sender.received_packets / sender.sent_packets <= 0.8
    assert (receiver.received_bytes, receiver.sent_bytes) == (sender.sent_bytes, sender.received_bytes)


@pytest.mark.slow
@builds
def test_nothing_is_dropped_when_all_send_to_one() -> None:
    with network(4, RATE) as links:
        _, (zero, *senders) = run_streams(links, [(rank, 0, PAYLOAD // 2) for rank in (1, 2, 3)])
    assert zero.received_bytes == sum(each.sent_bytes for each in senders)
    assert zero.sent_bytes <= sum(each.received_bytes for each in senders)  # and what one asks all for by ARP


@pytest.mark.slow
@builds
def test_a_command_is_the_process_itself_and_sees_only_its_interfaces() -> None:
    code = (
        "import os; print(os.getpid(), *(line.split(':')[0].strip() for line in list(open('/proc/self/net/dev'))[2:]))"
    )
    with network(64, RATE) as links:
        process = subprocess.Popen(links.command(63, [sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True)
        assert process.communicate(timeout=PATIENCE_S)[0].split() == [str(process.pid), "lo", "eth0"]
    assert links.addresses[63] == "10.77.0.64"


# It reports the namespaces that hold the network, and waits to be ended. In a separate network namespace, in which no interface may appear.
OWNER = """
import json, os, sys
from pathlib import Path
from sparsync_lab.netlab import Delay, network

def interfaces():
    return sorted(line.split(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])

before = interfaces()
with network(3, 1e8, delay=Delay(float(sys.argv[1]))) as links:
    holders = [*links.anchors, *([] if links.switch is None else [links.switch])]
    processes = holders + ([links.forwarder.process.pid] if links.forwarder else [])
    spaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in holders]
    assert interfaces() == before
    print(json.dumps({"processes": processes, "spaces": spaces}), flush=True)
    if sys.stdin.readline().strip() == "raise":
        raise KeyError("the exception of the block")
assert interfaces() == before
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


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
@pytest.mark.parametrize(
    ("end", "says"),
    [
        pytest.param(lambda owner: owner.stdin.write("return\n"), "", id="return"),
        slow(pytest.param(lambda owner: owner.stdin.write("raise\n"), "KeyError", id="exception")),
        pytest.param(interrupt, "KeyboardInterrupt", id="SIGINT"),
        slow(pytest.param(lambda owner: owner.send_signal(signal.SIGTERM), "", id="SIGTERM")),
        pytest.param(lambda owner: owner.send_signal(signal.SIGKILL), "", id="SIGKILL"),
    ],
)
@builds
def test_nothing_is_left_behind_after(
    end: Callable[[subprocess.Popen[str]], object], says: str, delay_s: float
) -> None:
    argv = [rights.tool("unshare"), "--net", "--", sys.executable, "-c", OWNER, str(delay_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as owner:
        assert owner.stdout and owner.stdin and owner.stderr
        report = json.loads(owner.stdout.readline())
        assert len(set(report["spaces"])) == (3 if delay_s else 4)  # ranks, and the switch
        assert set(report["spaces"]) <= namespaces_in_use()
        end(owner)
        said = owner.communicate(timeout=PATIENCE_S)[1]
    assert said.count("Traceback") == (1 if says else 0)
    assert says in said
    deadline_s = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{each}/exe").exists() for each in report["processes"]) or not namespaces_in_use().isdisjoint(
        report["spaces"]
    ):
        assert time.monotonic() < deadline_s, "a process or a namespace outlives its owner"
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


def test_without_a_rate_the_ranks_share_loopback_and_nothing_is_limited() -> None:
    with network(2, None) as links:
        assert not links.limited
        assert (links.interface, links.addresses[1]) == ("lo", "127.0.0.1")
        assert links.command(1, ["python", "worker.py"]) == ["python", "worker.py"]
        with pytest.raises(ValueError, match="over loopback there is no link to cut"):
            links.cut(0)
    with pytest.raises(ValueError, match="a delay of 25 ms needs links with a rate"):
        network(2, None, delay=Delay(0.025)).__enter__()


def test_a_rate_is_read_as_people_write_it_in_decimal_units() -> None:
    read = {
        "1000bit": 1e3, "64kbit": 64e3, "2.5 Gbit": 2.5e9, " 1gbit ": 1e9, "9 MBIT": 9e6, "100Mbps": 1e8, "1Gbps": 1e9, "100Mb/s": 1e8,
        "100 Mbit/s": 1e8, "10 gbits/s": 1e10, "8kb/s": 8e3,
    }  # fmt: skip
    assert {text: parse_rate(text) for text in read} == read
    for text in ("", "100", "mbit", "100mb", "100MBps", "100 MB/s", "100mbyte", "-1mbit", "1e3mbit", "nanmbit", "none"):
        with pytest.raises(ValueError, match=r"bit, kbit, mbit, gbit .* got '"):
            parse_rate(text)


def reached(links: RunNetwork, by: int, other: int, within_s: float = PATIENCE_S) -> bool:
    """Return whether a connection comes to the other rank, which refuses it, because nothing listens."""
    program = (
        f"import socket\ntry: socket.create_connection(({links.addresses[other]!r}, 9), timeout={within_s})\n"
        "except OSError as error: print(type(error).__name__)"
    )
    argv = links.command(by, [sys.executable, "-S", "-c", program])
    return subprocess.check_output(argv, text=True).strip() == "ConnectionRefusedError"


@pytest.mark.parametrize("delay_s", [0.0, 0.001])
@builds
def test_a_link_that_is_cut_loses_everything_in_both_directions_and_no_other_does(delay_s: float) -> None:
    with network(3, parse_rate("100mbit"), delay=Delay(delay_s)) as links:
        assert reached(links, 0, 1)
        links.cut(1)
        assert not reached(links, 0, 1, within_s=0.5)
        assert not reached(links, 1, 0, within_s=0.5)
        assert reached(links, 0, 2)
        links.mend(1)
        assert reached(links, 0, 1)
