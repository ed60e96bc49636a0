"""A slow network on one machine: every rank gets a network stack and a link of a chosen rate to a common switch.

    from sparsync_lab.netlab import network, parse_rate

    with network(4, parse_rate("100mbit")) as links:
        workers = [subprocess.Popen(links.command(rank, [sys.executable, "worker.py"])) for rank in range(4)]

Emulated: the rate of each rank's link in both directions, shared by all its traffic, and asymmetric if `down_bits_per_s` is given; frames
of 1514 bytes that carry 1448 of payload; a switch that never blocks and never drops; TCP with cubic on any machine; and with `delay`, a
one-way delay and its jitter between any two ranks, see `forwarder`. Not emulated: loss, and other tenants. Without a delay a round trip
takes well under a millisecond. After a pause, a burst passes at once (`token_bucket`): 9278 bytes or 0.74 ms at 100 Mbit/s. Longer
transfers keep the rate within a few per cent.

A worker reads its traffic with `interface_counters`. A one-way stream counts 1514/1448 = 1.0456 bytes sent per byte of payload; its
receiver sends 0.023 in acknowledgements of 66 bytes, one per two frames. So a rank that sends as much as it receives counts 1.068 per byte
of payload, and payload fills at most 93.6 % of a link. tests/test_netlab.py measures these.

It needs Linux, iproute2, util-linux, and root or a user namespace (`restart_with_rights`). It always cleans up, however the program ends,
and simultaneous runs do not interfere: see `namespaces`.
"""

from sparsync_lab.netlab.counters import Counters as Counters
from sparsync_lab.netlab.counters import interface_counters as interface_counters
from sparsync_lab.netlab.delay import NO_DELAY as NO_DELAY
from sparsync_lab.netlab.delay import Delay as Delay
from sparsync_lab.netlab.delay import delay_of as delay_of
from sparsync_lab.netlab.delay import parse_delay as parse_delay
from sparsync_lab.netlab.rate import parse_link as parse_link
from sparsync_lab.netlab.rate import parse_rate as parse_rate
from sparsync_lab.netlab.rate import rates as rates
from sparsync_lab.netlab.rights import NetworkUnavailableError as NetworkUnavailableError
from sparsync_lab.netlab.rights import reexecution_prefix as reexecution_prefix
from sparsync_lab.netlab.rights import restart_with_rights as restart_with_rights
from sparsync_lab.netlab.topology import MAX_RANKS as MAX_RANKS
from sparsync_lab.netlab.topology import RunNetwork as RunNetwork
from sparsync_lab.netlab.topology import network as network
