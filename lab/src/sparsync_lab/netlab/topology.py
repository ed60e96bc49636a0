"""The emulated network: P ranks around one switch, each on a cable with a rate limit in each direction; or plain loopback."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sparsync_lab.netlab.delay import NO_DELAY, Delay, check_delay
from sparsync_lab.netlab.forwarder import Forwarder, forwarder
from sparsync_lab.netlab.namespaces import inside, namespaces, run_batches
from sparsync_lab.netlab.rate import FRAME_BYTES, token_bucket

MAX_RANKS = 64
BATCH_FRAMES = 8
INTERFACE = "eth0"
PORT = 29500
MOST_FRAMES = 43  # in one packet of 64 kB
PACKET_S = 1e-3  # transmission time of one packet on links with a delay
# Packets that may wait in a device: per rank, more than the ranks' socket buffers hold; and in total.
DEVICE_PACKETS, MOST_DEVICE_PACKETS = 8192, 1 << 17


@dataclass(frozen=True)
class RunNetwork:
    """The network of one run: the address and the interface of each rank, and the command that starts a process there.

    Without a limit (`limited` is False) the ranks use loopback, as fast as the machine copies. Times measured there prove nothing
    about a network, and `interface` counts the traffic of all ranks together.
    """

    interface: str  # of every rank, under the same name; gloo: GLOO_SOCKET_IFNAME
    addresses: tuple[str, ...]  # IPv4, by rank
    prefixes: tuple[tuple[str, ...], ...]  # of commands that run as that rank
    anchors: tuple[int, ...] = ()  # the process that keeps each rank's network stack alive; none over loopback
    switch: int | None = None  # the process that keeps the switch's alive; None with a forwarder
    forwarder: Forwarder | None = field(default=None, compare=False)  # if there is a delay

    @property
    def limited(self) -> bool:
        """Whether the links are limited, so that times measured over them are meaningful."""
        return bool(self.anchors)

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Build the argv that runs `argv` as that rank in the same process: signals and exit status reach it directly."""
        return [*self.prefixes[rank], *argv]

    def cut(self, rank: int) -> None:
        """Take a rank's link down at the switch: frames vanish in both directions, but connections are not reset."""
        if self.forwarder is not None:
            self.forwarder.cut(rank)
        else:
            self._set_port(rank, "down")

    def mend(self, rank: int) -> None:
        """Bring a rank's link up again."""
        if self.forwarder is not None:
            self.forwarder.mend(rank)
        else:
            self._set_port(rank, "up")

    def free_port(self) -> int:
        """Return a port for a rank to listen at: torchrun's default inside a namespace, any free one over loopback."""
        if self.limited:
            return PORT
        with socket.socket() as taken:
            taken.bind((self.addresses[0], 0))
            return taken.getsockname()[1]

    def _set_port(self, rank: int, state: str) -> None:
        if self.switch is None:
            raise ValueError("over loopback there is no link to cut; make the network with a rate")
        run_batches([(self.switch, "ip", [f"link set port{rank} {state}"])])


