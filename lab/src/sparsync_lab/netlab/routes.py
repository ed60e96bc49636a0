"""Find the network interface that leads to an address, from the kernel's routes. Nothing is sent."""

import ipaddress
import socket
from pathlib import Path

LOOPBACK = "lo"
IPV4_ROUTES = Path("/proc/self/net/route")
_UP = 1  # a flag of a route


def interface_towards(host: str, elsewhere: bool = False) -> str | None:
    """Name the interface that this machine uses towards `host`, a name or an address; None if unknown.

    On `host` itself this is the interface by which others reach it. `elsewhere`: other ranks run on other machines. Many systems resolve
    their name to a loopback address; with `elsewhere`, the interface of the default route is then returned.
    Raises RuntimeError for a name without an address.
    """
    own = _own_address(host)
    if own.is_loopback:
        return _routed(ipaddress.IPv4Address(0)) if elsewhere else LOOPBACK
    return _routed(own) if isinstance(own, ipaddress.IPv4Address) else None


def _own_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Find the source address of packets from here to `host`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # for datagrams this chooses a route and sends nothing
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError as error:
        raise RuntimeError(
            f"no route to {host!r}, the address at which the ranks meet: {error}; give torchrun an address that every host reaches"
        ) from error


def _routed(address: ipaddress.IPv4Address) -> str | None:
    """Find the interface of the most specific route to `address`."""
    found = (-1, None)
    for line in IPV4_ROUTES.read_text().splitlines()[1:]:
        name, target, _, flags, *_, mask = line.split()[:8]
        network, bits = (int.from_bytes(bytes.fromhex(text), "little") for text in (target, mask))
        if int(flags, 16) & _UP and int(address) & bits == network and bits.bit_count() > found[0]:
            found = bits.bit_count(), name
    return found[1]
