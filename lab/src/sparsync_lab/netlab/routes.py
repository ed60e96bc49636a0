"""The network interface that leads to an address, as the kernel of this machine routes. Nothing is sent."""

import ipaddress
import socket
from pathlib import Path

LOOPBACK = "lo"
IPV4_ROUTES = Path("/proc/self/net/route")
SPEED = "/sys/class/net/{}/speed"  # in Mbit/s; -1 or unreadable if the interface has none
_UP = 1  # a flag of a route


def interface_towards(host: str, elsewhere: bool = False) -> str | None:
    """Return the name of the interface whose IPv4 address this machine has towards `host`, a name or an address; None if not known.

    On `host` itself this is the interface by which others reach it. `elsewhere`: other ranks are on other machines. Then, if the name of
    `host` leads to the loopback interface (many systems give their own name such an address), it is the interface of the default route.
    Raises RuntimeError for a name without an address.
    """
    own = _own_address(host)
    if own.is_loopback:
        return _routed(ipaddress.IPv4Address(0)) if elsewhere else LOOPBACK
    return _routed(own) if isinstance(own, ipaddress.IPv4Address) else None


def speed_bits_per_s(interface: str) -> float | None:
    """Return the rate at which the interface says that it is connected; None if it does not say, as virtual ones."""
    try:
        mbit = int(Path(SPEED.format(interface)).read_text())
    except (OSError, ValueError):
        return None
    return mbit * 1e6 if mbit > 0 else None


def _own_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that packets from here to `host` carry."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of datagrams: chooses a route, sends nothing
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError as error:
        raise RuntimeError(
            f"no route to {host!r}, the address at which the ranks meet: {error}; give torchrun an address that every host reaches"
        ) from error


def _routed(address: ipaddress.IPv4Address) -> str | None:
    """Return the interface of the most specific route to `address`."""
    found = (-1, None)
    for line in IPV4_ROUTES.read_text().splitlines()[1:]:
        name, target, _, flags, *_, mask = line.split()[:8]
        network, bits = (int.from_bytes(bytes.fromhex(text), "little") for text in (target, mask))
        if int(flags, 16) & _UP and int(address) & bits == network and bits.bit_count() > found[0]:
            found = bits.bit_count(), name
    return found[1]
