"""Links with a delay against plain TCP streams and datagrams: rate, round trip, order, and nothing is lost or left afterwards.

A busy machine makes packets late, so of several measurements the best one counts.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.rights import builds
from sparsync_lab.netlab import NO_DELAY, Delay, NetworkUnavailableError, RunNetwork, delay_of, forwarder, network
from test_netlab import PATIENCE_S, namespaces_in_use, reached, run_streams

HELPER = str(Path(__file__).with_name("helpers") / "netlab_echo.py")
RATE, DELAY = 100e6, Delay(0.025)
NEAR = 1.03
TRIES = 4


def at(links: RunNetwork, rank: int, what: str, answering: int = 0) -> subprocess.Popen[str]:
    argv = links.command(rank, [sys.executable, "-S", HELPER, what, links.address(answering)])
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def round_trips(links: RunNetwork) -> list[float]:
    with at(links, 0, "answer") as answering:
        assert answering.stdout and answering.stdout.readline() == "listening\n"
        return json.loads(at(links, 1, "ask").communicate(timeout=PATIENCE_S)[0])


def carried_bits_per_s(links: RunNetwork, window_s: float) -> Iterator[float]:
    """Yield the rate of frames of each window of time, without end."""
    while True:
        before, began = links.forwarded(), time.monotonic()
        time.sleep(window_s)
        after, seconds = links.forwarded(), time.monotonic() - began
        assert before and after
        yield (after.frame_nbytes - before.frame_nbytes) * 8 / seconds


@pytest.mark.slow
@builds
def test_rate_and_round_trip_are_within_3_percent_of_what_was_asked_for() -> None:
    with network(2, RATE, delay=DELAY) as links:
        assert (links.delay, links.limited, links.switch) == (DELAY, True, None)
        trips = [trip for _ in range(TRIES) for trip in round_trips(links)]
        assert 2 * DELAY.one_way_s <= min(trips) <= NEAR * 2 * DELAY.one_way_s
        streams = threading.Thread(target=run_streams, args=(links, 2, [(0, 1, 40_000_000)]))
        streams.start()
        seen = []
        for rate in carried_bits_per_s(links, 0.5):
            if not streams.is_alive():
                break
            seen.append(rate)
        # Frames of one direction and a hundredth of acknowledgements in the other one.
        assert RATE / NEAR <= max(seen) <= NEAR * RATE


@builds
def test_packets_keep_their_order_though_the_delay_varies() -> None:
    with network(2, 1e9, delay=Delay(0.01, 0.01)) as links, at(links, 0, "take") as taking:
        assert taking.stdout and taking.stdout.readline() == "listening\n"
        at(links, 1, "number").wait(PATIENCE_S)
        found = json.loads(taking.communicate(timeout=PATIENCE_S)[0])
    assert found == list(range(2000))


@builds
def test_a_delayed_link_that_is_cut_loses_everything_in_both_directions_and_no_other_does() -> None:
    with network(3, RATE, delay=Delay(0.001)) as links:
        assert reached(links, 0, 1) == "ConnectionRefusedError"
        links.cut(1)
        assert reached(links, 0, 1, within_s=0.5) != "ConnectionRefusedError"
        assert reached(links, 1, 0, within_s=0.5) != "ConnectionRefusedError"
        assert reached(links, 0, 2) == "ConnectionRefusedError"
        links.mend(1)
        assert reached(links, 0, 1) == "ConnectionRefusedError"


OWNER = """
import os, sys
from sparsync_lab.netlab import Delay, network
with network(2, 1e8, delay=Delay(0.01)) as links:
    spaces = [os.readlink(f"/proc/{anchor}/ns/net") for anchor in links.anchors]
    print(links.forwarder.process.pid, *spaces, flush=True)
    if sys.argv[1] == "killed":
        sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["returned", "killed"])
@builds
def test_the_forwarder_and_the_namespaces_end_with_their_owner(end: str) -> None:
    argv = [sys.executable, "-c", OWNER, end]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        process, *spaces = owner.stdout.readline().split()
        if end == "killed":
            owner.kill()
    deadline_s = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{process}").exists() or not namespaces_in_use().isdisjoint(spaces):
        assert time.monotonic() < deadline_s, "the forwarder or a namespace outlives its owner"
        time.sleep(0.02)


@builds
def test_a_missing_compiler_or_device_is_an_error_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NetworkUnavailableError, match=r"no-such-compiler.*there is no program.*variable CC"):
        network(2, RATE, delay=DELAY).__enter__()
    monkeypatch.setenv("CC", "cc -no-such-option")
    with pytest.raises(NetworkUnavailableError, match=r"no-such-option.*or leave --delay out"):
        network(2, RATE, delay=DELAY).__enter__()
    assert list(tmp_path.glob("**/*forwarder*")) == [] == list(tmp_path.glob("*/tmp*"))
    monkeypatch.setattr(forwarder, "DEVICE", tmp_path / "tun")
    with pytest.raises(NetworkUnavailableError, match=r"which is missing; load the kernel's module \(modprobe tun\)"):
        network(2, RATE, delay=DELAY).__enter__()


@builds
def test_the_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = forwarder.program()
    monkeypatch.setattr(forwarder, "_compile", None)
    again = forwarder.program()
    assert again == made and os.access(made, os.X_OK)


def test_a_delay_is_read_as_people_write_it() -> None:
    assert delay_of(None, None) == delay_of("0", "0ms") == NO_DELAY and not NO_DELAY
    assert delay_of("25ms", "500us") == Delay(0.025, 0.0005)
    assert delay_of("1.5 S", None) == Delay(1.5)


@pytest.mark.parametrize(
    ("delay", "jitter", "says"),
    [
        ("25", None, r"--delay: a delay is a number with one of the units us, ms, s, such as 25ms, got '25'"),
        ("25ms", "-1ms", r"--jitter: .* got '-1ms'"),
        ("11s", None, r"must be in \[0, 10\] s, got 11 s"),
        ("1ms", "2ms", r"jitter must be in \[0, 0.001\] s.* got 0.002 s; give a longer delay"),
        (None, "2ms", r"jitter must be in \[0, 0\] s"),
    ],
)
def test_an_impossible_delay_is_refused(delay: str | None, jitter: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        delay_of(delay, jitter)


def test_a_delay_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="a delay of 25 ms needs links with a rate"):
        network(2, None, delay=DELAY).__enter__()
