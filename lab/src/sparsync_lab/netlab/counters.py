"""Read the traffic of a network interface from the kernel: frames with headers, acknowledgements and retransmissions."""

from dataclasses import astuple, dataclass
from pathlib import Path

NET_DEV = Path("/proc/self/net/dev")  # of the reading process's network namespace


@dataclass(frozen=True)
class Counters:
    """The bytes and packets that an interface has sent and received since its creation."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


def interface_counters(interface: str, anchor: int | None = None) -> Counters:
    """Read an interface's counters in the network namespace of this process, or of the process with the id `anchor`.

    Raises ValueError if there is no such interface.
    """
    file = NET_DEV if anchor is None else Path(f"/proc/{anchor}/net/dev")
    lines = file.read_text().splitlines()[2:]
    fields = {name.strip(): numbers.split() for name, numbers in (line.split(":", 1) for line in lines)}
    if interface not in fields:
        whose = "this process's" if anchor is None else f"process {anchor}'s"
        raise ValueError(f"no interface {interface!r} in {whose} network namespace, there are: {', '.join(fields)}")
    numbers = [int(number) for number in fields[interface]]
    return Counters(
        sent_bytes=numbers[8], received_bytes=numbers[0], sent_packets=numbers[9], received_packets=numbers[1]
    )
