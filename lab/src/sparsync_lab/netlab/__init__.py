"""A slow network on one machine: every rank gets a network stack and a link of a chosen rate to a common switch.

    from sparsync_lab.netlab import network, parse_rate

    with network(4, parse_rate("100mbit")) as links:
        workers = [subprocess.Popen(links.command(rank, [sys.executable, "worker.py"])) for rank in range(4)]

Emulated: the rate of each rank's link in both directions, shared by all its traffic, and asymmetric if `down_bits_per_s` is given; frames
of 1514 bytes that carry 1448 of payload; a switch that never blocks and never drops; TCP with cubic on any machine; and with `delay`, a
one-way delay and its jitter between any two ranks, see `forwarder`. Not emulated: loss, and other tenants. Without a delay a round trip
takes well under a millisecond. After a pause, `up.burst_bytes` pass at once: 9278 bytes or 0.74 ms at 100 Mbit/s. Longer transfers keep the
rate within a few per cent.

A worker reads its traffic with `interface_counters`. A one-way stream counts 1514/1448 = 1.0456 bytes sent per byte of payload; its
receiver sends 0.023 in acknowledgements of 66 bytes, one per two frames. So a rank that sends as much as it receives counts 1.068 per byte
of payload, and payload fills at most 93.6 % of a link. tests/test_netlab.py measures these.

It needs Linux, iproute2, util-linux, and root or a user namespace (`restart_with_rights`). It always cleans up, however the program ends,
and simultaneous runs do not interfere: see `namespaces`.
"""

from sparsync_lab.netlab.counters import Counters, interface_counters
from sparsync_lab.netlab.delay import NO_DELAY, Delay, delay_of, parse_delay
from sparsync_lab.netlab.rate import FRAME_BYTES, TokenBucket, parse_link, parse_rate, rates
from sparsync_lab.netlab.rights import NetworkUnavailableError, reexecution_prefix, restart_with_rights
from sparsync_lab.netlab.topology import MAX_RANKS, RunNetwork, network

__all__ = [
    "FRAME_BYTES",
    "MAX_RANKS",
    "NO_DELAY",
    "Counters",
    "Delay",
    "NetworkUnavailableError",
    "RunNetwork",
    "TokenBucket",
    "delay_of",
    "interface_counters",
    "network",
    "parse_delay",
    "parse_link",
    "parse_rate",
    "rates",
    "reexecution_prefix",
    "restart_with_rights",
]
