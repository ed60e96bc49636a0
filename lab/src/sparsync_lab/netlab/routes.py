"""Which network interface leads to an address, as the kernel of this machine routes. Nothing is sent."""

import ipaddress
import socket
from pathlib import Path

LOOPBACK = "lo"
IPV4_ROUTES = Path("/proc/self/net/route")
IPV6_ADDRESSES = Path("/proc/self/net/if_inet6")
SPEED = "/sys/class/net/{}/speed"  # in Mbit/s; -1 or unreadable where the interface has none
_UP = 1  # a flag of a route


def interface_towards(host: str, elsewhere: bool = False) -> str | None:
    """Return the name of the interface whose address this machine has towards `host`, a name or an address; None where it is not known.

    On `host` itself this is the interface by which others reach it. With `elsewhere`, other ranks are on other machines: where the name
    of `host` leads to the loopback interface (many systems give their own name such an address), the interface of the default route is
    returned. Raises RuntimeError for a name without address.
    """
    own = _own_address(host)
    if own.is_loopback and elsewhere:
        return _routed(ipaddress.IPv4Address(0))
    if own.is_loopback:
        return LOOPBACK
    return _routed(own) if isinstance(own, ipaddress.IPv4Address) else _holder(own)


def speed_bits_per_s(interface: str) -> float | None:
    """Return the rate at which the interface says that it is connected; None for one that does not say, such as a virtual one."""
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
    found: tuple[int, str] | None = None
    for line in _lines(IPV4_ROUTES)[1:]:
        name, target, _, flags, *_, mask = line.split()[:8]
        network, bits = (int.from_bytes(bytes.fromhex(text), "little") for text in (target, mask))
        if int(flags, 16) & _UP and int(address) & bits == network and (found is None or bits.bit_count() > found[0]):
            found = bits.bit_count(), name
    return found and found[1]


def _holder(address: ipaddress.IPv6Address) -> str | None:
    """Return the interface that has `address`."""
    for line in _lines(IPV6_ADDRESSES):
        text, *_, name = line.split()
        if int(text, 16) == int(address):
            return name
    return None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
