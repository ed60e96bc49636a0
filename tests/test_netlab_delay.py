"""Links with a delay: rate, round trip, order, and what they need.

A busy machine makes packets late, so the best of several measurements counts.
"""

import json
import threading
import time

import pytest

from helpers.rights import builds
from sparsync_lab.netlab import NO_DELAY, Delay, delay_of, network
from test_netlab import PATIENCE_S, peer, run_streams

RATE, DELAY = 100e6, Delay(0.025)
NEAR = 1.03
TRIES, TRIPS = 4, 25


@pytest.mark.slow
@builds
def test_rate_and_round_trip_are_within_3_percent_of_what_was_asked_for() -> None:
    with network(2, RATE, delay=DELAY) as links:
        assert (links.limited, links.switch) == (True, None)
        assert links.forwarder is not None
        trips: list[float] = []
        for port in range(5000, 5000 + TRIES):
            with peer(links, 0, "answer", 0, port):
                trips += json.loads(peer(links, 1, "ask", 0, port, TRIPS).communicate(timeout=PATIENCE_S)[0])
        assert 2 * DELAY.one_way_s <= min(trips) <= NEAR * 2 * DELAY.one_way_s
        streams = threading.Thread(target=run_streams, args=(links, [(0, 1, 40_000_000)]))
        streams.start()
        seen = []
        while streams.is_alive():
            before, began = links.forwarder.count(), time.monotonic()
            time.sleep(0.5)
            after, seconds = links.forwarder.count(), time.monotonic() - began
            seen.append((after - before) * 8 / seconds)
        # Frames of one direction and a hundredth of acknowledgements in the other one.
        assert RATE / NEAR <= max(seen) <= NEAR * RATE


@builds
def test_packets_keep_their_order_though_the_delay_varies() -> None:
    with network(2, 1e9, delay=Delay(0.01, 0.01)) as links, peer(links, 0, "take", 0) as taking:
        peer(links, 1, "number", 0).wait(PATIENCE_S)
        found = json.loads(taking.communicate(timeout=PATIENCE_S)[0])
    assert found == list(range(2000))


def test_a_delay_is_read_as_people_write_it() -> None:
    assert delay_of(None, None) == delay_of("0", "0ms") == NO_DELAY and not NO_DELAY
    assert delay_of("25ms", "500us") == Delay(0.025, 0.0005)
    assert delay_of("1.5 S", None) == Delay(1.5)