@contextmanager
def network(
    ranks: int,
    rate_bits_per_s: float | None,
    exact_framing: bool = True,
    down_bits_per_s: float | None = None,
    delay: Delay = NO_DELAY,
) -> Iterator[RunNetwork]:
    """Yield a network of `ranks` until the block ends. Every link has `rate_bits_per_s` in each direction; None is loopback.

    `down_bits_per_s`: the rate from the switch to each rank, if it differs from the rate to the switch.

    `exact_framing` makes the interface count every frame. Without it up to 8 frames of a stream cross as one packet, whose headers count
    once (1.012 bytes per byte of payload instead of 1.068); the limit still charges all of them. That is less work for the machine: two
    cores keep up with single frames to about 1 Gbit/s in total. An all-reduce of 10 MB by 4 ranks got this share of the link with and
    without it: at 200 Mbit/s 93 and 94 %; at 500 Mbit/s 93 and 94 % on idle cores, 72 and 92 % beside other programs; at 1 Gbit/s 48 and
    94 %, beside others 29 and 78 %.

    `delay`: a program (`forwarder.c`) carries packets from rank to rank at these rates with this delay, and drops none. Its interfaces
    count as without `exact_framing`, with up to 43 frames in a packet; the limit charges all of them.

    Stop the ranks' processes before leaving the block: remaining ones keep running, disconnected. Raises ValueError for rates outside
    1kbit to 100gbit, and NetworkUnavailableError if the machine or the user's rights do not suffice (see `reexecution_prefix`).
    """
    check_delay(delay, rate_bits_per_s is not None)
    if rate_bits_per_s is None:
        yield RunNetwork("lo", ("127.0.0.1",) * ranks, ((),) * ranks)
        return
    both = (rate_bits_per_s, rate_bits_per_s if down_bits_per_s is None else down_bits_per_s)
    up, down = (token_bucket(ranks, rate, BATCH_FRAMES, exact_framing) for rate in both)
    addresses = tuple(_address(rank) for rank in range(ranks))
    if delay:
        with namespaces(ranks) as anchors, forwarder(anchors, *both, delay) as carrier:
            run_batches([(anchor, "ip", _delayed_lines(rank, ranks, min(both))) for rank, anchor in enumerate(anchors)])
            prefixes = tuple(tuple(inside(anchor, [])) for anchor in anchors)
            yield RunNetwork(INTERFACE, addresses, prefixes, anchors, forwarder=carrier)
        return
    with namespaces(ranks + 1) as (switch, *anchors):
        _connect(switch, anchors, up, down)
        prefixes = tuple(tuple(inside(anchor, [])) for anchor in anchors)
        yield RunNetwork(INTERFACE, addresses, prefixes, tuple(anchors), switch)


def _connect(switch: int, anchors: Sequence[int], up: str, down: str) -> None:
    """Connect every rank to the switch by a cable. Each end limits the traffic that leaves there."""
    run_batches([(switch, "ip", _switch_lines(anchors))])
    run_batches([(anchor, "ip", _rank_lines(rank)) for rank, anchor in enumerate(anchors)])
    run_batches([(switch, "tc", [f"qdisc add dev port{rank} {down}" for rank in range(len(anchors))])])
    run_batches([(anchor, "tc", [f"qdisc add dev {INTERFACE} {up}"]) for anchor in anchors])


def _switch_lines(anchors: Sequence[int]) -> list[str]:
    # Count only the ranks' traffic: without IPv6 addresses (addrgenmode none, before the switch comes up) there is no neighbour discovery,
    # and without snooping the switch does not announce itself to multicast groups.
    lines = [
        "link add switch0 type bridge mcast_snooping 0",
        "link set switch0 addrgenmode none",
        "link set switch0 up",
    ]
    for rank, anchor in enumerate(anchors):
        lines.append(f"link add port{rank} type veth peer name {INTERFACE} netns {anchor}")
        lines.append(f"link set port{rank} addrgenmode none master switch0 up")
    return lines


def _delayed_lines(rank: int, ranks: int, slowest_bits_per_s: float) -> list[str]:
    # Long packets save the forwarder work but hold up short ones and other ranks, so choose a middle way.
    frames = max(1, min(MOST_FRAMES, int(slowest_bits_per_s / 8 * PACKET_S / FRAME_BYTES)))
    packets = min(MOST_DEVICE_PACKETS, DEVICE_PACKETS * ranks)
    return [f"link set {INTERFACE} mtu 1500 txqueuelen {packets}", *_rank_lines(rank, frames)]


def _rank_lines(rank: int, batch_frames: int = BATCH_FRAMES) -> list[str]:
    return [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none gso_max_segs {batch_frames}",
        f"address add {_address(rank)}/24 dev {INTERFACE}",
        f"link set {INTERFACE} up",
        # The same TCP on any machine: with bbr an all-to-all reached 81 % of the link, with cubic 93 %. Set by route, because the sysctl
        # of a namespace accepts only algorithms that the administrator allows to all users.
        f"route change 10.77.0.0/24 dev {INTERFACE} src {_address(rank)} congctl cubic",
    ]


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"
